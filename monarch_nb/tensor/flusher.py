"""The thread that sends what streams have queued, and looks after them while nothing is issued."""

import threading
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from monarch_nb.tensor.stream import Stream

WAIT_S = 0.001
TICK_S = 0.5  # after which released tensors are freed on workers although nothing else is sent


class Flusher:
    """Flushes streams on a thread of its own, which starts on first use and sleeps while idle."""

    def __init__(self) -> None:
        self._due: deque[Stream] = deque()
        self._registered: weakref.WeakSet[Stream] = weakref.WeakSet()
        self._wake = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def register(self, stream: "Stream") -> None:
        """Adds a stream for periodic ticks, by weak reference."""
        self._registered.add(stream)

    def schedule(self, stream: "Stream") -> None:
        """Flushes a stream within about a millisecond."""
        self._due.append(stream)
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
                for stream in tuple(self._registered):
                    stream.tick()
            for _ in range(len(self._due)):
                self._due.popleft().flush_nowait()


FLUSHER = Flusher()
