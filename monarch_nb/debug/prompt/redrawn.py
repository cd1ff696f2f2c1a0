"""A table that is kept up to date while a question is open."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from monarch_nb.debug.control.stopped import StoppedThreads
from monarch_nb.debug.records import Stopped

T = TypeVar("T")
QUIET_S = 0.1  # ranks that stop within that time of each other are drawn together


class Redrawn(Generic[T]):
    """Draws anew when ranks stop, on a thread of its own, and shows what has changed; until `close`."""

    def __init__(self, stopped: StoppedThreads, draw: Callable[[], T], show: Callable[[T], None]) -> None:
        self._stopped = stopped
        self._draw = draw
        self._show = show
        self._due = threading.Event()
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._unlisten = stopped.listen(self._happened)

    def close(self) -> None:
        """Nothing is shown from now on."""
        with self._lock:
            self._closed.set()
        self._unlisten()
        self._due.set()

    def _happened(self, kind: str, record: Stopped) -> None:
        if kind != "stopped":
            return
        self._due.set()
        with self._lock:
            if self._thread is None and not self._closed.is_set():
                self._thread = threading.Thread(target=self._run, name="monarch-table", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while not self._closed.is_set():
            self._due.wait()
            self._due.clear()
            self._stopped.settle(QUIET_S)
            if self._closed.is_set():
                return
            drawn = self._draw()
            with self._lock:
                if not self._closed.is_set():
                    self._show(drawn)
