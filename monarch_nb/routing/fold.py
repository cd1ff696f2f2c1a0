"""The replies of one cast, gathered at an agent into few messages."""

from collections.abc import Iterable
from typing import Generic, TypeVar

from msgspec import Struct, field

T = TypeVar("T")


class LostIndices(Struct, frozen=True):
    """Indices that will not reply, for one reason."""

    indices: list[int]
    reason: str


class Batch(Struct, Generic[T]):
    """Replies to pass on now, each with its indices, and the indices that will not reply."""

    replies: list[tuple[range, T]] = field(default_factory=list)
    lost: list[LostIndices] = field(default_factory=list)
    complete: bool = False


class Fold(Generic[T]):
    """Gathers replies of one cast until all have arrived; replies that have waited for `flush` seconds go alone.

    The `expected` receivers are those of one agent and of the subtrees below it. An index counts once: anything later
    for it is dropped, so a late reply after a loss, or a second copy, reaches nobody.
    """

    __slots__ = ("_answered", "_batch", "_due", "_expected", "_flush")

    def __init__(self, expected: int, flush: float = 0.05) -> None:
        self._expected = expected
        self._flush = flush
        self._answered: set[int] = set()
        self._batch: Batch[T] = Batch()
        self._due: float | None = None

    def reply(self, index: int, item: T, now: float) -> Batch[T] | None:
        """Adds one reply; returns the batch to send on now, if any."""
        self._add(range(index, index + 1), item, now)
        return self.tick(now)

    def folded(self, batch: Batch[T], now: float) -> Batch[T] | None:
        """Adds a batch of an agent below; returns the batch to send on now, if any."""
        for indices, item in batch.replies:
            self._add(indices, item, now)
        for lost in batch.lost:
            self._lose(lost.indices, lost.reason, now)
        return self.tick(now)

    def lost(self, indices: Iterable[int], reason: str, now: float) -> Batch[T] | None:
        """Adds indices that will not reply (those that have do not count); returns the batch to send on now, if any."""
        self._lose(indices, reason, now)
        return self.tick(now)

    def tick(self, now: float) -> Batch[T] | None:
        """Returns the batch to send on now, if any: all have replied, or a reply has waited for long enough."""
        if self._due is None or (now < self._due and not self.complete):
            return None
        batch, self._batch, self._due = self._batch, Batch(), None
        batch.complete = self.complete
        return batch

    @property
    def complete(self) -> bool:
        """True if every index has replied or is lost."""
        return len(self._answered) >= self._expected

    def waits_for(self, indices: Iterable[int]) -> list[int]:
        """Returns those of `indices` that have neither replied nor failed."""
        return [index for index in indices if index not in self._answered]

    @property
    def missing(self) -> int:
        """Indices that have neither replied nor failed."""
        return self._expected - len(self._answered)

    @property
    def deadline(self) -> float | None:
        """The time to call `tick`; None while nothing waits."""
        return self._due

    def _add(self, indices: range, item: T, now: float) -> None:
        if self._answered.isdisjoint(indices):
            self._answered.update(indices)
            self._batch.replies.append((indices, item))
            self._wait(now)
        elif len(indices) > 1:  # some of them are lost, or have replied
            for index in indices:
                self._add(range(index, index + 1), item, now)

    def _lose(self, indices: Iterable[int], reason: str, now: float) -> None:
        unanswered = self.waits_for(indices)
        if unanswered:
            self._answered.update(unanswered)
            self._batch.lost.append(LostIndices(unanswered, reason))
            self._wait(now)

    def _wait(self, now: float) -> None:
        if self._due is None:
            self._due = now + self._flush
