"""Order per (sender, receiving actor), whichever paths the messages take."""

from collections.abc import Sequence
from typing import Generic, TypeVar

from msgspec import Struct

from monarch_nb.routing.segments import Segments
from monarch_nb.wire.header import Run

T = TypeVar("T")


class Outbox:
    """The numbers that one sender gives to its messages, run-length encoded over the ranks of each mesh.

    Numbers start at 0 per (mesh, rank, incarnation); an incarnation is a pair: of the proc, and of the actor.
    """

    __slots__ = ("_meshes",)

    def __init__(self) -> None:
        self._meshes: dict[str, Segments] = {}

    def number(self, mesh: str, runs: Sequence[Run]) -> list[Run]:
        """Returns the same ranks with their next numbers; runs are split where numbers differ.

        Costs per run and per stretch of ranks with equal history, not per rank. An incarnation older than a known one
        gets -1: the message has no receiver, and returns unordered.
        """
        segments = self._meshes.get(mesh)
        if segments is None:
            segments = self._meshes[mesh] = Segments()
        numbered: list[Run] = []
        for run in runs:
            segments.take(run, numbered)
        return numbered

    def forget(self, mesh: str) -> None:
        """Removes the numbers of a stopped mesh."""
        self._meshes.pop(mesh, None)

    def stretches(self, mesh: str) -> int:
        """Returns the number of stretches of ranks with equal histories: the cost of a cast to all of `mesh`."""
        segments = self._meshes.get(mesh)
        return len(segments) if segments is not None else 0


class Gap(Struct, frozen=True):
    """Messages of `sender` from number `first` on, missing for `seconds`, while `waiting` later ones have arrived."""

    sender: str
    first: int
    seconds: float
    waiting: int


class InboxStats(Struct):
    """Counts since the actor began."""

    delivered: int = 0
    unordered: int = 0
    duplicates: int = 0
    held_back: int = 0  # arrived before an earlier one
    skipped: int = 0  # numbers given up


class InboxOverflow(Exception):
    """More messages wait behind a missing one than allowed; the last one was dropped."""

    def __init__(self, sender: str, first: int, waiting: int) -> None:
        super().__init__(f"{waiting} messages from {sender} wait for number {first}, which has not arrived")
        self.sender, self.first, self.waiting = sender, first, waiting


class _SenderStream(Generic[T]):
    __slots__ = ("expect", "since", "void", "waiting")

    def __init__(self) -> None:
        self.expect = 0
        self.waiting: dict[int, T] = {}
        self.void: set[int] = set()  # numbers that will never arrive
        self.since = 0.0  # when the expected number was first missing

    def advance(self, now: float) -> list[T]:
        ready = []
        while True:
            if self.expect in self.waiting:
                ready.append(self.waiting.pop(self.expect))
            elif self.expect in self.void:
                self.void.discard(self.expect)
            else:
                break
            self.expect += 1
        self.since = now
        return ready


class Inbox(Generic[T]):
    """Puts the messages for one actor back in order, per sender stream."""

    __slots__ = ("_limit", "_open", "_streams", "_waiting", "stats")

    def __init__(self, limit: int = 65536) -> None:
        """Limits the messages that wait behind missing ones, of all senders together, to `limit`."""
        self._limit = limit
        self._streams: dict[str, _SenderStream[T]] = {}
        self._open: dict[str, _SenderStream[T]] = {}  # streams with waiting messages
        self._waiting = 0
        self.stats = InboxStats()

    def arrive(self, sender: str, seq: int, item: T, now: float) -> list[T]:
        """Returns the items that may be handled now, in order: none for a duplicate or an early one.

        seq -1 is unordered, and returned at once. Raises InboxOverflow.
        """
        if seq < 0:
            self.stats.unordered += 1
            return [item]
        stream = self._streams.get(sender)
        if stream is None:
            stream = self._streams[sender] = _SenderStream()
        if seq == stream.expect and not stream.waiting and not stream.void:
            stream.expect = seq + 1
            self.stats.delivered += 1
            return [item]
        if seq < stream.expect or seq in stream.waiting or seq in stream.void:
            self.stats.duplicates += 1
            return []
        if seq == stream.expect:
            stream.waiting[seq] = item
            self._waiting += 1
            return self._released(sender, stream, now)
        if self._waiting >= self._limit:
            raise InboxOverflow(sender, stream.expect, self._waiting)
        if not stream.waiting:
            stream.since = now
            self._open[sender] = stream
        stream.waiting[seq] = item
        self._waiting += 1
        self.stats.held_back += 1
        return []

    def has(self, sender: str, seq: int) -> bool:
        """Returns whether a message has arrived."""
        stream = self._streams.get(sender)
        return stream is not None and (seq < stream.expect or seq in stream.waiting)

    def void(self, sender: str, seq: int, now: float) -> list[T]:
        """Gives up number `seq`, which the sender knows to have failed; returns the items that may be handled now."""
        stream = self._streams.setdefault(sender, _SenderStream())
        if seq < stream.expect or seq in stream.waiting or seq in stream.void:
            return []
        stream.void.add(seq)
        self.stats.skipped += 1
        return self._released(sender, stream, now)

    def expired(self, now: float, after: float = 30.0) -> list[Gap]:
        """Returns the streams that have waited `after` seconds or longer for a missing number."""
        return [
            Gap(sender, stream.expect, now - stream.since, len(stream.waiting))
            for sender, stream in self._open.items()
            if now - stream.since >= after
        ]

    def skip(self, sender: str, now: float) -> list[T]:
        """Gives up the missing numbers before the waiting messages; returns the items that may be handled now."""
        stream = self._open.get(sender)
        if stream is None:
            return []
        first = min(stream.waiting)
        void = {seq for seq in stream.void if seq < first}
        self.stats.skipped += first - stream.expect - len(void)
        stream.void -= void
        stream.expect = first
        return self._released(sender, stream, now)

    def forget(self, sender: str) -> list[T]:
        """Removes the stream of a lost sender; returns the items that still waited, to be returned or dropped."""
        stream = self._streams.pop(sender, None)
        self._open.pop(sender, None)
        if stream is None:
            return []
        self._waiting -= len(stream.waiting)
        return [item for _, item in sorted(stream.waiting.items(), key=lambda entry: entry[0])]

    @property
    def waiting(self) -> int:
        """Number of messages that wait for earlier ones."""
        return self._waiting

    def _released(self, sender: str, stream: _SenderStream[T], now: float) -> list[T]:
        ready = stream.advance(now)
        self._waiting -= len(ready)
        self.stats.delivered += len(ready)
        if not stream.waiting:
            self._open.pop(sender, None)
        return ready
