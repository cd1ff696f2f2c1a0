"""The time of this machine, and delayed calls: one sleeping thread per process, started when first needed."""

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)


def repeat(
    schedule: Callable[[float, Callable[[], object]], object], seconds: float, function: Callable[[], bool]
) -> None:
    """Runs `function` by a clock's `later`, every `seconds`, while it returns True."""

    def again() -> None:
        if function():
            schedule(seconds, again)

    schedule(seconds, again)


class ThreadClock:
    """Runs short functions at given times, on a thread of its own; they must not block."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._heap: list[tuple[float, int, Callable[[], object]]] = []
        self._count = itertools.count()
        self._thread: threading.Thread | None = None
        self._closed = False

    @staticmethod
    def monotonic() -> float:
        """Returns the seconds since some moment; never decreases."""
        return time.monotonic()

    def later(self, seconds: float, function: Callable[[], object]) -> None:
        """Runs `function` once, `seconds` from now, on the clock's thread."""
        with self._changed:
            if self._closed:
                return
            heapq.heappush(self._heap, (time.monotonic() + seconds, next(self._count), function))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="monarch-clock", daemon=True)
                self._thread.start()
            self._changed.notify()

    def every(self, seconds: float, function: Callable[[], bool]) -> None:
        """Runs `function` every `seconds` while it returns True."""
        repeat(self.later, seconds, function)

    def close(self) -> None:
        """Drops all delayed calls; ends the thread."""
        with self._changed:
            self._closed = True
            self._heap.clear()
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._closed and (not self._heap or self._heap[0][0] > time.monotonic()):
                    self._changed.wait(max(0.0, self._heap[0][0] - time.monotonic()) if self._heap else None)
                if self._closed:
                    return
                _, _, function = heapq.heappop(self._heap)
            try:
                function()
            except BaseException:
                logger.exception("a timed function failed")
