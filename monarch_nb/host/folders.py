"""Run folders: one short, private folder a host, with its sockets and logs; nothing of it outlives the host."""

import contextlib
import fcntl
import hashlib
import os
import secrets
import shutil
import socket
import tempfile
import time
from pathlib import Path

_MARK = "mnb"
_STALE_AFTER_S = 30.0
_chosen: dict[str, Path] = {}  # by host: those there are sockets in already
_LONGEST = 60  # leaves room for "/<proc uid>.<rank>.<incarnation>" below the 100 bytes a socket path may have


def new_host_id() -> str:
    """A fresh short host id, such as `h1f2e3d`."""
    return "h" + secrets.token_hex(3)


def lasting_host_id(tcp: str | None) -> str | None:
    """The id of whoever listens at this port of this machine, the same after each start; None without a fixed port."""
    port = (tcp or "").rpartition(":")[2]
    if not port.isdigit() or int(port) == 0:
        return None
    import platform
    import uuid

    place = f"{platform.node()} {uuid.getnode()} {os.getuid()} {port}"
    return "h" + hashlib.sha256(place.encode()).hexdigest()[:10]


def base_folder() -> Path:
    """Where run folders go: `$XDG_RUNTIME_DIR` if it is there and short enough, else the temporary folder."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    for candidate in (runtime, tempfile.gettempdir(), "/tmp"):
        if candidate and len(candidate) < _LONGEST - 30 and os.access(candidate, os.W_OK | os.X_OK):
            return Path(candidate)
    return Path(tempfile.gettempdir())


def run_folder_for(host: str, base: Path | None = None) -> Path:
    """The path of a host's run folder; nothing is made. The same each time, whatever the environment says later."""
    name = f"{_MARK}-{os.getuid()}-{host}"
    return base / name if base is not None else _chosen.setdefault(host, base_folder() / name)


def make_run_folder(path: Path) -> None:
    """Make the folder, with `logs` and `spool` in it, for this user only.

    Raises PermissionError if somebody else made it before.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    facts = path.lstat()
    if facts.st_uid != os.getuid() or facts.st_mode & 0o077:
        raise PermissionError(f"{path} is not this user's own private folder")
    for part in ("logs", "spool"):  # log files; what procs have written and the agent has not yet taken
        (path / part).mkdir(mode=0o700, exist_ok=True)


def hold(path: Path) -> int:
    """Mark the folder as in use while the returned descriptor is open. Raises BlockingIOError if it is already."""
    fd = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise
    return fd


def remove_socket(path: Path, address: str) -> None:
    """Remove the socket a dead process listened on; never raises."""
    with contextlib.suppress(OSError):
        (path / address.partition("/")[2]).unlink()


def clear_run_folder(path: Path, keep: str) -> None:
    """Remove what a dead agent and its procs left in their folder, but not the file `keep`; never raises."""
    with contextlib.suppress(OSError):
        for entry in path.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            elif entry.name != keep:
                entry.unlink(missing_ok=True)


def remove_run_folder(path: Path) -> None:
    """Remove the folder with all it holds; never raises."""
    shutil.rmtree(path, ignore_errors=True)


def _deserted(path: Path) -> bool:
    """Whether there are sockets in a folder, and nobody listens at any."""
    doors = [each for each in path.iterdir() if each.is_socket()]
    for door in doors:
        with socket.socket(socket.AF_UNIX) as knock:
            try:
                knock.connect(str(door))
                return False
            except ConnectionRefusedError:
                pass
    return bool(doors)


def sweep(base: Path | None = None) -> list[Path]:
    """Remove this user's run folders whose agent and processes are gone (killed together); returns which."""
    removed = []
    for path in (base or base_folder()).glob(f"{_MARK}-{os.getuid()}-*"):
        try:
            if time.time() - path.stat().st_mtime < _STALE_AFTER_S:
                continue
            if not (path / "lock").exists() and not _deserted(path):  # a client that starts no agent holds nothing
                continue
            fd = hold(path)
        except OSError:
            continue
        remove_run_folder(path)
        os.close(fd)
        removed.append(path)
    return removed
