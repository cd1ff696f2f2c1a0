"""The connection to a running controller: its connection file, with a socket and a secret, and its state in this
process.

There is one file for each controller, of mode 0600. The state is a snapshot, with all changes received since.
"""

import contextlib
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from monarch_nb._package import __version__
from monarch_nb._private import is_private, read_private, write_private
from monarch_nb.host.folders import base_folder
from monarch_nb.store import apply
from monarch_nb.wire import json_decoder

_CONNECT_S = 5.0  # for which a controller may not answer


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


class Watching:
    """A controller's state, read on a thread of its own; `version` grows with each change.

    Threads may read the state under `lock`.
    """

    def __init__(self, connection: ConnectionFile, changed: Callable[[], None] = lambda: None) -> None:
        self.connection = connection
        self.lock = threading.Condition()
        self.document: dict[str, Any] = {}
        self.version = 0
        self.over = ""  # why no more changes arrive; empty while they do
        self._changed = changed
        self._peer = socket.socket(socket.AF_UNIX)
        try:
            self._peer.settimeout(_CONNECT_S)
            self._peer.connect(connection.socket)
            self._peer.sendall(f"{connection.secret}\n".encode())
        except OSError:
            self._peer.close()
            raise
        self._peer.settimeout(None)
        threading.Thread(target=self._read, name="monarch-watching", daemon=True).start()

    def wait(self, timeout: float, fits: Callable[[Mapping[str, Any]], object] = lambda state: True) -> bool:
        """Waits up to `timeout` seconds for a state that fits; returns whether any state has been received."""
        with self.lock:
            self.lock.wait_for(lambda: self.over or (self.version and fits(self.document)), timeout)
            return bool(self.version)

    def close(self) -> None:
        """Ends the connection."""
        with contextlib.suppress(OSError):
            self._peer.shutdown(socket.SHUT_RDWR)

    def _read(self) -> None:
        reason = f"{self.connection.what} (process {self.connection.pid}) has ended, or does not serve any more"
        try:
            with self._peer, self._peer.makefile("rb") as lines:
                for line in lines:
                    self._take(msgspec.json.decode(line))
        except (OSError, msgspec.DecodeError) as error:
            reason = f"{reason}: {error}"
        with self.lock:
            self.over = reason
            self.lock.notify_all()
        self._changed()

    def _take(self, message: Mapping[str, Any]) -> None:
        with self.lock:
            if message["type"] == "snapshot":
                self.document = message["state"]
            elif message["type"] == "delta":
                apply(self.document, message["patch"])
            else:
                return
            self.version += 1
            self.lock.notify_all()
        self._changed()
