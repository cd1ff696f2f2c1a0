"""Which steps of a feed are held, and how far each rank is: a state machine without I/O."""

from collections import deque
from typing import Any

__all__ = ["Ledger"]


class Ledger:
    """A step is held until every rank is done with it, and few are held ahead."""

    def __init__(self, ranks: int, ahead: int) -> None:
        self.done = [0] * ranks  # by rank: steps that it is done with
        self.ended: int | None = None  # how many steps there are, once that is known
        self._ahead = ahead
        self._held: deque[Any] = deque()
        self._first = 0  # the number of the first that is held

    @property
    def held(self) -> int:
        """How many steps are."""
        return len(self._held)

    @property
    def next(self) -> int:
        """The number of the step that is read next."""
        return self._first + len(self._held)

    @property
    def slowest(self) -> int:
        """How many steps all ranks are done with."""
        return min(self.done)

    def behind(self) -> list[int]:
        """The ranks that hold up the others."""
        return [rank for rank, done in enumerate(self.done) if done == self.slowest]

    def may_read(self) -> bool:
        """Whether there is room for another step."""
        return self.ended is None and self.next < self.slowest + self._ahead

    def add(self, step: Any | None) -> None:
        """The next step was read; None: there is none."""
        if step is None:
            self.ended = self.next
        else:
            self._held.append(step)

    def finish(self, rank: int, steps: int) -> bool:
        """A rank is done with its first `steps`; whether that makes room."""
        self.done[rank] = max(self.done[rank], steps)
        first = self._first
        while self._held and self._first < self.slowest:
            self._held.popleft()
            self._first += 1
        return self._first > first

    def step(self, number: int) -> Any:
        """A step that is held; None if it is still to be read. Raises LookupError for one that is gone."""
        place = number - self._first
        if place < 0:
            raise LookupError(f"batch {number} is gone: all ranks were done with it")
        return self._held[place] if place < len(self._held) else None
