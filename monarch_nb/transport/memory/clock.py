"""Time of which nobody has to wait for any."""

import heapq
from collections.abc import Callable
from itertools import count

from monarch_nb.transport.clock import repeat


class VirtualClock:
    """Time that passes only when it is advanced, in seconds since it began."""

    __slots__ = ("_count", "_due", "now")

    def __init__(self, now: float = 0.0) -> None:
        self.now = now
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._count = count()

    def monotonic(self) -> float:
        """The time now."""
        return self.now

    def later(self, seconds: float, function: Callable[[], object]) -> None:
        """Call `function` when so many seconds have passed; calls of one moment keep their order."""
        heapq.heappush(self._due, (self.now + max(0.0, seconds), next(self._count), function))

    def every(self, seconds: float, function: Callable[[], bool]) -> None:
        """Call `function` each `seconds` for as long as it returns True."""
        repeat(self.later, seconds, function)

    def close(self) -> None:
        """Forget everything that is due."""
        self._due.clear()

    @property
    def next_due(self) -> float | None:
        """When something is due next; None when nothing is."""
        return self._due[0][0] if self._due else None

    def advance(self, seconds: float) -> None:
        """Let time pass, making every call that falls due, each at its own time."""
        end = self.now + seconds
        while self._due and self._due[0][0] <= end:
            self.step()
        self.now = end

    def settle(self, limit: float = 3600.0) -> bool:
        """Let time pass until nothing is due any more, `limit` seconds at most; whether it came to rest."""
        end = self.now + limit
        while self._due and self._due[0][0] <= end:
            self.step()
        return not self._due

    def step(self) -> None:
        """Make the next call that is due, at its time."""
        when, _, call = heapq.heappop(self._due)
        self.now = max(self.now, when)
        call()
