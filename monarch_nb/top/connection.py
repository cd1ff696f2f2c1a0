"""Connection files: the socket of a controller and its secret. One for each controller, mode 0600."""

import contextlib
import os
import secrets
import socket
import sys
import time
from pathlib import Path

import msgspec

from monarch_nb._package import __version__
from monarch_nb._private import is_private, read_private, write_private
from monarch_nb.host.folders import base_folder
from monarch_nb.wire import json_decoder


class ConnectionFile(msgspec.Struct, frozen=True, kw_only=True):
    """Content of a connection file."""

    socket: str  # a path, in a folder that is this user's own
    secret: str
    pid: int
    what: str  # description of the controller for people
    since: float
    version: str

    @property
    def lives(self) -> bool:
        """True if the controller listens."""
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as knock:
            knock.settimeout(1.0)
            knock.connect(self.socket)
            return True
        return False


def folder() -> Path:
    """Folder of connection files. Raises PermissionError where another user owns it, OSError if it cannot be made."""
    path = base_folder() / f"monarch-nb-{os.geteuid()}" / "top"
    for directory in (path.parent, path):
        with contextlib.suppress(FileExistsError):
            directory.mkdir(mode=0o700)
        if not is_private(directory):
            raise PermissionError(f"{directory} is not this user's own folder of mode 0700, and is not used")
    return path


def new_connection(description: str = "") -> tuple[Path, ConnectionFile]:
    """Returns the path for this process's file, and its content; writes nothing."""
    name = secrets.token_hex(4)  # short, as the path of a socket must be
    directory = folder()
    program = description or f"the program {Path(sys.argv[0]).name or 'python'}"
    return directory / f"{name}.json", ConnectionFile(
        socket=str(directory / f"{name}.sock"), secret=secrets.token_hex(32), pid=os.getpid(), what=program,
        since=time.time(), version=__version__,
    )  # fmt: skip


def write(path: Path, connection: ConnectionFile) -> None:
    """Writes a file that only this user can read, atomically."""
    write_private(path, msgspec.json.encode(connection))


def read(path: Path) -> ConnectionFile:
    """Reads a file. Raises ValueError or OSError, whose text describes the problem."""
    try:
        return json_decoder(ConnectionFile).decode(read_private(path))
    except msgspec.DecodeError as error:
        raise ValueError(f"{path} is no connection file: {error}") from error


def connections() -> list[tuple[Path, ConnectionFile]]:
    """Connections of this user's running controllers, the newest first; files of ended ones are removed."""
    running = []
    for path in folder().glob("*.json"):
        try:
            connection = read(path)
        except (OSError, ValueError):
            continue
        if connection.lives:
            running.append((path, connection))
        else:
            for stale in (path, Path(connection.socket)):
                with contextlib.suppress(OSError):
                    stale.unlink()
    return sorted(running, key=lambda pair: -pair[1].since)
