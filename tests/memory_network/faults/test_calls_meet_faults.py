"""Every adverb, with faults before, while and after its messages are answered."""

from typing import Any

import pytest

from monarch_nb.actor import SupervisionError, heal_mesh
from monarch_nb.testing import Cluster, NetworkFaults, cluster
from tests.memory_network.faults.actors import ADVERBS, LEASE, SOON, Adverb, AsyncWorker, Worker, workers

pytestmark = pytest.mark.timeout(60)
every_adverb = pytest.mark.parametrize("adverb", ADVERBS, ids=lambda adverb: adverb.name)
every_kind = pytest.mark.parametrize("cls", [Worker, AsyncWorker])


@every_kind
@every_adverb
def test_a_request_over_a_cut_link_arrives_once_it_is_mended(two: Cluster, adverb: Adverb, cls: Any) -> None:
    _, mesh = workers(two, cls=cls)
    two.partition(1)
    pending = adverb(mesh, "do", "late")
    two.advance(LEASE / 2)
    assert not pending.done
    two.mend()
    assert len(pending.answers(two)) == adverb.ranks(2, 2)
    times = [history.count("late") for history in adverb.on(mesh).history.call().get(SOON).values()]
    assert sum(times) == adverb.ranks(2, 2)
    assert two.failures == []


@every_kind
@every_adverb
def test_an_answer_over_a_cut_link_arrives_once_it_is_mended(two: Cluster, adverb: Adverb, cls: Any) -> None:
    _, mesh = workers(two, cls=cls)
    pending = adverb(mesh, "rest", "once", 5.0)
    two.advance(1)
    two.partition(1)
    two.advance(10)
    assert not pending.done
    two.mend()
    assert [item for _, item in pending.answers(two)] == ["once"] * adverb.ranks(2, 2)
    assert two.failures == []


@every_adverb
def test_links_cut_past_the_lease_fail_their_calls_naming_the_host(two: Cluster, adverb: Adverb) -> None:
    _, mesh = workers(two)
    pending = adverb(mesh, "rest", "never", 5.0)
    two.advance(1)
    two.partition(1)
    two.advance(LEASE - 1)
    assert not pending.done
    two.advance(2)
    errors = pending.errors(two)
    assert errors
    for error in errors:
        assert isinstance(error, SupervisionError)
        assert "no connection to its agent for 60 s" in str(error)
        assert "m1" in str(error)
    assert len(two.failures) > 0
    assert mesh.slice(hosts=0).do.call("still").get(SOON).values() == [(0, "still"), (1, "still")]


@every_kind
@every_adverb
def test_a_rank_that_was_killed_before_is_named_at_once(two: Cluster, adverb: Adverb, cls: Any) -> None:
    procs, mesh = workers(two, cls=cls)
    mesh.do.call(0).get(SOON)
    two.kill(procs.slice(hosts=1))
    errors = adverb(mesh, "do", "lost").errors_now()
    assert errors
    assert all(isinstance(error, SupervisionError) and "signal 9" in str(error) for error in errors)
    assert all("workers" in str(error) and "hosts=1" in str(error) for error in errors)
    assert all("lost" not in history for history in mesh.slice(hosts=0).history.call().get(SOON).values())


def test_the_error_of_a_killed_process_names_class_and_owners(two: Cluster) -> None:
    procs, mesh = workers(two)
    two.kill(procs.slice(hosts=1, gpus=0))
    with pytest.raises(SupervisionError) as raised:
        mesh.do.call(0).get(SOON)
    actor = f"<root>.<{Worker.__module__}.Worker workers{{'hosts': 1/2, 'gpus': 0/2}}>"
    assert f"The actor {actor} and all its descendants have failed" in str(raised.value)
    assert [failure.cause.actor for failure in two.failures] == [actor]


@every_kind
@every_adverb
def test_a_rank_that_is_killed_while_it_works_fails_the_call(two: Cluster, adverb: Adverb, cls: Any) -> None:
    procs, mesh = workers(two, cls=cls)
    pending = adverb(mesh, "rest", "half", 5.0)
    two.advance(1)
    two.kill(procs.slice(hosts=1))
    errors = pending.errors(two)
    assert errors
    assert all(isinstance(error, SupervisionError) and "signal 9" in str(error) for error in errors)


