"""Heals on a network: permission, limits, what is restored, and what never arrives."""

import threading
from typing import Any

import pytest

from monarch_nb.actor import Actor, SupervisionError, current_rank, endpoint, heal_mesh
from monarch_nb.lifecycle.watching import ProcessWatcher
from monarch_nb.runtime import current_runtime, when_done
from monarch_nb.supervision import HealError
from monarch_nb.testing import Cluster, NetworkFaults, cluster
from tests.memory_network.faults.actors import ADVERBS, LEASE, SOON, Adverb, Worker, outcome, workers

pytestmark = pytest.mark.timeout(60)


class Healed(Actor):
    """Knows its constructor's arguments, and which other ranks are new."""

    def __init__(self, word: str, *, times: int = 1) -> None:
        self.word = word * times
        self.new: list[list[int]] = []

    @endpoint
    def made(self) -> str:
        return self.word

    @endpoint
    def spoil(self) -> None:
        self.word = "spoilt"

    @endpoint
    def heard(self) -> list[list[int]]:
        return self.new

    @endpoint
    def fail(self) -> None:
        raise ValueError("broken")

    def __healed__(self, points: Any) -> None:
        self.new.append([point.rank for point in points])


def by_death(sim: Cluster, procs: Any, mesh: Any, rank: int) -> None:
    sim.kill(procs.slice(hosts=rank // 2, gpus=rank % 2))


def by_exception(sim: Cluster, procs: Any, mesh: Any, rank: int) -> None:
    mesh.slice(hosts=rank // 2, gpus=rank % 2).fail.broadcast()
    sim.settle()


every_cause = pytest.mark.parametrize("lose", [by_death, by_exception])


@every_cause
@pytest.mark.parametrize("rank", range(4))
def test_a_healed_rank_is_rebuilt_and_others_stay_as_they_are(two: Cluster, lose: Any, rank: int) -> None:
    procs = two.hosts().spawn_procs(per_host={"gpus": 2}, name="procs")
    mesh: Any = procs.spawn("mesh", Healed, "ab", times=2)
    two.result(mesh.spoil.call())
    lose(two, procs, mesh, rank)
    heal_mesh(mesh, timeout=SOON)
    expected = ["spoilt"] * 4
    expected[rank] = "abab"
    assert two.result(mesh.made.call()).values() == expected
    reports = two.result(mesh.heard.call()).values()
    assert [reports[peer] for peer in range(4) if peer != rank] == [[[rank]]] * 3
    assert reports[rank] == []


@every_cause
def test_a_rank_heals_three_times_a_minute_but_not_four(two: Cluster, lose: Any) -> None:
    procs = two.hosts().spawn_procs(per_host={"gpus": 2}, name="procs")
    mesh: Any = procs.spawn("mesh", Healed, "ab")
    two.result(mesh.initialized)
    for _ in range(3):
        lose(two, procs, mesh, 3)
        heal_mesh(mesh, timeout=SOON)
        two.advance(5)
    lose(two, procs, mesh, 3)
    with pytest.raises(HealError, match="healed 3 times within 60 s and failed again"):
        heal_mesh(mesh, timeout=SOON)
    lose(two, procs, mesh, 0)  # another rank has its own count
    heal_mesh(mesh.slice(hosts=0), timeout=SOON)
    two.advance(46)
    heal_mesh(mesh, timeout=SOON)
    assert two.result(mesh.made.call()).values() == ["ab"] * 4


@pytest.mark.parametrize("seed", range(6))
def test_whatever_dies_together_comes_back_together(seed: int) -> None:
    victims = [rank for rank in range(6) if (seed + 1) * 11 >> rank & 1] or [seed]
    with cluster(hosts=3, seed=seed) as sim:
        procs, mesh = workers(sim)
        sim.result(mesh.do.call("before"))
        for rank in victims:
            sim.kill(procs.slice(hosts=rank // 2, gpus=rank % 2))
        heal_mesh(mesh, timeout=SOON)
        histories = sim.result(mesh.history.call()).values()
        assert [rank for rank in range(6) if histories[rank] == []] == victims
        assert sum(len(failure.crashed_ranks) for failure in sim.failures) >= len(victims)


@pytest.mark.parametrize("adverb", ADVERBS, ids=lambda adverb: adverb.name)
@pytest.mark.parametrize("delay", [0.0005, 0.5])
def test_nothing_sent_before_a_death_reaches_who_comes_after_it(adverb: Adverb, delay: float) -> None:
    with cluster(hosts=2, faults=NetworkFaults(delay=(delay / 2, delay))) as sim:
        procs, mesh = workers(sim)
        long_call = mesh.rest.call("busy", 30.0)
        sim.advance(2)
        pending = [adverb(mesh, "do", number) for number in range(5)]
        sim.kill(procs.slice(hosts=1))
        heal_mesh(mesh, timeout=SOON)
        assert outcome(sim, long_call) is not None
        for call in pending:
            assert call.errors(sim)
        sim.advance(40)
        assert sim.result(mesh.slice(hosts=1).history.call()).values() == [[], []]


@pytest.mark.parametrize("host", [0, 1], ids=["answers are late", "news is late"])
def test_calls_fail_of_a_death_only_once_healing_is_possible(host: int) -> None:
    with cluster(hosts=3, faults=NetworkFaults(lag={host: 0.5})) as sim:
        procs, mesh = workers(sim, gpus=1)
        sim.partition(2)
        pending = mesh.do.call("x")  # it arrives after the death of the process
        failures: list[set[int]] = []
        when_done(pending, lambda _: failures.append(current_runtime().supervisor.failed(mesh._state.uid)))  # type: ignore[attr-defined]
        sim.kill(procs.slice(hosts=2))
        sim.mend()
        with pytest.raises(SupervisionError, match="signal 9"):
            sim.result(pending)
        assert failures == [{2}]
        heal_mesh(mesh, timeout=SOON)
        assert len(sim.result(mesh.do.call("x")).values()) == 3


def test_an_unreachable_host_cannot_be_healed_and_says_so(two: Cluster) -> None:
    _, mesh = workers(two)
    two.partition(1)
    two.advance(LEASE + 1)
    with pytest.raises(HealError, match="m1"):
        heal_mesh(mesh, timeout=SOON)
    two.mend()
    heal_mesh(mesh, timeout=SOON)
    assert len(two.result(mesh.do.call("x")).values()) == 4


def test_an_unresponsive_process_is_forgotten_with_its_host(two: Cluster) -> None:
    procs, _ = workers(two)
    here, there = (procs._state.address(rank) for rank in (0, 2))
    unresponsive = current_runtime().part(ProcessWatcher).unresponsive
    unresponsive.update({here: 1.0, there: 2.0})
    two.kill_host(1)
    assert unresponsive == {here: 1.0}


def test_a_host_that_died_is_not_healed_elsewhere(two: Cluster) -> None:
    _, mesh = workers(two)
    two.kill_host(1)
    with pytest.raises(HealError, match="m1"):
        heal_mesh(mesh, timeout=SOON)
    assert two.result(mesh.slice(hosts=0).do.call("x")).values() == [(0, "x"), (1, "x")]


@pytest.mark.parametrize("healers", [2, 4])
def test_many_who_heal_at_once_start_each_rank_once(three: Cluster, healers: int) -> None:
    procs, mesh = workers(three)
    healer_mesh: Any = three.hosts().slice(hosts=2).spawn_procs(per_host={"n": healers}).spawn("healers", Worker)
    three.result(healer_mesh.initialized)
    three.kill(procs.slice(hosts=1, gpus=0))
    heals = [healer_mesh.slice(n=n).heal.call_one(mesh) for n in range(healers)]
    for future in heals:
        assert three.result(future)
    addresses = {procs._state.address(rank) for rank in range(6)}
    assert sum(address.endswith(".1") for address in addresses) == 1
    assert len(three.result(mesh.do.call("x")).values()) == 6


def test_a_heal_of_what_is_well_starts_nothing(two: Cluster) -> None:
    procs, mesh = workers(two)
    two.result(mesh.do.call("x"))
    for part in (mesh, procs, mesh.slice(hosts=1), procs.slice(gpus=0)):
        assert heal_mesh(part, timeout=SOON) is part
    assert two.result(mesh.history.call()).values() == [["x"]] * 4


@every_cause
def test_a_slice_is_healed_alone(two: Cluster, lose: Any) -> None:
    procs = two.hosts().spawn_procs(per_host={"gpus": 2}, name="procs")
    mesh: Any = procs.spawn("mesh", Healed, "ab")
    two.result(mesh.initialized)
    for rank in (1, 3):
        lose(two, procs, mesh, rank)
    heal_mesh(mesh.slice(hosts=1), timeout=SOON)
    assert two.result(mesh.slice(hosts=1).made.call()).values() == ["ab", "ab"]
    with pytest.raises(SupervisionError, match="hosts=0 gpus=1"):
        two.result(mesh.made.call())


class Stumbles(Actor):
    """Cannot be created unless it is allowed."""

    allowed = threading.Event()

    def __init__(self) -> None:
        if not self.allowed.is_set():
            raise ValueError("not now")

    @endpoint
    def rank(self) -> int:
        return current_rank().rank


def test_a_constructor_that_fails_in_a_heal_fails_the_heal(two: Cluster) -> None:
    Stumbles.allowed.set()
    procs = two.hosts().spawn_procs(per_host={"gpus": 1}, name="procs")
    mesh: Any = procs.spawn("mesh", Stumbles)
    assert two.result(mesh.rank.call()).values() == [0, 1]
    two.kill(procs.slice(hosts=1))
    Stumbles.allowed.clear()
    with pytest.raises(HealError, match="not now"):
        heal_mesh(mesh, timeout=SOON)
    Stumbles.allowed.set()
    heal_mesh(mesh, timeout=SOON)
    assert two.result(mesh.rank.call()).values() == [0, 1]


def test_a_heal_over_a_cut_link_resumes_when_it_is_mended(two: Cluster) -> None:
    procs, mesh = workers(two)
    two.kill(procs.slice(hosts=1, gpus=1))
    two.partition(1)
    thread = threading.Thread(target=heal_mesh, args=(mesh,), kwargs={"timeout": SOON})
    thread.start()
    two.advance(5)
    assert thread.is_alive()
    two.mend()
    two.advance(5)
    thread.join(SOON)
    assert not thread.is_alive()
    assert len(two.result(mesh.do.call("x")).values()) == 4


@pytest.mark.parametrize("kill", ["procs", "slice"])
def test_ranks_can_be_killed_by_the_heal_itself(two: Cluster, kill: str) -> None:
    procs, mesh = workers(two)
    call = mesh.rest.call("stuck", 1000.0)
    two.advance(1)
    heal_mesh(procs if kill == "procs" else mesh.slice(hosts=1), timeout=SOON, kill=True)
    assert isinstance(outcome(two, call), SupervisionError)
    histories = [[] if kill == "procs" or rank > 1 else ["stuck"] for rank in range(4)]
    if kill == "slice":
        two.advance(1000)
    assert two.result(mesh.history.call()).values() == histories
    assert current_runtime() is not None
