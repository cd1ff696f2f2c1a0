"""A controller's state in another process: a snapshot, with all changes received since."""

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
    """Reads on its own thread; `version` grows with each change. Threads may read the state under `lock`."""

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
