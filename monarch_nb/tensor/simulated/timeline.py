"""The tasks of each stream of each simulated rank, one after the other, in microseconds, and the memory in use."""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from monarch_nb.tensor.errors import CallSite

OPERATION, EXCHANGE, SENDING, COPYING, WAITING = 10.0, 100.0, 100.0, 1.0, 0.5  # durations
_WITHOUT_KERNEL = frozenset({"aten.view"})  # operations that take no device time

Lane = Hashable  # a stream of the program
labels: list[str] = []  # added to the names of tasks: see `monarch.set_meta`


@dataclass(frozen=True, slots=True)
class SimulatedTask:
    """A task of a stream of a rank from `start` to `end`. `kind` is "operation", "exchange" or "wait"."""

    name: str
    kind: str
    start: float
    end: float
    command: int
    site: "CallSite | None" = None


class SimulatedMemory:
    """Memory of a tensor and its views on some ranks; `holders` are the tensors and the borrows that keep it."""

    __slots__ = ("holders", "lane", "nbytes", "ranks")

    def __init__(self, nbytes: int, ranks: Sequence[int], lane: Lane) -> None:
        self.nbytes, self.ranks, self.lane, self.holders = nbytes, ranks, lane, 1


class SimulatedTimeline:
    """The tasks of all ranks. Each begins when its stream has done the previous one, and ends after its duration."""

    def __init__(self) -> None:
        self.tasks: defaultdict[int, dict[Lane, list[SimulatedTask]]] = defaultdict(dict)  # by rank and stream
        self.memory: defaultdict[int, list[tuple[float, int]]] = defaultdict(list)  # by rank: when, and bytes more
        self.now = 0.0  # commands issued from now on begin no earlier
        self.commands = 0
        self.issued: list[tuple[str, float, int, CallSite | None]] = []  # commands and their times, if there is a clock
        self._clocks: dict[tuple[int, Lane], float] = {}

    @property
    def elapsed(self) -> float:
        """Time at which all tasks are done."""
        return max(self._clocks.values(), default=0.0)

    @property
    def peak(self) -> int:
        """The most bytes that a rank holds at a time."""
        return max((max(sizes, default=0) for sizes in map(self._sizes, self.memory)), default=0)

    def _sizes(self, rank: int) -> list[int]:
        return [nbytes for _, nbytes in self.memory_of(rank)]

    def memory_of(self, rank: int) -> list[tuple[float, int]]:
        """Returns the bytes that a rank holds, with the times of changes."""
        nbytes, steps = 0, []
        for when, more in sorted(self.memory[rank], key=lambda change: change[0]):
            nbytes += more
            steps.append((when, nbytes))
        return steps

    def clock(self, rank: int, lane: Lane) -> float:
        """Returns the time at which a stream of a rank has done all issued commands."""
        return self._clocks.get((rank, lane), 0.0)

    def operate(self, ranks: Sequence[int], lane: Lane, name: str, site: "CallSite | None") -> None:
        """Adds an operation on each of these ranks."""
        duration = 0.0 if name in _WITHOUT_KERNEL else OPERATION
        for rank in ranks:
            start = self._start(rank, lane)
            self._add(rank, lane, name, "operation", start, start + duration, site)

    def exchange(self, groups: Iterable[Sequence[int]], lane: Lane, name: str, site: "CallSite | None") -> None:
        """Adds exchanges of values in groups of ranks, each once all of its ranks have arrived."""
        for group in groups:
            starts = {rank: self._start(rank, lane) for rank in group}
            end = max(starts.values()) + EXCHANGE
            for rank, start in starts.items():
                self._add(rank, lane, name, "exchange", start, end, site)

    def send(self, routes: Iterable[tuple[int, int]], lane: Lane, target_lane: Lane, site: "CallSite | None") -> None:
        """Adds transfers of values between ranks; a rank that sends to itself copies."""
        pairs = list(routes)
        starts = {source: self._start(source, lane) for source, _ in pairs}
        ends = dict(starts)
        for source, target in pairs:
            if source != target:
                start = self._start(target, target_lane)
                end = max(starts[source], start) + SENDING
                self._add(target, target_lane, "receive", "exchange", start, end, site)
                ends[source] = max(ends[source], end)
        for source, target in pairs:
            if source == target:
                ends[source] = max(ends[source], starts[source] + COPYING)
        for source, start in starts.items():
            self._add(source, lane, "send", "exchange", start, ends[source], site)

    def recorded(self, ranks: Sequence[int], lane: Lane) -> dict[int, float]:
        """Returns the time at which a stream has done all commands issued so far, by rank: for `wait`."""
        return {rank: self.clock(rank, lane) for rank in ranks}

    def wait(self, lane: Lane, recorded: Mapping[int, float], name: str, site: "CallSite | None") -> None:
        """Adds a wait of a stream for the recorded times of another one."""
        for rank, when in recorded.items():
            start = self._start(rank, lane)
            self._add(rank, lane, name, "wait", start, max(start + WAITING, when), site)

    def allocate(self, nbytes: int, ranks: Sequence[int], lane: Lane) -> SimulatedMemory:
        """Allocates memory for the result of the last task of a stream."""
        for rank in ranks:
            done = self.tasks[rank].get(lane)
            self.memory[rank].append((done[-1].start if done else 0.0, nbytes))
        return SimulatedMemory(nbytes, ranks, lane)

    def release(self, memory: SimulatedMemory) -> None:
        """Removes a holder of memory; the last one frees it once the stream has done all issued commands."""
        memory.holders -= 1
        if not memory.holders:
            for rank in memory.ranks:
                self.memory[rank].append((self.clock(rank, memory.lane), -memory.nbytes))

    def _start(self, rank: int, lane: Lane) -> float:
        return max(self.now, self.clock(rank, lane))

    def _add(
        self, rank: int, lane: Lane, name: str, kind: str, start: float, end: float, site: "CallSite | None"
    ) -> None:
        self._clocks[rank, lane] = end
        title = " ".join((name, *labels))
        self.tasks[rank].setdefault(lane, []).append(SimulatedTask(title, kind, start, end, self.commands, site))


def lane_name(lane: Lane) -> str:
    """Returns the name of a stream."""
    return "main" if lane is None else str(getattr(lane, "name", lane))


def groups(timeline: SimulatedTimeline) -> list[list[int]]:
    """Returns the ranks, grouped by equal tasks at equal times."""
    by_tasks: dict[object, list[int]] = {}
    for rank in sorted(timeline.tasks):
        tasks = tuple((lane_name(lane), tuple(tasks)) for lane, tasks in timeline.tasks[rank].items())
        by_tasks.setdefault((tasks, tuple(timeline.memory[rank])), []).append(rank)
    return list(by_tasks.values())


def ranks_named(ranks: Sequence[int]) -> str:
    """Formats ranks: "rank 3", "ranks 0-3" or "ranks 0, 2"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    is_run = list(ranks) == list(range(ranks[0], ranks[-1] + 1))
    return f"ranks {ranks[0]}-{ranks[-1]}" if is_run else f"ranks {', '.join(map(str, ranks))}"
