"""References work on every host, and report the end or the heal of the meshes that they name."""

from typing import Any

import pytest

from monarch_nb.actor import Actor, ActorError, SupervisionError, endpoint, heal_mesh
from monarch_nb.lifecycle import updates
from monarch_nb.testing import Cluster
from tests.memory_network.faults.actors import ADVERBS, LEASE, SOON, Adverb, Worker, outcome, workers

pytestmark = pytest.mark.timeout(60)


class Holder(Actor):
    """Keeps a reference, and calls through it in every way."""

    def __init__(self, mesh: Any) -> None:
        self.mesh = mesh

    @endpoint
    def ask(self, name: str, item: Any) -> list[Any]:
        adverb = next(adverb for adverb in ADVERBS if adverb.name == name)
        return [future.get(SOON) for future in adverb(self.mesh, "do", item).futures]

    @endpoint
    def hand_on(self) -> Any:
        return self.mesh

    @endpoint
    def take(self, mesh: Any) -> None:
        self.mesh = mesh

    @endpoint
    def heal(self) -> bool:
        return heal_mesh(self.mesh) is self.mesh


class Maker(Actor):
    """Owns workers on given processes."""

    def __init__(self, procs: Any) -> None:
        self.workers: Any = procs.spawn("made", Worker)

    @endpoint
    def give(self) -> Any:
        return self.workers

    @endpoint
    def fail(self) -> None:
        raise ValueError("the maker broke")


every_adverb = pytest.mark.parametrize("adverb", ADVERBS, ids=lambda adverb: adverb.name)


def holder(sim: Cluster, mesh: Any, host: int = 2) -> Any:
    procs = sim.hosts().slice(hosts=host).spawn_procs(name=f"holders{host}")
    keeper: Any = procs.spawn("holder", Holder, mesh)
    sim.result(keeper.initialized)
    return keeper


@every_adverb
def test_a_holder_on_another_host_reaches_all_ranks(three: Cluster, adverb: Adverb) -> None:
    _, mesh = workers(three)
    keeper = holder(three, mesh)
    assert three.result(keeper.ask.call_one(adverb.name, "x"))
    done = three.result(mesh.history.call()).values()
    assert sum(history.count("x") for history in done) == adverb.ranks(3, 2)


@every_adverb
def test_a_holder_hears_of_a_death_that_it_did_not_see(three: Cluster, adverb: Adverb) -> None:
    procs, mesh = workers(three)
    keeper = holder(three, mesh)
    three.kill(procs.slice(hosts=1))
    error = outcome(three, keeper.ask.call_one(adverb.name, "x"))
    assert isinstance(error, ActorError)
    assert "signal 9" in str(error)
    assert "hosts=1" in str(error)


@every_adverb
def test_a_reference_works_again_after_somebody_else_healed_its_mesh(three: Cluster, adverb: Adverb) -> None:
    procs, mesh = workers(three)
    keeper = holder(three, mesh)
    three.result(keeper.ask.call_one(adverb.name, "before"))
    three.kill(procs.slice(hosts=1))
    heal_mesh(mesh, timeout=SOON)
    assert three.result(keeper.ask.call_one(adverb.name, "after"))
    healed = three.result(mesh.slice(hosts=1).history.call()).values()
    assert all("before" not in history for history in healed)


@every_adverb
def test_any_holder_of_a_reference_may_heal_its_mesh(three: Cluster, adverb: Adverb) -> None:
    procs, mesh = workers(three)
    keeper = holder(three, mesh)
    three.kill(procs.slice(hosts=1))
    assert three.result(keeper.heal.call_one())
    assert three.result(keeper.ask.call_one(adverb.name, "x"))
    assert len(adverb(mesh, "do", "y").answers(three)) == adverb.ranks(3, 2)


@every_adverb
def test_a_reference_to_what_was_stopped_says_so(three: Cluster, adverb: Adverb) -> None:
    _, mesh = workers(three)
    keeper = holder(three, mesh)
    three.result(mesh.stop("no longer wanted"))
    error = outcome(three, keeper.ask.call_one(adverb.name, "x"))
    assert isinstance(error, ActorError)
    assert "no longer wanted" in str(error)


