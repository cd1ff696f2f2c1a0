"""Casts along a tree of host agents: the ranks that each receives, and their replies, gathered at agents into few
messages. Pure arithmetic on runs.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

from msgspec import Struct, field

from monarch_nb.wire import agent_of
from monarch_nb.wire.header import CastPlan, Layout, Run

T = TypeVar("T")


class Branch(NamedTuple):
    """A subtree: the process address of the agent at its head, and that agent's plan."""

    agent: str
    plan: CastPlan


class Delivery(Struct, frozen=True):
    """One receiver on this host: its process, its rank and incarnation, and the message's number and index."""

    address: str
    rank: int
    incarnation: int
    seq: int
    index: int


class Expansion(NamedTuple):
    """The work of an agent on a plan."""

    deliveries: list[Delivery]
    children: list[Branch]


def plan_cast(layout: Layout, runs: Sequence[Run], *, fanout: int = 8) -> list[Branch]:
    """Returns the at most `fanout` subtrees to which the controller sends.

    A subtree's plan names only its own hosts (the first is its head) and their ranks; an agent's work and messages
    are in proportion to the receivers below it.
    """
    hosts = _hosts(layout, runs)
    names = (
        layout.hosts[hosts.start : hosts.stop]
        if isinstance(hosts, range)
        else tuple(layout.hosts[host] for host in hosts)
    )
    return _branches(CastPlan(layout.uid, layout.per_host, tuple(runs), tuple(hosts), names, max(1, fanout)), 0)


def expand(plan: CastPlan, host: str) -> Expansion:
    """Returns the messages that the agent of `host` delivers itself, and the branches that it passes on.

    Raises ValueError when the plan's head is another host.
    """
    if plan.head != host:
        raise ValueError(f"this cast is for the agent of {plan.head}, not {host}")
    first = plan.hosts[0] * plan.per_host
    deliveries = [
        Delivery(
            f"{host}/{plan.uid}.{rank}.{run.proc_incarnation}",
            rank,
            run.incarnation,
            run.seq,
            run.index + position * run.index_stride,
        )
        for run in _clip(plan.runs, first, first + plan.per_host)
        for position, rank in enumerate(range(run.rank, run.rank + run.count * run.stride, run.stride))
    ]
    return Expansion(deliveries, branches_below(plan))


def branches_below(plan: CastPlan) -> list[Branch]:
    """Returns the subtrees that a plan's head passes on, which are cut off when it is lost."""
    return _branches(plan, 1)


def indices(runs: Sequence[Run]) -> Iterator[int]:
    """Yields the indices in the region that `runs` cover."""
    for run in runs:
        for position in range(run.count):
            yield run.index + position * run.index_stride


def size_of(runs: Sequence[Run]) -> int:
    """Returns the number of receivers that `runs` name."""
    return sum(run.count for run in runs)


def _hosts(layout: Layout, runs: Sequence[Run]) -> Sequence[int]:
    """Returns the indices of the hosts with any of the ranks, ascending."""
    per_host = layout.per_host
    hosts: set[int] = set()
    for run in runs:
        if run.count < 1:
            continue
        last = run.rank + (run.count - 1) * run.stride
        if run.rank < 0 or last >= layout.size:
            raise ValueError(f"ranks {run.rank} to {last} are not all in a mesh of {layout.size} procs")
        if run.stride <= per_host:
            span = range(run.rank // per_host, last // per_host + 1)
            if len(runs) == 1:
                return span
            hosts.update(span)
        else:
            hosts.update(rank // per_host for rank in range(run.rank, last + 1, run.stride))
    return sorted(hosts)


def _branches(plan: CastPlan, after: int) -> list[Branch]:
    """Divides all but the first `after` hosts into at most `fanout` similar stretches, headed by their first."""
    branches = []
    size = len(plan.hosts) - after
    count = min(plan.fanout, size)
    for number in range(count):
        low, high = after + size * number // count, after + size * (number + 1) // count
        hosts, names = plan.hosts[low:high], plan.names[low:high]
        mine = _clip(plan.runs, hosts[0] * plan.per_host, (hosts[-1] + 1) * plan.per_host)
        part = CastPlan(plan.uid, plan.per_host, tuple(mine), hosts, names, plan.fanout)
        branches.append(Branch(agent_of(names[0]), part))
    return branches


def _clip(runs: Sequence[Run], start: int, stop: int) -> list[Run]:
    """Returns the parts of `runs` with start <= rank < stop."""
    clipped = []
    for run in runs:
        first = max(0, -((run.rank - start) // run.stride))
        last = min(run.count, (stop - 1 - run.rank) // run.stride + 1)
        if first >= last:
            continue
        if first == 0 and last == run.count:
            clipped.append(run)
        else:
            clipped.append(
                Run(
                    run.rank + first * run.stride,
                    last - first,
                    run.stride,
                    run.proc_incarnation,
                    run.incarnation,
                    run.seq,
                    run.index + first * run.index_stride,
                    run.index_stride,
                )
            )
    return clipped


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
