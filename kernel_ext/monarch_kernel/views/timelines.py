"""The timelines of this kernel, the newest first."""

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from monarch_nb.profiling import Timeline

KEPT = 4


class Timelines:
    """Those that magics have begun. The oldest are stopped and left out."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: list[Timeline] = []

    @property
    def all(self) -> "list[Timeline]":
        """All of them, the newest first."""
        with self._lock:
            return list(self._known)

    def add(self, timeline: "Timeline") -> "Timeline":
        """Adds one, and returns it."""
        with self._lock:
            self._known.insert(0, timeline)
            old = self._known[KEPT:]
            del self._known[KEPT:]
        for each in old:
            threading.Thread(target=each.stop, name="monarch-timeline-end", daemon=True).start()
        return timeline


TIMELINES = Timelines()
