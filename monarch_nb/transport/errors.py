"""What can go wrong between processes, said so that the reader knows what to do next."""

import errno
import resource


class TransportError(RuntimeError):
    """A message could not be handed to the network."""


class UnreachableError(TransportError):
    """The destination is gone, or nobody here knows a way to it."""


class TrustError(TransportError):
    """A peer, a key or a folder that cannot be trusted."""


class DescriptorLimitError(TransportError):
    """This process has no file descriptors left."""


class SharedMemoryError(TransportError):
    """A large buffer could not be put into, or taken from, a memory file."""


def descriptor_limit(doing: str) -> DescriptorLimitError:
    """The error for EMFILE/ENFILE while `doing`, naming the limit and how to raise it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return DescriptorLimitError(
        f"no file descriptors left for {doing}: this process may have {soft} open (hard limit {hard}). "
        f"Raise it with `ulimit -n {max(65536, 2 * soft)}` before the process is started "
        "(in a service file: LimitNOFILE=), or close files that are no longer needed."
    )


def is_descriptor_limit(error: OSError | None, number: int | None = None) -> bool:
    """Whether this error means that descriptors ran out, here or on the whole machine."""
    return (number if error is None else error.errno) in (errno.EMFILE, errno.ENFILE)
