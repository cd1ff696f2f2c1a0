"""Run folders: one short, private folder a host, with its sockets and logs; nothing of it outlives the host.

They may be in a folder that everybody can write to: entries of other users with such names are skipped. A process
that uses one holds a lock on it, which the system releases whatever ends that process.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import platform
import secrets
import shutil
import socket
import stat
import tempfile
import time
import uuid
from pathlib import Path

from monarch_nb._private import is_private, open_private
from monarch_nb.transport import room_for
from monarch_nb.wire import host_id, parse_address

_MARK = "mnb"
_STALE_AFTER_S = 1.0
_chosen: dict[str, Path] = {}  # by host, for hosts that have sockets already
_locks: dict[Path, int] = {}  # folders that this process uses: descriptors that hold the locks
_LONGEST = 60  # leaves room for "/<proc uid>.<rank>.<incarnation>" below the 100 bytes a socket path may have
_ENDING = ".ending-"  # follows the name of a folder that is being removed
_REMOVALS = 5
_PATIENCE_S = 5.0  # for another process to remove the remains there
_FILE = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class FolderInUseError(BlockingIOError):
    """A run folder has an agent already."""


os.register_at_fork(after_in_child=_locks.clear)  # the locks are the parent's


def new_host_id() -> str:
    """Returns a new short host id, such as `node7.1f2e3d`."""
    return host_id(secrets.token_hex(3))


def lasting_host_id(tcp: str | None) -> str | None:
    """Returns the id of the host with this port of this machine, the same after each start; None if not fixed."""
    port = (tcp or "").rpartition(":")[2]
    if not port.isdigit() or int(port) == 0:
        return None
    identity = f"{platform.node()} {uuid.getnode()} {os.getuid()} {port}"
    return host_id(hashlib.sha256(identity.encode()).hexdigest()[:10])


def base_folder() -> Path:
    """Returns the parent of run folders: `$XDG_RUNTIME_DIR` if private and short enough, else the temporary folder."""
    return _bases()[0]


def _bases() -> list[Path]:
    """Returns candidates for the parent of run folders, the best first."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    bases = [Path(runtime)] if runtime and _fits(runtime) and is_private(Path(runtime)) else []
    bases += [Path(folder) for folder in (tempfile.gettempdir(), "/tmp") if _fits(folder) and _safe(folder)]
    return list(dict.fromkeys(bases)) or [Path(tempfile.gettempdir())]


def _fits(folder: str) -> bool:
    return len(folder) < _LONGEST - 30 and os.access(folder, os.W_OK | os.X_OK)


def _safe(folder: str) -> bool:
    """Returns whether other users cannot replace this user's files in a folder."""
    status = os.stat(folder)
    return not status.st_mode & 0o022 or bool(status.st_mode & stat.S_ISVTX)


def run_folder_for(host: str, base: Path | None = None) -> Path:
    """Returns the path of a host's run folder, without making it; the same each time, whatever the environment then is.

    If something else has that name already, which happens to a host with a fixed port, it returns another one.
    """
    if base is not None:
        return base / f"{_MARK}-{os.geteuid()}-{host}"
    folder = _chosen.get(host)
    if folder is None:
        folder = base_folder() / f"{_MARK}-{os.geteuid()}-{host}"
        while os.path.lexists(folder) and not is_private(folder):
            folder = folder.with_name(f"{_MARK}-{os.geteuid()}-{secrets.token_hex(3)}+{host}")
        folder = _chosen.setdefault(host, folder)
    return folder


def find_run_folder(host: str) -> Path | None:
    """Returns the run folder of a host that another process of this user has started on this machine, or None."""
    for parent in (run_folder_for(host).parent, *_bases()):
        for folder in parent.glob(f"{_MARK}-{os.geteuid()}-*{host}"):
            if host_of_folder(folder) == host and is_private(folder):
                return folder
    return None


def host_of_folder(folder: Path) -> str:
    """Returns the host that a run folder is named after, or ""."""
    mark, _, rest = folder.name.partition("-")
    user, _, host = rest.partition("-")
    return host.rpartition("+")[2] if (mark, user) == (_MARK, str(os.geteuid())) else ""


def make_run_folder(path: Path) -> None:
    """Makes the folder, with `logs` and `spool` in it, for this user only; it is in use until it is removed here.

    Raises PermissionError if the path is taken by something that is not this user's own and private, and TransportError
    if there is no room.
    """
    with room_for(path):
        _make_run_folder(path)