@every_adverb
def test_an_answer_that_has_come_stays_whatever_dies_afterwards(two: Cluster, adverb: Adverb) -> None:
    procs, mesh = workers(two)
    pending = adverb(mesh, "do", "kept")
    two.settle()
    two.kill(procs.slice(hosts=1))
    two.kill_host(1)
    assert [item for _, item in pending.answers(two)] == ["kept"] * adverb.ranks(2, 2)


@every_adverb
def test_a_host_that_dies_while_its_ranks_work_fails_the_call(two: Cluster, adverb: Adverb) -> None:
    _, mesh = workers(two)
    pending = adverb(mesh, "rest", "half", 5.0)
    two.advance(1)
    two.kill_host(1)
    errors = pending.errors(two)
    assert errors
    assert all(isinstance(error, SupervisionError) and "its machine is gone" in str(error) for error in errors)


@every_adverb
def test_a_call_is_not_repeated_by_a_heal_in_its_middle(two: Cluster, adverb: Adverb) -> None:
    procs, mesh = workers(two)
    pending = adverb(mesh, "rest", "first", 5.0)
    two.advance(1)
    two.kill(procs.slice(hosts=1))
    heal_mesh(mesh, timeout=SOON)
    assert pending.errors(two)
    two.advance(20)
    assert mesh.slice(hosts=1).history.call().get(SOON).values() == [[], []]
    assert len(adverb(mesh, "do", "second").answers(two)) == adverb.ranks(2, 2)


@every_adverb
def test_a_stop_lets_running_calls_answer_and_refuses_later_ones(two: Cluster, adverb: Adverb) -> None:
    _, mesh = workers(two)
    running = adverb(mesh, "rest", "running", 5.0)
    two.advance(1)
    waiting = adverb(mesh, "do", "waiting")
    two.settle()
    stop = mesh.stop("enough of it")
    two.advance(5)
    two.result(stop)
    assert len(running.answers(two)) == adverb.ranks(2, 2)
    errors = [*waiting.errors(two), *adverb(mesh, "do", "late").errors(two)]
    assert len(errors) >= 1
    assert all(isinstance(error, SupervisionError) and "stopped" in str(error) for error in errors)
    assert two.failures == []


@pytest.mark.parametrize("adverb", [way for way in ADVERBS if way.name != "accumulate"], ids=lambda way: way.name)
def test_a_limit_ends_calls_over_a_cut_link(two: Cluster, adverb: Adverb) -> None:
    _, mesh = workers(two)
    busy = mesh.rest.call("busy", 20.0)
    two.advance(1)
    endpoint = adverb.on(mesh).do.options(timeout=5.0)
    call = adverb.begin(endpoint, "late")
    two.advance(4.5)
    assert not call.done
    two.advance(1)
    assert call.errors(two)
    assert all(isinstance(error, TimeoutError) for error in call.errors(two))
    two.result(busy)
    assert mesh.history.call().get(SOON).values() == [["busy"]] * 4


UNRULY = {
    "slow": NetworkFaults(delay=(1.0, 5.0)),
    "duplicating": NetworkFaults(duplicate=0.5),
    "reordering": NetworkFaults(reorder=0.5),
    "lossy": NetworkFaults(drop=0.05),
    "all": NetworkFaults(delay=(0.01, 0.5), drop=0.05, duplicate=0.2, reorder=0.3),
}


@pytest.mark.parametrize("faults", UNRULY)
@every_adverb
def test_however_unruly_the_network_a_call_is_made_once_and_answered(faults: str, adverb: Adverb) -> None:
    with cluster(hosts=2, seed=len(faults), faults=UNRULY[faults]) as sim:
        _, mesh = workers(sim)
        pending = [adverb(mesh, "do", number) for number in range(5)]
        for number, call in enumerate(pending):
            answers = call.answers(sim, within=600)
            assert [item for _, item in answers] == [number] * adverb.ranks(2, 2)
        done = [item for history in sim.result(mesh.history.call(), 600).values() for item in history]
        assert sorted(done) == sorted(list(range(5)) * adverb.ranks(2, 2))
        assert sim.failures == []
