"""Jobs as text: the saved content of a job's file, and the possible writers of that file. No pickles."""

import contextlib
import fcntl
import importlib
import json
import logging
import os
import socket
import stat
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from monarch_nb._private import write_private
from monarch_nb.connect.routes import HostRoutes, Tunnel
from monarch_nb.job.adapter import Running
from monarch_nb.runtime import current_runtime
from monarch_nb.wire import json_decoder

logger = logging.getLogger("monarch_nb.job")
FORMAT = "monarch-nb job 1"
_LARGEST = 1 << 20


class JobFileError(RuntimeError):
    """A file that should hold a job holds none, or could have been written by others; the text says what to do."""


@dataclass(frozen=True, slots=True)
class JobOrigin:
    """The process that started a job."""

    pid: int
    command: str
    folder: str
    machine: str

    @classmethod
    def here(cls) -> "JobOrigin":
        """Returns the origin of jobs that this process starts."""
        command = " ".join(sys.orig_argv)
        return cls(os.getpid(), command if len(command) <= 200 else f"{command[:197]}...", os.getcwd(), _machine())


class JobRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A job in a file."""

    format: str
    kind: str  # module:class
    fields: dict[str, object]
    apply_id: str | None = None
    started: float = 0.0  # wall clock, seconds
    origin: JobOrigin | None = None


def _machine() -> str:
    return socket.gethostname()


def encode(record: JobRecord, class_name: str) -> bytes:
    """Formats a record as JSON. Raises TypeError, naming the attribute, for anything but plain data."""
    for name, value in record.fields.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"{class_name} cannot be saved: its attribute {name!r} is not plain data ({error}). Jobs are saved as "
                "JSON; name what need not be saved in the class's _transient"
            ) from None
    return msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n"


def decode(data: bytes, source: str) -> JobRecord:
    """Reads the record in a file. Raises JobFileError."""
    if data[:1] == b"\x80":
        raise JobFileError(
            f"{source} is a pickle, as torchmonarch writes. Opening it would run what is in it, so it is not opened; "
            "remove it, or choose another path"
        )
    try:
        record = json_decoder(JobRecord).decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise JobFileError(f"{source} holds no job: {error}. Remove it, or choose another path") from None
    if record.format != FORMAT:
        raise JobFileError(f"{source} was written by another version ({record.format!r}): remove it")
    return record


def find_class(kind: str, *, load: bool) -> object:
    """Returns the class a record names; its module is imported only with `load`. Raises JobFileError."""
    module, _, path = kind.partition(":")
    package = sys.modules["monarch_nb.job"]
    if module.startswith("monarch_nb.job.") and hasattr(package, path):
        module = package.__name__  # an earlier version may have had the class in another module
    try:
        definition: object = importlib.import_module(module) if load else sys.modules[module]
        for part in path.split("."):
            definition = getattr(definition, part)
    except (ImportError, KeyError, AttributeError, ValueError, TypeError) as error:
        raise JobFileError(
            f"the job's class {kind} is not here ({type(error).__name__}): import its module first"
        ) from None
    return definition


def read(path: str) -> bytes:
    """Reads a job's file. Raises FileNotFoundError, and JobFileError for one that others could have written."""
    if os.path.isdir(path):
        raise JobFileError(f"{path} is not a file")
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        facts = os.fstat(file.fileno())
        if not stat.S_ISREG(facts.st_mode):
            raise JobFileError(f"{path} is not a file")
        if facts.st_uid != os.geteuid():
            raise JobFileError(f"{path} belongs to another user (uid {facts.st_uid}), and is not read")
        if facts.st_mode & 0o022:
            mode = stat.S_IMODE(facts.st_mode)
            raise JobFileError(f"{path} can be written by others (mode {mode:o}), and is not read: remove it")
        data = file.read(_LARGEST + 1)
    if len(data) > _LARGEST:
        raise JobFileError(f"{path} holds no job: it is larger than {_LARGEST} bytes")
    return data


def write(path: str, data: bytes) -> None:
    """Replaces a job's file at once, for this user only; follows a link at `path`. Makes its folder."""
    target = Path(os.path.realpath(path))
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_private(target, data)


@contextlib.contextmanager
def lock_of(path: str) -> Iterator[None]:
    """Holds the lock of a job's file, `PATH.lock`; waits for its holder, with a message. It ends with this process.

    No lock where the folder cannot be written, or its file system has no locks.
    """
    name = f"{os.path.realpath(path)}.lock"
    try:
        fd = _locked(name, path)
    except OSError:
        yield
        return
    try:
        with contextlib.suppress(OSError):  # for the message alone
            os.truncate(fd, 0)
            os.pwrite(fd, origin_text(JobOrigin.here()).encode(errors="replace"), 0)
        yield
    finally:
        with contextlib.suppress(OSError):
            os.unlink(name)
        fcntl.flock(fd, fcntl.LOCK_UN)  # a process that was forked meanwhile has it open, too
        os.close(fd)


def _locked(name: str, path: str) -> int:
    """Returns the locked file of this name; the caller closes it. Raises OSError."""
    os.makedirs(os.path.dirname(name), mode=0o700, exist_ok=True)
    while True:
        fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                origin = os.pread(fd, 1000, 0).decode(errors="replace") or "by another process"
                logger.warning("waiting: the job of %s is being started or looked for %s", path, origin)
                fcntl.flock(fd, fcntl.LOCK_EX)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), os.stat(name)):
                    return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # its holder has removed it: the next one locks another file


def ago(moment: float) -> str:
    """Formats a moment for people: the local time and how long ago that is."""
    seconds = max(0.0, time.time() - moment)
    for unit, name in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * unit:
            elapsed = f"{seconds / unit:.0f} {name}"
            break
    else:
        elapsed = f"{seconds:.0f} seconds"
    return f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(moment))} ({elapsed} ago)"


def origin_text(origin: JobOrigin | None) -> str:
    """Describes the starter of a job, for people."""
    if origin is None:
        return "by an unknown process"
    machine = "" if origin.machine == _machine() else f" on {origin.machine}"
    return f"by process {origin.pid}{machine} (`{origin.command}`) in {origin.folder}"


def plain(fields: Mapping[str, Any], transient: frozenset[str]) -> dict[str, Any]:
    """Returns the attributes that are saved."""
    return {name: value for name, value in fields.items() if name not in transient}


class TunnelRecord(msgspec.Struct, frozen=True):
    """The tunnel to one host of a job."""

    job: Running
    name: str  # of the host
    joins: tuple[str, ...]  # its addresses in its own network


def register_tunnel(endpoint: str, job: Running, name: str, joins: tuple[str, ...], tunnel: Tunnel) -> None:
    """Registers an endpoint of this machine that leads to a host: others cannot dial it, but can open a tunnel."""
    written = msgspec.json.encode(TunnelRecord(job, name, joins)).decode()
    current_runtime().part(HostRoutes).tunnels[endpoint] = replace(tunnel, written=written)
