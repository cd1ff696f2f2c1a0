"""Folders and files of this user alone. The opened file itself is checked, so that no other can replace it."""

import contextlib
import fcntl
import os
import stat
import tempfile
from pathlib import Path

_OPENED = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def open_private(folder: Path) -> int:
    """Returns a descriptor of a folder that belongs to this user and that nobody else can enter; the caller closes it.

    Follows no link and does not wait. Raises FileNotFoundError where nothing exists, and PermissionError for any other
    file or folder.
    """
    try:
        fd = os.open(folder, _OPENED)
    except FileNotFoundError:
        raise
    except OSError:
        objection = _objection(folder)
        if not objection:
            raise
        raise PermissionError(objection) from None
    status = os.fstat(fd)
    objection = _wrong(folder, status)
    if not objection:
        return fd
    os.close(fd)
    raise PermissionError(objection)


def is_private(folder: Path) -> bool:
    """Returns whether a folder exists, belongs to this user, and can be entered by nobody else."""
    try:
        os.close(open_private(folder))
    except OSError:
        return False
    return True


def no_link(path: str, flags: int) -> int:
    """Opens a file for `open(…, opener=no_link)`: refuses a link, and does not wait for a pipe. Raises OSError."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def read_private(path: Path) -> bytes:
    """Returns the content of a file that nobody else can read or has written. Follows no link, and does not wait.

    Raises PermissionError for any other file, and OSError.
    """
    with open(path, "rb", opener=no_link) as file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.geteuid() or status.st_mode & 0o077 or not stat.S_ISREG(status.st_mode):
            raise PermissionError(f"{path} can be read or was written by others: it is not used")
        return file.read()


def write_private(path: Path, data: bytes) -> None:
    """Writes a file that only this user can read, whole or not at all. Raises OSError, which names the file."""
    fd, draft = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")  # mode 0600
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
        os.replace(draft, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        if isinstance(error, OSError):
            error.filename = str(path)  # a write has none, and the draft's is of no use
        raise


def _objection(folder: Path) -> str:
    with contextlib.suppress(OSError):
        return _wrong(folder, folder.lstat())  # not stat, which would follow a link
    return ""


def _wrong(folder: Path, status: os.stat_result) -> str:
    """Returns why the folder is not private, "" if it is."""
    if status.st_uid != os.geteuid():
        return f"{folder} belongs to user {status.st_uid}, and is not used: choose another"
    if not stat.S_ISDIR(status.st_mode):
        return f"{folder} is a link or a file, not a folder of this user's own, and is not used"
    if status.st_mode & 0o077:
        mode = f"{stat.S_IMODE(status.st_mode):o}"
        return f"{folder} can be entered by others (mode {mode}), and is not used: `chmod 700` it if it is yours"
    return ""


def try_lock(fd: int) -> bool:
    """Takes the lock of an open file unless another process has it; True also on file systems without locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
