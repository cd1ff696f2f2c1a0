"""Sends what has waited for a millisecond: one thread for all meshes of a process."""

import threading
import time
from collections import deque
from typing import Protocol

WAIT_S = 0.001


class Flushed(Protocol):
    """What has something to send."""

    def flush_aside(self) -> None:
        """Sends it, without waiting for anything."""


class Flusher:
    """Its thread begins with the first use, and sleeps while there is nothing to do."""

    def __init__(self) -> None:
        self._due: deque[Flushed] = deque()
        self._wake = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def soon(self, one: Flushed) -> None:
        """Has it flushed within a millisecond or so."""
        self._due.append(one)
        self._wake.set()
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="monarch-tensor-flush", daemon=True)
                    self._thread.start()

    def _run(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            time.sleep(WAIT_S)
            for _ in range(len(self._due)):
                self._due.popleft().flush_aside()
