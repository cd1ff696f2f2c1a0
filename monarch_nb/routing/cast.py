"""Casts along a tree of host agents: who gets which ranks. Pure arithmetic on runs."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from msgspec import Struct

from monarch_nb.wire import agent_of
from monarch_nb.wire.header import CastPlan, Layout, Run

__all__ = ["Branch", "Delivery", "Expansion", "below", "expand", "indices", "plan_cast", "size_of"]


class Branch(NamedTuple):
    """A subtree: the process address of the agent at its head, and that agent's plan."""

    agent: str
    plan: CastPlan


class Delivery(Struct, frozen=True):
    """One receiver on this host: its process, its rank and incarnation, and the message's number and place."""

    address: str
    rank: int
    incarnation: int
    seq: int
    index: int


class Expansion(NamedTuple):
    """What an agent does with a plan."""

    deliveries: list[Delivery]
    children: list[Branch]


def plan_cast(layout: Layout, runs: Sequence[Run], *, fanout: int = 8) -> list[Branch]:
    """The at most `fanout` subtrees to which the controller sends.

    A subtree's plan names only its own hosts (the first is its head) and their ranks; what an agent pays and passes
    on is in proportion to what lies below it.
    """
    hosts = _hosts(layout, runs)
    return _branches(layout, runs, hosts, 0, fanout)


def expand(plan: CastPlan, host: str) -> Expansion:
    """What the agent of `host` delivers itself and what it passes on.

    Raises ValueError when the plan's head is another host.
    """
    head = plan.hosts[0]
    if plan.layout.hosts[head] != host:
        raise ValueError(f"this cast is for the agent of {plan.layout.hosts[head]}, not {host}")
    layout = plan.layout
    deliveries = [
        Delivery(
            f"{host}/{layout.uid}.{rank}.{run.proc_incarnation}",
            rank,
            run.incarnation,
            run.seq,
            run.index + place * run.index_stride,
        )
        for run in _clip(plan.runs, head * layout.per_host, (head + 1) * layout.per_host)
        for place, rank in enumerate(range(run.rank, run.rank + run.count * run.stride, run.stride))
    ]
    return Expansion(deliveries, below(plan))


def below(plan: CastPlan) -> list[Branch]:
    """What a plan's head passes on: the subtrees that are cut off when it is lost."""
    return _branches(plan.layout, plan.runs, plan.hosts[1:], plan.position + 1, plan.fanout)


def indices(runs: Sequence[Run]) -> Iterator[int]:
    """The places in the region that `runs` cover: what a lost branch leaves unanswered."""
    for run in runs:
        for place in range(run.count):
            yield run.index + place * run.index_stride


def size_of(runs: Sequence[Run]) -> int:
    """How many receivers `runs` name."""
    return sum(run.count for run in runs)


def _hosts(layout: Layout, runs: Sequence[Run]) -> Sequence[int]:
    """Indices of the hosts with any of the ranks, ascending."""
    per_host = layout.per_host
    found: set[int] = set()
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
            found.update(span)
        else:
            found.update(rank // per_host for rank in range(run.rank, last + 1, run.stride))
    return sorted(found)


def _branches(layout: Layout, runs: Sequence[Run], hosts: Sequence[int], position: int, fanout: int) -> list[Branch]:
    """Cut `hosts` into at most `fanout` stretches of like size, each headed by its first host."""
    fanout = max(1, fanout)
    branches = []
    count = min(fanout, len(hosts))
    for number in range(count):
        low, high = len(hosts) * number // count, len(hosts) * (number + 1) // count
        part = tuple(hosts[low:high])
        mine = _clip(runs, part[0] * layout.per_host, (part[-1] + 1) * layout.per_host)
        plan = CastPlan(layout, tuple(mine), position + low, fanout, part)
        branches.append(Branch(agent_of(layout.hosts[part[0]]), plan))
    return branches


def _clip(runs: Sequence[Run], start: int, stop: int) -> list[Run]:
    """The parts of `runs` with start <= rank < stop."""
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
