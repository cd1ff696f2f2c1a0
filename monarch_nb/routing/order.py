"""Order per (sender, receiving actor), whichever paths the messages take: the next numbers of all ranks of a mesh, as
stretches of equal or periodic history, and inboxes that restore the order.
"""

from bisect import bisect_right
from collections.abc import Sequence
from math import lcm
from typing import Generic, NamedTuple, TypeVar

from msgspec import Struct

from monarch_nb.wire.header import Run

T = TypeVar("T")

_LONGEST_PERIOD = 64  # ranks whose states repeat in a segment


class _Cell(NamedTuple):
    """The state of a rank: its incarnation and the next number in it."""

    proc_incarnation: int
    incarnation: int
    seq: int


_FRESH = _Cell(0, 0, 0)


class _Segment:
    """Ranks start..stop-1; rank r has cells[(r - start) % len(cells)].

    The period keeps a slice such as "gpu 0 of every host" from splitting the mesh into one segment per host.
    """

    __slots__ = ("cells", "start", "stop")

    def __init__(self, start: int, stop: int, cells: tuple[_Cell, ...]) -> None:
        self.start = start
        self.stop = stop
        self.cells = cells

    def part(self, start: int, stop: int) -> "_Segment":
        period = len(self.cells)
        turn = (start - self.start) % period
        cells = self.cells[turn:] + self.cells[:turn] if turn else self.cells
        return _Segment(start, stop, _shortest(cells, stop - start))

    def continues(self, other: "_Segment") -> bool:
        """Returns whether `other`, which follows, can be merged with this one."""
        period = len(self.cells)
        if self.stop != other.start or len(other.cells) != period:
            return False
        turn = (other.start - self.start) % period
        return (self.cells[turn:] + self.cells[:turn]) == other.cells


