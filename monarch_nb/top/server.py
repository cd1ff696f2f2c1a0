"""Serves the store to holders of the connection file, over a local socket: a snapshot, then changes.

Read-only: watchers can send no commands.
"""

import contextlib
import hmac
import logging
import os
import socket
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import msgspec

from monarch_nb._package import __version__, on_exit
from monarch_nb.runtime import Runtime, current_runtime
from monarch_nb.store import Store, store_of
from monarch_nb.top import connection as files

MOST_WAITING = 32 << 20  # queued bytes for one watcher; beyond that it gets a new snapshot
_GREETING = 4096  # bytes of the first line, at most
_GREETING_S = 5.0
_WATCHERS = 16
_ACCEPT_AGAIN_S = 0.2

logger = logging.getLogger(__name__)


class StoreServer:
    """Serves one store until it is closed. `path` is the connection file."""

    def __init__(self, store: Store, description: str = "") -> None:
        self._store = store
        self.path, self._connection = files.new_connection(description)
        self._lock = threading.Lock()
        self._watchers: set[_Watcher] = set()
        self._closed = False
        self._listening = socket.socket(socket.AF_UNIX)
        try:
            self._listening.bind(self._connection.socket)
            os.chmod(self._connection.socket, 0o600)
            self._listening.listen(4)
            files.write(self.path, self._connection)
        except OSError:
            self._listening.close()
            raise
        threading.Thread(target=self._accept, name="monarch-top", daemon=True).start()

    def close(self) -> None:
        """Disconnects the watchers and removes the file."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            watchers = tuple(self._watchers)
        for path in (self.path, Path(self._connection.socket)):
            with contextlib.suppress(OSError):
                path.unlink()
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listening.close()
        for watcher in watchers:
            watcher.end()

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._listening.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(_ACCEPT_AGAIN_S)  # no descriptor is free
                continue
            watcher = _Watcher(self._store, peer, self._connection.secret, self._forget)
            with self._lock:
                refused = self._closed or len(self._watchers) >= _WATCHERS
                if not refused:
                    self._watchers.add(watcher)
            if refused:
                peer.close()
            else:
                threading.Thread(target=watcher.run, name="monarch-top-watcher", daemon=True).start()

    def _forget(self, watcher: "_Watcher") -> None:
        with self._lock:
            self._watchers.discard(watcher)


class _Watcher:
    """A connected terminal. Messages are queued and written by its own thread, so that it blocks no other."""

    def __init__(self, store: Store, peer: socket.socket, secret: str, ended: Any) -> None:
        self._store = store
        self._peer = peer
        self._secret = secret
        self._ended = ended
        self._waiting: deque[bytes] = deque()
        self._size = 0
        self._behind = False
        self._over = False
        self._changed = threading.Condition()

    def end(self) -> None:
        """Closes its connection."""
        with contextlib.suppress(OSError):  # as close() alone would not end a read in progress
            self._peer.shutdown(socket.SHUT_RDWR)
        with self._changed:
            self._over = True
            self._changed.notify()

    def run(self) -> None:
        """Serves the watcher until it disconnects."""
        leave = None
        try:
            if not self._is_known():
                return
            self._queue({"type": "hello", "protocol": 1, "version": __version__})
            leave = self._store.watch(self._queue)
            threading.Thread(target=self._listen, name="monarch-top-listener", daemon=True).start()
            while self._write():
                pass
        except OSError:
            return
        finally:
            if leave is not None:
                leave()
            self.end()
            self._peer.close()
            self._ended(self)

    def _is_known(self) -> bool:
        """Returns whether the watcher sends the secret of the connection file, in one line, in time."""
        self._peer.settimeout(_GREETING_S)
        line = b""
        while not line.endswith(b"\n") and len(line) < _GREETING:
            data = self._peer.recv(256)
            if not data:
                return False
            line += data
        self._peer.settimeout(None)
        return hmac.compare_digest(line.strip(), self._secret.encode())

    def _listen(self) -> None:
        """Waits until the watcher disconnects; ignores input."""
        with contextlib.suppress(OSError):
            while self._peer.recv(4096):
                pass
        self.end()

    def _queue(self, message: dict[str, object]) -> None:
        with self._changed:
            if self._behind and message["type"] == "delta":
                return
            line = msgspec.json.encode(message) + b"\n"
            self._behind = self._size + len(line) > MOST_WAITING and message["type"] == "delta"
            if not self._behind:
                self._waiting.append(line)
                self._size += len(line)
            self._changed.notify()

    def _write(self) -> bool:
        with self._changed:
            while not self._waiting and not self._behind and not self._over:
                self._changed.wait()
            if self._over:
                return False
            line = self._waiting.popleft() if self._waiting else b""
            self._size -= len(line)
        if line:
            self._peer.sendall(line)
        else:  # the queue is empty: dropped changes are in a new snapshot
            with self._changed:
                self._behind = False
            self._store.resend(self._queue)
        return True


_serving: StoreServer | None = None


def serve(runtime: Runtime | None = None, what: str = "") -> Path:
    """Lets `monarch-nb top` show this process's cluster, read-only; returns the connection file, which is mode 0600.

    The first call decides what is served: later calls return the same file. Starts the controller if there is none.
    The service ends with the process.
    """
    global _serving
    store = store_of(current_runtime() if runtime is None else runtime)
    if _serving is None or _serving._store is not store:
        stop()
        _serving = StoreServer(store, what)
        on_exit(stop)
    return _serving.path


def stop() -> None:
    """Ends the service and removes the file."""
    global _serving
    serving, _serving = _serving, None
    if serving is not None:
        serving.close()