@pytest.mark.parametrize("hands", range(1, 5))
def test_a_reference_goes_through_many_hands_and_back(three: Cluster, hands: int) -> None:
    procs, mesh = workers(three)
    reference: Any = mesh.slice(gpus=1)
    for hand in range(hands):
        reference = three.result(holder(three, reference, host=hand % 3).hand_on.call_one())
    assert reference == mesh.slice(gpus=1)
    assert [rank for rank, _ in three.result(reference.do.call("x")).values()] == [0, 1, 2]
    three.kill(procs.slice(hosts=1, gpus=1))
    with pytest.raises(SupervisionError, match="hosts=1"):
        three.result(reference.do.call("y"))
    heal_mesh(reference, timeout=SOON)
    assert len(three.result(mesh.do.call("z")).values()) == 6


@pytest.mark.parametrize("end", ["killed", "stopped", "failed", "host"])
def test_children_of_an_actor_end_with_it_for_every_holder(three: Cluster, end: str) -> None:
    targets = three.hosts().slice(hosts=2).spawn_procs(per_host={"gpus": 2}, name="targets")
    own = three.hosts().slice(hosts=1).spawn_procs(name="own")
    maker: Any = own.spawn("maker", Maker, targets)
    children = three.result(maker.give.call_one())
    keeper = holder(three, children, host=0)
    assert three.result(children.do.call("x")).values() == [(0, "x"), (1, "x")]
    match end:
        case "killed":
            three.kill(own)
        case "stopped":
            three.result(maker.stop())
        case "failed":
            maker.fail.broadcast()
        case "host":
            three.kill_host(1)
    three.advance(5)
    for error in (outcome(three, children.do.call("y")), outcome(three, keeper.ask.call_one("call", "y"))):
        assert isinstance(error, (SupervisionError, ActorError))
    mesh: Any = targets.spawn("again", Worker)
    assert len(three.result(mesh.do.call("z")).values()) == 2


@pytest.mark.parametrize("end", ["killed", "stopped"])
def test_a_reference_outlives_the_one_who_handed_it_on(three: Cluster, end: str) -> None:
    _, mesh = workers(three)
    first, second = holder(three, mesh, host=1), holder(three, None, host=2)
    three.result(second.take.call_one(three.result(first.hand_on.call_one())))
    if end == "killed":
        three.kill_host(1)
        assert three.result(mesh.slice(hosts=2).do.call("x"))
        error = outcome(three, second.ask.call_one("call", "x"))
        assert "machine is gone" in str(error)  # of ranks of the mesh, not of the first holder
    else:
        three.result(first.stop())
        assert three.result(second.ask.call_one("call", "x"))


def test_a_holder_that_was_cut_off_learns_of_a_heal_later(three: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updates, "PATIENCE", 0.1)  # real seconds in which holders may take note of a heal
    procs, mesh = workers(three)
    part = mesh.slice(hosts=slice(0, 2))
    keeper = holder(three, part, host=2)
    three.result(keeper.ask.call_one("call", "x"))
    three.partition(2)
    three.kill(procs.slice(hosts=1, gpus=0))
    heal_mesh(part, timeout=SOON)
    three.advance(LEASE / 4)
    three.mend()
    three.advance(5)
    assert len(three.result(keeper.ask.call_one("call", "y"))[0].values()) == 4


def test_a_reference_whose_hosts_are_partly_lost_still_arrives(three: Cluster) -> None:
    _, mesh = workers(three)
    fresh = holder(three, None, host=1)
    lost_procs = three.hosts().slice(hosts=2).spawn_procs(name="others")
    three.result(lost_procs.spawn("other", Worker).initialized)
    three.kill_host(2)
    three.advance(5)
    three.result(fresh.take.call_one(mesh))
    assert "machine is gone" in str(outcome(three, fresh.ask.call_one("call", "x")))
    three.result(fresh.take.call_one(mesh.slice(hosts=slice(0, 2))))
    assert three.result(fresh.ask.call_one("call", "y"))
