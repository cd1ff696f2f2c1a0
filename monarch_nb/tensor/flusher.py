"""Sends what has waited for a millisecond: one thread for all meshes of a process."""

import threading
import time
import weakref
from collections import deque
from typing import Protocol

WAIT_S = 0.001
TICK_S = 0.5  # after which workers let go of tensors that ended since, though nothing else is sent


class Flushed(Protocol):
    """What has something to send."""

    def flush_aside(self) -> None:
        """Sends it, without waiting for anything."""

    def tick(self) -> None:
        """Nothing has been sent for a while."""


class Flusher:
    """Its thread begins with the first use, and sleeps while there is nothing to do."""

    def __init__(self) -> None:
        self._due: deque[Flushed] = deque()
        self._known: weakref.WeakSet[Flushed] = weakref.WeakSet()
        self._wake = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def know(self, one: Flushed) -> None:
        """Has it told of the time, for as long as it lives."""
        self._known.add(one)

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
            if self._wake.wait(TICK_S):
                self._wake.clear()
                time.sleep(WAIT_S)
            else:
                for one in tuple(self._known):
                    one.tick()
            for _ in range(len(self._due)):
                self._due.popleft().flush_aside()
