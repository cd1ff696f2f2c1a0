"""Run folders: where the processes of a host listen, and nobody else can come in."""

import contextlib
import os
from pathlib import Path

from monarch_nb._private import open_private
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
    try:
        os.close(open_private(folder))
    except PermissionError as error:
        raise TrustError(str(error)) from None
