"""Ports across hosts: a value arrives once and in order, or returns to its sender."""

from collections.abc import Callable
from typing import Any

import pytest

from monarch_nb.actor import Accumulator, Actor, Channel, Port, SupervisionError, endpoint
from monarch_nb.testing import Cluster, NetworkFaults, cluster
from tests.memory_network.faults.actors import LEASE, SOON, Worker, outcome, send_ranked, workers

pytestmark = pytest.mark.timeout(60)
NETWORKS: dict[str, Callable[[], NetworkFaults]] = {
    "calm": NetworkFaults,
    "duplicating": lambda: NetworkFaults(duplicate=0.7),
    "reordering": lambda: NetworkFaults(reorder=0.7),
    "lossy": lambda: NetworkFaults(drop=0.05),
}
every_network = pytest.mark.parametrize("network", NETWORKS)


class Sender(Actor):
    def __init__(self) -> None:
        self.returned: list[str] = []

    @endpoint
    def send(self, port: Port[Any], items: list[Any]) -> None:
        for item in items:
            port.send(item)

    @endpoint
    def fail(self, port: Port[Any]) -> None:
        port.exception(KeyError("by way of a port"))

    @endpoint
    def open(self, once: bool) -> Port[Any]:
        port, self.receiver = Channel[Any].open(once=once)
        return port

    @endpoint
    def receive(self) -> Any:
        return self.receiver.recv().get()

    @endpoint
    def lost(self) -> list[str]:
        return self.returned

    def _handle_undeliverable_message(self, message: Any) -> bool:
        self.returned.append(message.error_msg())
        return True


@every_network
def test_a_ranked_receiver_gets_one_value_of_each(network: str) -> None:
    with cluster(hosts=3, seed=2, faults=NETWORKS[network]()) as sim:
        _, mesh = workers(sim)
        receiver = send_ranked(mesh.do, "x")
        sim.advance(30)
        values = sorted(receiver.recv().get(SOON) for _ in range(6))
        assert values == [(rank, (rank, "x")) for rank in range(6)]
        assert not receiver.recv().wait(0)


@every_network
def test_actors_on_two_hosts_talk_through_a_port_from_a_third(network: str) -> None:
    with cluster(hosts=3, seed=4, faults=NETWORKS[network]()) as sim:
        _, mesh = workers(sim, 1, Sender)
        first, second = mesh.slice(hosts=1), mesh.slice(hosts=2)
        port = sim.result(first.open.call_one(False), 300)
        sim.result(second.send.call_one(port, [1, 2, 3]), 300)
        assert [sim.result(first.receive.call_one(), 300) for _ in range(3)] == [1, 2, 3]


@pytest.mark.parametrize("once", [False, True])
@every_network
def test_an_error_is_raised_where_it_is_received(network: str, once: bool) -> None:
    with cluster(hosts=2, seed=6, faults=NETWORKS[network]()) as sim:
        _, mesh = workers(sim, 1, Sender)
        port, receiver = Channel[Any].open(once=once)
        sim.result(mesh.slice(hosts=1).fail.call_one(port), 300)
        sim.advance(10)
        with pytest.raises(KeyError, match="by way of a port"):
            receiver.recv().get(SOON)


def test_values_for_a_process_that_died_come_back_with_the_reason(three: Cluster) -> None:
    procs, mesh = workers(three, 1, Sender)
    port = three.result(mesh.slice(hosts=2).open.call_one(False))
    three.kill(procs.slice(hosts=2))
    three.result(mesh.slice(hosts=1).send.call_one(port, ["a", "b"]))
    three.advance(5)
    reasons = three.result(mesh.slice(hosts=1).lost.call_one())
    assert len(reasons) == 2
    assert all("signal 9" in reason or "died" in reason or "gone" in reason for reason in reasons)


def test_values_that_meet_a_cut_link_wait_for_it(two: Cluster) -> None:
    _, mesh = workers(two, 1, Sender)
    port = two.result(mesh.slice(hosts=1).open.call_one(False))
    two.partition(1)
    for number in range(3):
        port.send(number)
    two.advance(LEASE / 2)
    two.mend()
    assert [two.result(mesh.slice(hosts=1).receive.call_one()) for _ in range(3)] == [0, 1, 2]


@pytest.mark.parametrize("once", [False, True])
def test_a_dead_receiver_process_ends_the_call_that_waits_there(two: Cluster, once: bool) -> None:
    procs, mesh = workers(two, 1, Sender)
    receiver = mesh.slice(hosts=1)
    two.result(receiver.open.call_one(once))
    call = receiver.receive.call_one()
    two.settle()
    assert not call.done()
    two.kill(procs.slice(hosts=1))
    assert isinstance(outcome(two, call), SupervisionError)


@every_network
@pytest.mark.parametrize("shape", [(1, 4), (3, 2)], ids=str)
def test_answers_are_folded_once_each(network: str, shape: tuple[int, int]) -> None:
    hosts, gpus = shape
    with cluster(hosts=hosts, seed=8, faults=NETWORKS[network]()) as sim:
        _, mesh = workers(sim, gpus)
        total = Accumulator(mesh.do, [], lambda so_far, answer: [*so_far, answer[0]])
        futures = [total.accumulate("x") for _ in range(3)]
        assert [sorted(sim.result(future, 300)) for future in futures] == [list(range(hosts * gpus))] * 3


@pytest.mark.parametrize("rank", range(4))
def test_a_fold_fails_with_the_rank_that_is_lost(two: Cluster, rank: int) -> None:
    procs, mesh = workers(two)
    future = Accumulator(mesh.rest, 0, lambda so_far, answer: so_far + 1).accumulate("x", 5.0)
    future.wait(0)
    two.advance(1)
    two.kill(procs.slice(hosts=rank // 2, gpus=rank % 2))
    error = outcome(two, future)
    assert isinstance(error, SupervisionError)
    assert f"hosts={rank // 2} gpus={rank % 2}" in str(error)


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("cls", [Worker])
def test_a_stream_gives_the_answers_of_all_but_the_lost_rank(two: Cluster, rank: int, cls: Any) -> None:
    procs, mesh = workers(two, cls=cls)
    futures = list(mesh.rest.stream("x", 5.0))
    two.advance(1)
    two.kill(procs.slice(hosts=rank // 2, gpus=rank % 2))
    outcomes = [outcome(two, future) for future in futures]
    errors = [error for error in outcomes if error is not None]
    assert [type(error) for error in errors] == [SupervisionError]
    answers = sorted(future.get(0) for future, error in zip(futures, outcomes, strict=True) if error is None)
    assert answers == [(peer, "x") for peer in range(4) if peer != rank]
