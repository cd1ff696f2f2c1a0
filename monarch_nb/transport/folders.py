"""Run folders: where the processes of a host listen, and nobody else can come in."""

import contextlib
import os
import stat
from pathlib import Path

from monarch_nb.transport.errors import TrustError


class SocketFile:
    """The file of a listening unix socket, which libzmq leaves behind."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = path.lstat().st_ino

    def remove(self) -> None:
        """Remove it, unless another process listens there by now."""
        with contextlib.suppress(OSError):
            if self._path.lstat().st_ino == self._inode:
                self._path.unlink()


def private_folder(folder: Path) -> None:
    """Create a run folder that nobody else can enter, or check that it is one. Raises TrustError."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()  # not stat: a link that somebody put there leads anywhere
    if not stat.S_ISDIR(found.st_mode):
        raise TrustError(f"{folder} is not a folder of its own: refusing to listen there")
    if found.st_uid != os.geteuid():
        raise TrustError(f"{folder} belongs to user {found.st_uid}: refusing to listen there; choose another")
    if found.st_mode & 0o077:
        raise TrustError(
            f"{folder} can be entered by others (mode {stat.S_IMODE(found.st_mode):o}): refusing to listen there; "
            "`chmod 700` it if it is yours"
        )
