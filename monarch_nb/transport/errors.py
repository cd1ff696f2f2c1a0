"""Errors between processes, whose texts include the remedy."""

import contextlib
import errno
import os
import resource
from collections.abc import Iterator


class TransportError(RuntimeError):
    """A message could not be passed to the network."""


class UnreachableError(TransportError):
    """The destination is gone, or no route to it is known."""


class TrustError(TransportError):
    """A peer, a key or a folder that cannot be trusted."""


class DescriptorLimitError(TransportError):
    """This process has no file descriptors left."""


class SharedMemoryError(TransportError):
    """A large buffer could not be put into, or taken from, a memory file."""


class NotConnectedError(Exception):
    """A channel cannot take a message now: the link keeps it."""


_NONE_LEFT = "no file descriptors left for"


def lost_here(reason: str) -> TransportError:
    """Returns the error for data that this process could not receive, from the reason of its transport."""
    return (DescriptorLimitError if reason.startswith(_NONE_LEFT) else TransportError)(reason)


def descriptor_limit(doing: str) -> DescriptorLimitError:
    """Returns the error for EMFILE/ENFILE while `doing`, with the limit and how to raise it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return DescriptorLimitError(
        f"{_NONE_LEFT} {doing}: this process may have {soft} open (hard limit {hard}). "
        f"Raise it with `ulimit -n {max(65536, 2 * soft)}` before the process is started "
        "(in a service file: LimitNOFILE=), or close files that are no longer needed."
    )


@contextlib.contextmanager
def descriptors_for(doing: str) -> Iterator[None]:
    """Raises DescriptorLimitError if the block runs out of descriptors."""
    try:
        yield
    except OSError as error:
        if is_descriptor_limit(error):
            raise descriptor_limit(doing) from error
        raise


@contextlib.contextmanager
def room_for(path: str | os.PathLike[str]) -> Iterator[None]:
    """Raises TransportError, which says what to do, if the block finds no room for a file or folder at `path`."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            raise
        raise TransportError(
            f"{os.fspath(path)} cannot be made: {error.strerror}. Make room there, also for more files (`df -i`), or "
            "choose another folder with XDG_RUNTIME_DIR or TMPDIR"
        ) from error


def is_descriptor_limit(error: OSError | None, number: int | None = None) -> bool:
    """Returns whether this error means that descriptors ran out, here or on the whole machine."""
    return (number if error is None else error.errno) in (errno.EMFILE, errno.ENFILE)