def _shortest(cells: tuple[_Cell, ...], length: int) -> tuple[_Cell, ...]:
    cells = cells[:length] if length < len(cells) else cells
    period = len(cells)
    if period == 1:
        return cells
    for shorter in range(1, period // 2 + 1):
        if period % shorter == 0 and cells == cells[:shorter] * (period // shorter):
            return cells[:shorter]
    return cells


class Segments:
    """All ranks of one mesh that have received messages."""

    __slots__ = ("_segments", "_starts")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._segments: list[_Segment] = []

    def __len__(self) -> int:
        return sum(len(segment.cells) for segment in self._segments)

    def take(self, run: Run, out: list[Run]) -> None:
        """Appends the run with its numbers to `out`, split where they differ, and counts the numbers as used."""
        if run.count < 1:
            return
        if run.stride < 1:
            raise ValueError(f"a run's stride must be positive, not {run.stride}")
        if run.count == 1 and self._take_again(run, out):
            return
        if run.count == 1 or run.stride == 1:
            self._take(run, run.rank, run.rank + run.count, 1, out)
            return
        stop = run.rank + (run.count - 1) * run.stride + 1
        if run.count <= 4 or run.stride > _LONGEST_PERIOD or not self._periodic(run.rank, stop, run.stride):
            for rank in range(run.rank, stop, run.stride):  # rare; costs a stretch per rank
                self._take(run, rank, rank + 1, 1, out)
        else:
            self._take(run, run.rank, stop, run.stride, out)

    def _take_again(self, run: Run, out: list[Run]) -> bool:
        """Handles one rank that has a stretch of its own, and keeps it; False otherwise."""
        segments, rank = self._segments, run.rank
        index = bisect_right(self._starts, rank) - 1
        if index < 0:
            return False
        segment = segments[index]
        proc_incarnation, incarnation, seq = segment.cells[0]
        if segment.start != rank or segment.stop != rank + 1 or incarnation != run.incarnation:
            return False
        if proc_incarnation != run.proc_incarnation:
            return False
        cells = (_Cell(proc_incarnation, incarnation, seq + 1),)
        after = index + 1
        if (index and segments[index - 1].cells == cells) or (after < len(segments) and segments[after].cells == cells):
            return False  # the stretch may be merged
        segment.cells = cells
        out.append(Run(rank, 1, run.stride, proc_incarnation, incarnation, seq, run.index, run.index_stride))
        return True

    def _periodic(self, start: int, stop: int, stride: int) -> bool:
        first = max(bisect_right(self._starts, start) - 1, 0)
        last = bisect_right(self._starts, stop - 1)
        return all(lcm(len(segment.cells), stride) <= _LONGEST_PERIOD for segment in self._segments[first:last])

    def _take(self, run: Run, start: int, stop: int, stride: int, out: list[Run]) -> None:
        segments, starts = self._segments, self._starts
        low = bisect_right(starts, start) - 1
        if low < 0 or segments[low].stop <= start:
            low += 1
        high = bisect_right(starts, stop - 1, low)
        # The stretches between start and stop, without holes, and the parts of the outermost ones beyond them.
        replaced: list[_Segment] = []
        position = start
        tail: _Segment | None = None
        for segment in segments[low:high]:
            if segment.start < start:
                replaced.append(segment.part(segment.start, start))
            if segment.start > position:
                replaced.append(self._touch(run, _Segment(position, segment.start, (_FRESH,)), stride, out))
                position = segment.start
            end = min(segment.stop, stop)
            replaced.append(self._touch(run, segment.part(position, end), stride, out))
            position = end
            if segment.stop > stop:
                tail = segment.part(stop, segment.stop)
        if position < stop:
            replaced.append(self._touch(run, _Segment(position, stop, (_FRESH,)), stride, out))
        if tail is not None:
            replaced.append(tail)
        if low > 0:
            low -= 1
            replaced.insert(0, segments[low])
        if high < len(segments):
            replaced.append(segments[high])
            high += 1
        merged = replaced[:1]
        for segment in replaced[1:]:
            if merged[-1].continues(segment):
                merged[-1] = _Segment(merged[-1].start, segment.stop, merged[-1].cells)
            else:
                merged.append(segment)
        segments[low:high] = merged
        starts[low:high] = [segment.start for segment in merged]

    @staticmethod
    def _touch(run: Run, segment: _Segment, stride: int, out: list[Run]) -> _Segment:
        """Numbers the ranks of `segment` that belong to `run`."""
        length = segment.stop - segment.start
        period = min(lcm(len(segment.cells), stride), length)
        cells = list(segment.cells) * -(-period // len(segment.cells))
        del cells[period:]
        incarnations = (run.proc_incarnation, run.incarnation)
        for position in range((run.rank - segment.start) % stride, period, stride):
            cell = cells[position]
            if incarnations > cell[:2]:
                cell = _Cell(*incarnations, 0)
            stale = incarnations < cell[:2]
            seq = -1 if stale else cell.seq
            if not stale:
                cells[position] = _Cell(*incarnations, seq + 1)
            first = segment.start + position
            count = (length - position - 1) // period + 1
            _append(out, run, first, count, period if count > 1 else run.stride, seq)
        return _Segment(segment.start, segment.stop, _shortest(tuple(cells), length))


def _append(out: list[Run], run: Run, rank: int, count: int, step: int, seq: int) -> None:
    """Adds a piece of `run`, merged with the previous piece where that ended just there with the same number."""
    index = run.index + (rank - run.rank) // run.stride * run.index_stride
    incarnations = run.proc_incarnation, run.incarnation
    if out:
        last = out[-1]
        if count == 1 and last.count > 1:
            step = last.stride
        index_stride = step // run.stride * run.index_stride
        same = last.seq == seq and (last.proc_incarnation, last.incarnation) == incarnations
        if same and (last.count == 1 or (last.stride, last.index_stride) == (step, index_stride)):
            follows = last.rank + last.count * step == rank and last.index + last.count * index_stride == index
            if follows and step % run.stride == 0:
                out[-1] = Run(last.rank, last.count + count, step, *incarnations, seq, last.index, index_stride)
                return
        if count == 1:
            step = run.stride
    out.append(Run(rank, count, step, *incarnations, seq, index, step // run.stride * run.index_stride))


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
