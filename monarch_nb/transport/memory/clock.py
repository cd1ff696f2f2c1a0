"""Virtual time, for which nobody waits."""

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
        """Returns the present time."""
        return self.now

    def later(self, seconds: float, function: Callable[[], object]) -> None:
        """Calls `function` after so many seconds; calls due at one moment keep their order."""
        heapq.heappush(self._due, (self.now + max(0.0, seconds), next(self._count), function))

    def every(self, seconds: float, function: Callable[[], bool]) -> None:
        """Calls `function` every `seconds` while it returns True."""
        repeat(self.later, seconds, function)

    def close(self) -> None:
        """Drops all delayed calls."""
        self._due.clear()

    @property
    def next_due(self) -> float | None:
        """The time of the next delayed call; None without one."""
        return self._due[0][0] if self._due else None

    def advance(self, seconds: float) -> None:
        """Lets time pass, making every delayed call at its time."""
        end = self.now + seconds
        while self._due and self._due[0][0] <= end:
            self.step()
        self.now = end

    def settle(self, limit: float = 3600.0) -> bool:
        """Lets time pass until no call is due, `limit` seconds at most; returns whether none is left."""
        end = self.now + limit
        while self._due and self._due[0][0] <= end:
            self.step()
        return not self._due

    def step(self) -> None:
        """Makes the next delayed call, at its time."""
        when, _, call = heapq.heappop(self._due)
        self.now = max(self.now, when)
        call()
