"""The rows of a timeline: what each rank did and when, and ranks that did alike drawn together. No I/O, no clock."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from monarch_nb.profiling.messages import Recorded, RecordedCall, RecordedSpan
from monarch_nb.profiling.recording import drawn_together

MOST = 200_000  # spans of all ranks together: of more, each rank keeps its newest
FEWEST = 200  # that each rank keeps
CALLS = 5_000  # calls that are kept, with both ends
BINS = 24  # parts of the shown time in which ranks are compared
APART = 0.05  # of the shown time in which two ranks do different things, from which on they are of two groups
MOST_GROUPS = 40
ODD = frozenset({"lost", "healing", "paused"})  # states that are shown, and divide groups, however short they are


@dataclass
class CallEnds:
    """How the ranks have run one call: when they began, how long they took, and which took longest."""

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
    """Ranks that did alike, and the spans of one of them."""

    ranks: tuple[int, ...]
    shown: int  # the rank whose spans these are
    spans: list[RecordedSpan]


class TimelineRows:
    """Spans of all ranks by base rank. Times are wall clock of this process."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._kept = max(FEWEST, MOST // max(1, len(ranks)))
        self.spans: dict[int, deque[RecordedSpan]] = {rank: deque(maxlen=self._kept) for rank in ranks}
        self.running: dict[int, tuple[RecordedSpan, ...]] = {}
        self.states: dict[int, RecordedSpan] = {}  # ranks that are lost, healing or paused now
        self.calls: dict[str, RecordedCall] = {}
        self.dropped = 0
        self.cost: dict[int, float] = {}

    def add(self, recorded: Recorded, ahead: float = 0.0) -> None:
        """Adds a message of a rank whose clock is ahead by so many seconds."""
        rank = recorded.rank
        if rank in self.spans:
            for span in recorded.spans:
                self._append(rank, _moved(span, ahead))
            self.running[rank] = tuple(_moved(span, ahead) for span in recorded.running)
            self.cost[rank] = self.cost.get(rank, 0.0) + recorded.cost

    def add_calls(self, calls: Iterable[RecordedCall]) -> None:
        """Adds calls; one that has ended replaces itself as it was sent."""
        for call in calls:
            self.calls[call.call] = call
            while len(self.calls) > CALLS:
                del self.calls[next(iter(self.calls))]

    def turn(self, rank: int, kind: str, detail: str, at: float) -> None:
        """A rank is lost, heals or is paused since now; with the kind "" it is well again."""
        before = self.states.get(rank)
        if rank not in self.spans or (before is not None and before.kind == kind):
            return
        self.states.pop(rank, None)
        if before is not None:
            self._append(rank, RecordedSpan(before.kind, before.name, before.began, at))
        if kind:
            self.states[rank] = RecordedSpan(kind, detail or kind, at, 0.0)
        if kind == "lost":  # what it did has ended with it
            ended = (RecordedSpan(s.kind, s.name, s.began, at, s.call, True) for s in self.running.pop(rank, ()))
            self.spans[rank].extend(ended)

    def _append(self, rank: int, span: RecordedSpan) -> None:
        row = self.spans[rank]
        if len(row) == self._kept:
            self.dropped += 1
        row.append(span)

    def of(self, rank: int, now: float) -> list[RecordedSpan]:
        """All spans of a rank by their beginning; what lasts ends now."""
        every = list(self.spans[rank])
        last = [*self.running.get(rank, ()), *filter(None, [self.states.get(rank)])]
        known = {(span.call, span.name) for span in every[-20:] if span.call}
        every += (
            RecordedSpan(span.kind, span.name, span.began, max(now, span.began), span.call, span.failed)
            for span in last
            if (span.call, span.name) not in known
        )
        return sorted(every, key=lambda span: (span.began, -span.ended))

    def ends(self, calls: Iterable[str], now: float) -> dict[str, CallEnds]:
        """How ranks have run some calls; those of which nothing is known are left out."""
        wanted, found = set(calls), dict[str, CallEnds]()
        for rank in self.spans:
            for span in self.of(rank, now):
                if span.call in wanted and span.call:
                    seconds = span.ended - span.began
                    if span.call in found:
                        found[span.call].add(rank, span.began, seconds)
                    else:
                        found[span.call] = CallEnds(span.began, span.began, seconds, seconds, rank)
        return found

    def folded(self, begin: float, end: float, *, groups: int = MOST_GROUPS, most: int = 200) -> list[GroupRow]:
        """The groups of ranks in some time, the largest first: at most so many, with about so many spans each.

        Two ranks are of two groups if they do different things in `APART` of that time, or if only one of them is
        lost, paused or has failed. Of more groups than asked for, the smallest are left out.
        """
        length = max(end - begin, 1e-6)
        rows: dict[int, list[RecordedSpan]] = {}
        found: list[tuple[dict[tuple[int, str], float], frozenset[str], list[int]]] = []
        for rank in self.spans:
            inside = [span for span in self.of(rank, end) if span.began <= end and span.ended >= begin]
            rows[rank] = inside
            bins, odd = _bins(inside, begin, length)
            for other, other_odd, members in found:
                if odd == other_odd and _apart(bins, other) <= APART * length:
                    members.append(rank)
                    break
            else:
                found.append((bins, odd, [rank]))
        found.sort(key=lambda group: (-len(group[2]), group[2]))
        gap = length / most / 2
        return [
            GroupRow(tuple(members), members[0], list(_merged(rows[members[0]], gap)))
            for _, _, members in found[:groups]
        ]


def _moved(span: RecordedSpan, ahead: float) -> RecordedSpan:
    if not ahead:
        return span
    ended = span.ended and span.ended - ahead
    return RecordedSpan(span.kind, span.name, span.began - ahead, ended, span.call, span.failed, span.count)


def _merged(spans: list[RecordedSpan], gap: float) -> list[RecordedSpan]:
    """Short spans that follow each other become one; those that somebody could see and point at stay."""
    long = [span for span in spans if span.ended - span.began > gap or span.kind in ODD or span.failed]
    short = drawn_together((span for span in spans if span.ended - span.began <= gap and span not in long), gap)
    return sorted((*long, *short), key=lambda span: (span.began, -span.ended))


def _bins(
    spans: Iterable[RecordedSpan], begin: float, length: float
) -> tuple[dict[tuple[int, str], float], frozenset[str]]:
    """Seconds by part of the time and what was done then, and what is unusual."""
    width = length / BINS
    seconds: dict[tuple[int, str], float] = {}
    odd = set()
    for span in spans:
        if span.kind in ODD or span.failed:
            odd.add(f"{span.kind} {span.name}")
        if span.kind not in ("call", "span"):
            continue
        first, last = max(0.0, span.began - begin), min(length, span.ended - begin)
        for number in range(int(first / width), min(BINS, int(last / width) + 1)):
            part = min(last, (number + 1) * width) - max(first, number * width)
            if part > 0:
                seconds[number, span.name] = seconds.get((number, span.name), 0.0) + part
    return seconds, frozenset(odd)


def _apart(one: dict[tuple[int, str], float], other: dict[tuple[int, str], float]) -> float:
    """Seconds in which two ranks do different things."""
    total = sum(abs(seconds - other.get(key, 0.0)) for key, seconds in one.items())
    return total + sum(seconds for key, seconds in other.items() if key not in one)
