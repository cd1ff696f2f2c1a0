"""Owners of owners: a failure climbs from its origin to the first owner that handles it, on any host."""

from collections.abc import Iterator
from typing import Any

import pytest

from monarch_nb.actor import Actor, Channel, MeshFailure, Port, SupervisionError, endpoint
from monarch_nb.testing import Cluster, cluster
from tests.memory_network.faults.actors import LEASE, Worker, outcome

pytestmark = pytest.mark.timeout(60)


class Owner(Actor):
    """Owns the next level, down to workers; reports each failure, and handles it or not."""

    def __init__(self, level: int, handler: int, port: Port[Any], procs: list[Any]) -> None:
        self.level, self.handler, self.port = level, handler, port
        first, *rest = procs
        if rest:
            self.child: Any = first.spawn(f"level{level - 1}", type(self), level - 1, handler, port, rest)
        else:
            self.child = first.spawn("leaves", Worker)

    @endpoint
    def below(self, levels: int) -> Any:
        return self.child if levels == 0 else self.child.below.call_one(levels - 1).get()

    @endpoint
    def alive(self) -> int:
        return self.level

    def __supervise__(self, failure: MeshFailure) -> bool:
        self.port.send((self.level, failure.mesh_name, failure.report()))
        return self.level == self.handler


class AsyncOwner(Owner):
    @endpoint
    async def below(self, levels: int) -> Any:
        return self.child if levels == 0 else await self.child.below.call_one(levels - 1)

    @endpoint
    async def alive(self) -> int:
        return self.level

    async def __supervise__(self, failure: MeshFailure) -> bool:  # type: ignore[override]
        return Owner.__supervise__(self, failure)


class Tree:
    """Three owners, one on each host, the highest first; the lowest owns workers on a fourth host."""

    def __init__(self, sim: Cluster, cls: Any, handler: int) -> None:
        self.sim = sim
        port, self.receiver = Channel[Any].open()
        hosts = sim.hosts()
        self.procs = [hosts.slice(hosts=n).spawn_procs(per_host={"gpus": 2}, name=f"procs{n}") for n in range(4)]
        owners = [procs.slice(gpus=0) for procs in self.procs]
        self.top: Any = owners[0].spawn("level3", cls, 3, handler, port, [owners[1], owners[2], self.procs[3]])
        sim.result(self.top.initialized)
        self.owners = {3: self.top}
        for level in (2, 1):
            self.owners[level] = sim.result(self.top.below.call_one(2 - level))
        self.leaves = sim.result(self.top.below.call_one(2))
        sim.result(self.leaves.initialized)

    def heard(self) -> list[tuple[int, str, str]]:
        """The failures that the owners have heard so far."""
        self.sim.settle()
        reports = []
        while (future := self.receiver.recv()).wait(0):
            reports.append(future.get(0))
        return reports


def fail_by_exception(tree: Tree) -> None:
    tree.leaves.slice(gpus=1).fail.broadcast("it broke")


def fail_by_death(tree: Tree) -> None:
    tree.sim.kill(tree.procs[3].slice(gpus=1))


def fail_by_host(tree: Tree) -> None:
    tree.sim.kill_host(3)


def fail_by_silence(tree: Tree) -> None:
    tree.sim.partition(3)
    tree.sim.advance(LEASE + 1)


WAYS = {
    "exception": (fail_by_exception, "it broke"),
    "death": (fail_by_death, "signal 9"),
    "host": (fail_by_host, "machine is gone"),
    "silence": (fail_by_silence, "no connection"),
}


@pytest.fixture
def four() -> Iterator[Cluster]:
    with cluster(hosts=4) as sim:
        yield sim


@pytest.mark.parametrize("cls", [Owner, AsyncOwner])
@pytest.mark.parametrize("handler", [1, 2, 3, 0])
@pytest.mark.parametrize("way", WAYS)
def test_a_failure_climbs_to_the_first_who_handles_it(four: Cluster, way: str, handler: int, cls: Any) -> None:
    fail, text = WAYS[way]
    tree = Tree(four, cls, handler)
    fail(tree)
    four.advance(5)
    reports = tree.heard()
    levels = list(range(1, (handler or 3) + 1))
    assert sorted({level for level, *_ in reports}) == levels
    assert all(text in report for *_, report in reports)
    assert {name for level, name, _ in reports if level == 1} <= {"leaves"}
    for level, owner in tree.owners.items():
        if handler and level >= handler:
            assert four.result(owner.alive.call_one()) == level
        else:
            error = outcome(four, owner.alive.call_one())
            assert isinstance(error, SupervisionError)
            highest = level == (handler or 4) - 1  # the owner of the others, which have ended with it
            assert (text if highest else "its owner ended") in str(error)
    failures = [failure for failure in four.failures if failure.mesh_name == "level3"]
    assert len(failures) == (0 if handler else 1)


@pytest.mark.parametrize("cls", [Owner, AsyncOwner])
@pytest.mark.parametrize("level", [1, 2, 3])
def test_everything_an_owner_owned_ends_with_it_down_to_the_leaves(four: Cluster, level: int, cls: Any) -> None:
    tree = Tree(four, cls, 0)
    four.kill(tree.procs[3 - level].slice(gpus=0))
    four.advance(5)
    for mesh in (*(tree.owners[lower] for lower in range(1, level + 1)),):
        assert isinstance(outcome(four, mesh.alive.call_one()), SupervisionError)
    assert isinstance(outcome(four, tree.leaves.do.call("x")), SupervisionError)
    assert [name for depth, name, _ in tree.heard() if depth == level + 1] == ([f"level{level}"] if level < 3 else [])


@pytest.mark.parametrize("cls", [Owner, AsyncOwner])
@pytest.mark.parametrize("level", [1, 2, 3])
def test_stopping_an_owner_is_no_failure_and_stops_its_subtree(four: Cluster, level: int, cls: Any) -> None:
    tree = Tree(four, cls, 0)
    stop = tree.owners[level].stop("enough")
    four.result(stop)
    four.advance(1)
    assert tree.heard() == []
    assert four.failures == []
    error = outcome(four, tree.leaves.do.call("x"))
    assert isinstance(error, (SupervisionError, RuntimeError))
    assert any(word in str(error) for word in ("stopped", "ended"))
    for higher in range(level + 1, 4):
        assert four.result(tree.owners[higher].alive.call_one()) == higher
