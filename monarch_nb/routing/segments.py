"""Next numbers of the ranks of one mesh, as stretches of equal or periodic history."""

from bisect import bisect_right
from math import lcm
from typing import NamedTuple

from monarch_nb.wire.header import Run

_LONGEST_PERIOD = 64


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