def _make_run_folder(path: Path) -> None:
    fd = _locks.get(path, -1)
    if fd < 0 or not _is_at(path, fd):
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = _open_locked(path)
        release(path)
        _locks[path] = fd
    for part in ("logs", "spool"):  # log files; output of procs that the agent has not yet taken
        with contextlib.suppress(FileExistsError):
            os.mkdir(part, 0o700, dir_fd=fd)


def _is_at(path: Path, fd: int) -> bool:
    """Returns whether an open folder is still the folder at that path."""
    try:
        return os.path.samestat(os.fstat(fd), path.lstat())
    except FileNotFoundError:
        return False


def _open_locked(path: Path) -> int:
    """Returns a descriptor of the folder, with a lock that marks it as used."""
    until = time.monotonic() + _PATIENCE_S
    while time.monotonic() < until:
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        try:
            fd = open_private(path)
        except FileNotFoundError:  # swept meanwhile
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:  # being swept
            os.close(fd)
            time.sleep(0.01)
            continue
        except OSError:  # no locks on that file system
            return fd
        if _is_at(path, fd):
            return fd
        os.close(fd)
    raise BlockingIOError(errno.EAGAIN, f"{path} is held by another process that removes it")


def release(path: Path) -> None:
    """Marks the folder as no longer used by this process; its content stays, for others."""
    fd = _locks.pop(path, -1)
    if fd >= 0:
        os.close(fd)


def hold(path: Path) -> int:
    """Locks a folder for its agent while the returned descriptor is open. Raises FolderInUseError if there is one."""
    folder = open_private(path)
    try:
        with room_for(path / "lock"):
            return _hold(folder)
    except BlockingIOError as error:
        raise FolderInUseError(error.errno, f"the run folder {path} has an agent already") from None
    finally:
        os.close(folder)


def _hold(folder: int) -> int:
    fd = os.open("lock", _FILE, 0o600, dir_fd=folder)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise
    return fd


def remove_socket(path: Path, address: str) -> None:
    """Removes the socket of a dead process; never raises."""
    with contextlib.suppress(OSError):
        (path / parse_address(address).name).unlink()


def clear_run_folder(path: Path, keep: str) -> None:
    """Removes the remains of a dead agent and its processes in their folder, but not the file `keep`; never raises."""
    if not is_private(path):
        return
    with contextlib.suppress(OSError):
        for entry in path.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            elif entry.name != keep:
                entry.unlink(missing_ok=True)


def remove_run_folder(path: Path) -> None:
    """Removes the folder with all it holds, if it is this user's own; never raises."""
    if is_private(path):
        _remove(path)
    release(path)


def _remove(path: Path) -> None:
    """Renames the folder first, so that processes which start or end there can make nothing new in it.

    Else one file that is made between the listing and the end of the removal would keep all of it.
    """
    ending = path.with_name(f"{path.name}{_ENDING}{secrets.token_hex(3)}")
    try:
        path.rename(ending)
    except OSError:
        ending = path
    for _ in range(_REMOVALS):  # something may still be made in it by a descriptor
        shutil.rmtree(ending, ignore_errors=True)
        if not os.path.lexists(ending):
            return


def _deserted(path: Path) -> bool:
    """Returns whether no process listens at any socket in a folder. Does not block."""
    sockets = [entry for entry in path.iterdir() if entry.is_socket()]
    for listener in sockets:
        with socket.socket(socket.AF_UNIX) as knock:
            knock.setblocking(False)  # a listener may refuse to accept
            try:
                knock.connect(str(listener))
            except ConnectionRefusedError:
                continue
            except BlockingIOError:
                pass
            return False
    return True


def sweep(base: Path | None = None) -> list[Path]:
    """Removes this user's run folders that no process uses any more; returns them. Does not block."""
    removed = []
    for parent in _bases() if base is None else [base]:
        try:
            names = os.listdir(parent)
        except OSError:
            continue
        folders = (parent / name for name in names if name.startswith(f"{_MARK}-{os.geteuid()}-"))
        removed += [path for path in folders if _swept(path)]
    return removed


def _swept(path: Path) -> bool:
    """Removes one folder if it is this user's and unused."""
    try:
        folder = open_private(path)
    except OSError:  # gone, or made by another user
        return False
    agent = -1
    try:
        if time.time() - os.fstat(folder).st_mtime < _STALE_AFTER_S:
            return False
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        agent = _hold(folder)
        if not _deserted(path):
            return False
        _remove(path)
    except OSError:
        return False
    finally:
        for fd in filter(lambda fd: fd >= 0, (agent, folder)):
            os.close(fd)
    return True
