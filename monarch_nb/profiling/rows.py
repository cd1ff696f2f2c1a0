"""The rows of a timeline: the spans of each rank, and groups of ranks with equal activity. No I/O, no clock."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from monarch_nb.profiling.recording import drawn_together
from monarch_nb.profiling.verbs import Recorded, RecordedCall, RecordedSpan

MOST = 200_000  # spans of all ranks together, beyond which each rank keeps its newest
FEWEST = 200  # that each rank keeps
CALLS = 5_000  # calls whose ends are kept
BINS = 24  # parts of the shown time in which ranks are compared
BIN_S = 1.25  # such a part while the newest time is shown: each rank's activity in it is summed up as spans arrive
GROUP_DIFFERENCE = (
    0.05  # of the shown time in which two ranks do different things, from which on they are of two groups
)
MOST_GROUPS = 40
BARS = 1200  # of all groups together, about, so that a page draws them at once
LATE_S = 10.0  # by which the spans of a rank may be out of order
_STRIDE = 16  # between ranks that are compared first, so that large groups are found early
_MOST_ODD = 50  # failures, losses, pauses of a rank
ODD = frozenset({"lost", "healing", "paused"})  # states that are shown, and divide groups, however short


@dataclass
class CallEnds:
    """Beginnings and durations of one call on its ranks, and the slowest rank."""

    first: float  # wall clock
    last: float
    least: float  # seconds
    most: float
    slowest: int
    ranks: int = 1

    def add(self, rank: int, began: float, seconds: float) -> None:
        """Adds a rank."""
        self.first, self.last = min(self.first, began), max(self.last, began)
        self.least = min(self.least, seconds)
        if seconds > self.most:
            self.most, self.slowest = seconds, rank
        self.ranks += 1


@dataclass(frozen=True)
class GroupRow:
    """Ranks with equal activity, and the spans of one of them."""

    ranks: tuple[int, ...]
    shown: int  # the rank whose spans these are
    spans: list[RecordedSpan]


Bins = dict[tuple[int, str], float]  # seconds, by part of the time and activity


class TimelineRows:
    """Spans of all ranks by base rank. Times are wall clock of this process."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._capacity = max(FEWEST, MOST // max(1, len(ranks)))
        self.spans: dict[int, deque[RecordedSpan]] = {rank: deque(maxlen=self._capacity) for rank in ranks}
        self.running: dict[int, tuple[RecordedSpan, ...]] = {}
        self.states: dict[int, RecordedSpan] = {}  # ranks that are lost, healing or paused now
        self.calls: dict[str, RecordedCall] = {}
        self.dropped = 0
        self.cost: dict[int, float] = {}
        self._ends: dict[str, CallEnds] = {}
        self._odd: dict[int, deque[RecordedSpan]] = {rank: deque(maxlen=_MOST_ODD) for rank in ranks}
        self._sums: dict[int, Bins] = {rank: {} for rank in ranks}  # of the newest parts of `BIN_S`
        self._newest = 0  # such part

    def add(self, recorded: Recorded, ahead: float = 0.0) -> None:
        """Adds a message of a rank whose clock is ahead by so many seconds."""
        rank = recorded.rank
        if rank in self.spans:
            for span in recorded.spans:
                self._append(rank, _moved(span, ahead))
            self.running[rank] = tuple(_moved(span, ahead) for span in recorded.running)
            self.cost[rank] = self.cost.get(rank, 0.0) + recorded.cost

    def add_calls(self, calls: Iterable[RecordedCall]) -> None:
        """Adds calls; one that has ended replaces its earlier record."""
        for call in calls:
            self.calls[call.call] = call
            while len(self.calls) > CALLS:
                del self.calls[next(iter(self.calls))]

    def turn(self, rank: int, kind: str, detail: str, time: float) -> None:
        """Notes that a rank is lost, heals or is paused; with the kind "" that it has recovered."""
        before = self.states.get(rank)
        if rank not in self.spans or (before is not None and before.kind == kind):
            return
        self.states.pop(rank, None)
        if before is not None:
            self._append(rank, RecordedSpan(before.kind, before.name, before.began, time))
        if kind:
            self.states[rank] = RecordedSpan(kind, detail or kind, time, 0.0)
        if kind == "lost":  # its activity has ended with it
            for span in self.running.pop(rank, ()):
                self._append(rank, RecordedSpan(span.kind, span.name, span.began, time, span.call, True))

    def _append(self, rank: int, span: RecordedSpan) -> None:
        row = self.spans[rank]
        if len(row) == self._capacity:
            self.dropped += 1
        row.append(span)
        if span.call:
            _add_end(self._ends, rank, span)
            while len(self._ends) > CALLS:
                del self._ends[next(iter(self._ends))]
        if span.kind in ODD or span.failed:
            self._odd[rank].append(span)
        sums = self._sums[rank]
        newest = int(span.ended / BIN_S)
        if newest > self._newest:
            self._newest = newest
        _sum_up(sums, span, 0.0, BIN_S, self._newest - 2 * BINS, self._newest)
        while len(sums) > 2 * BINS and (oldest := next(iter(sums)))[0] < self._newest - 2 * BINS:
            del sums[oldest]

    def of(self, rank: int, now: float) -> list[RecordedSpan]:
        """Returns all spans of a rank by their beginning; unfinished ones end at `now`."""
        return self._inside(rank, 0.0, float("inf"), now)

    def _inside(self, rank: int, begin: float, end: float, now: float) -> list[RecordedSpan]:
        """Returns the spans of a rank within some time."""
        inside = []
        for span in reversed(self.spans[rank]):
            if span.ended >= begin and span.began <= end:
                inside.append(span)
            elif span.ended < begin - LATE_S:
                break
        inside += (span for span in self._lasting(rank, now) if span.ended >= begin and span.began <= end)
        return sorted(inside, key=lambda span: (span.began, -span.ended))

    def _lasting(self, rank: int, now: float) -> Iterator[RecordedSpan]:
        """Yields the current spans of a rank: running calls, and its state."""
        running, state, row = self.running.get(rank, ()), self.states.get(rank), self.spans[rank]
        if not running and state is None:
            return
        recent = {(row[-back].call, row[-back].name) for back in range(1, min(20, len(row)) + 1)}
        for span in (*running, *filter(None, [state])):
            if not span.call or (span.call, span.name) not in recent:
                until = max(now, span.began)
                yield RecordedSpan(span.kind, span.name, span.began, until, span.call, span.failed)

    def ends(self, calls: Iterable[str], now: float) -> dict[str, CallEnds]:
        """Returns beginnings and durations of some calls on their ranks; unknown calls are left out."""
        ids = set(calls)
        ends = {call: replace(self._ends[call]) for call in ids if call in self._ends}
        for rank in self.running:
            for span in self._lasting(rank, now):
                if span.call in ids:
                    _add_end(ends, rank, span)
        return ends

    def folded(self, begin: float, end: float, *, groups: int = MOST_GROUPS, most: int = 200) -> list[GroupRow]:
        """Returns the groups of ranks in some time, the largest first: at most `groups`, with about `most` spans each.

        Two ranks are in different groups if their activity differs for `GROUP_DIFFERENCE` of it, or if only one of them
        is lost, paused or has failed. The smallest groups are left out if there are more. If hardly two ranks are
        alike, the other ranks are only compared with groups found among the first ranks.
        """
        length = max(end - begin, 1e-6)
        first, last = int(begin / BIN_S), int(end / BIN_S)
        summed = length > 0.99 * BINS * BIN_S and first > self._newest - 2 * BINS and last >= self._newest
        clusters: list[tuple[Bins, frozenset[str], list[int]]] = []
        ranks = tuple(self.spans)
        for rank in (rank for start in range(_STRIDE) for rank in ranks[start::_STRIDE]):
            if summed:
                bins, odd = self._summed(rank, begin, end), self._odd_of(rank, begin, end)
            else:
                bins, odd = _bins(self._inside(rank, begin, end, end), begin, length)
            many = len(clusters) >= 2 * groups
            for cluster_bins, cluster_odd, members in clusters:
                if many and len(members) == 1:
                    continue
                if odd == cluster_odd and _alike(bins, cluster_bins, GROUP_DIFFERENCE * length):
                    members.append(rank)
                    break
            else:
                if not many:
                    clusters.append((bins, odd, [rank]))
        rows = sorted((sorted(members) for _, _, members in clusters), key=lambda members: (-len(members), members))
        del rows[groups:]
        gap = length / min(most, BARS // max(1, len(rows))) / 2
        return [
            GroupRow(tuple(members), members[0], _merged(self._inside(members[0], begin, end, end), gap))
            for members in rows
        ]

    def _summed(self, rank: int, begin: float, end: float) -> Bins:
        """Returns the activity of a rank in the newest parts of `BIN_S`."""
        first, last = int(begin / BIN_S), int(end / BIN_S)
        bins = {key: seconds for key, seconds in self._sums[rank].items() if key[0] >= first}
        for span in self._lasting(rank, end):
            _sum_up(bins, span, 0.0, BIN_S, first, last)
        return bins

    def _odd_of(self, rank: int, begin: float, end: float) -> frozenset[str]:
        """Returns the unusual states and failures of a rank in some time."""
        spans = (*self._odd[rank], *(span for span in self._lasting(rank, end) if span.kind in ODD or span.failed))
        return frozenset(f"{span.kind} {span.name}" for span in spans if span.began <= end and span.ended >= begin)


def _add_end(ends: dict[str, CallEnds], rank: int, span: RecordedSpan) -> None:
    seconds = span.ended - span.began
    if span.call in ends:
        ends[span.call].add(rank, span.began, seconds)
    else:
        ends[span.call] = CallEnds(span.began, span.began, seconds, seconds, rank)


def _moved(span: RecordedSpan, ahead: float) -> RecordedSpan:
    if not ahead:
        return span
    ended = span.ended and span.ended - ahead
    return RecordedSpan(span.kind, span.name, span.began - ahead, ended, span.call, span.failed, span.count)


def _merged(spans: list[RecordedSpan], gap: float) -> list[RecordedSpan]:
    """Merges short successive spans; spans that are long enough to be seen and pointed at stay."""
    long = [span for span in spans if span.ended - span.began > gap or span.kind in ODD or span.failed]
    short = drawn_together((span for span in spans if span.ended - span.began <= gap and span not in long), gap)
    return sorted((*long, *short), key=lambda span: (span.began, -span.ended))


def _bins(spans: Iterable[RecordedSpan], begin: float, length: float) -> tuple[Bins, frozenset[str]]:
    """Returns the activity in each part of the time, and unusual states and failures."""
    bins: Bins = {}
    odd = set()
    for span in spans:
        if span.kind in ODD or span.failed:
            odd.add(f"{span.kind} {span.name}")
        _sum_up(bins, span, begin, length / BINS, 0, BINS - 1)
    return bins, frozenset(odd)


def _sum_up(bins: Bins, span: RecordedSpan, zero: float, width: float, first: int, last: int) -> None:
    """Adds a span to the parts of the time that it covers, from `first` to `last`."""
    if span.kind not in ("call", "span"):
        return
    began, ended, name = span.began - zero, span.ended - zero, span.name
    number, until = max(first, int(began // width)), min(last, int(ended // width))
    while number <= until:
        left, right = number * width, (number + 1) * width
        seconds = (ended if ended < right else right) - (began if began > left else left)
        if seconds > 0:
            key = (number, name)
            bins[key] = bins.get(key, 0.0) + seconds
        number += 1


def _alike(first: Bins, second: Bins, most: float) -> bool:
    """Returns whether the activity of two ranks differs in at most `most` seconds."""
    apart = 0.0
    for key, seconds in first.items():
        apart += abs(seconds - second.get(key, 0.0))
        if apart > most:
            return False
    for key, seconds in second.items():
        if key not in first:
            apart += seconds
            if apart > most:
                return False
    return True
