"""A controller's state as another process has it: the snapshot, with all changes that have come since."""

import contextlib
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from monarch_nb.store import apply
from monarch_nb.top.connection import ConnectionFile

_CONNECT_S = 5.0


class Watching:
    """Reads on a thread of its own; `version` grows with each change. Any thread may look, under `lock`."""

    def __init__(self, connection: ConnectionFile, changed: Callable[[], None] = lambda: None) -> None:
        self.connection = connection
        self.lock = threading.Condition()
        self.document: dict[str, Any] = {}
        self.version = 0
        self.over = ""  # why there is nothing new any more
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
        """Blocks until a state that fits has come, for so many seconds; whether any has."""
        with self.lock:
            self.lock.wait_for(lambda: self.over or (self.version and fits(self.document)), timeout)
            return bool(self.version)

    def close(self) -> None:
        """Watches no longer."""
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
