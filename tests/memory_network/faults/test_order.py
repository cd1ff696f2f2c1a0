"""Messages of one sender reach one receiver in the order they were sent, whichever ways they take and whatever the
network does to them."""

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest

from monarch_nb.actor import Channel
from monarch_nb.testing import Cluster, NetworkFaults, cluster
from tests.memory_network.faults.actors import AsyncWorker, Worker, workers

pytestmark = pytest.mark.timeout(60)

NETWORKS: dict[str, Callable[[], NetworkFaults]] = {
    "calm": NetworkFaults,
    "duplicating": lambda: NetworkFaults(duplicate=0.5),
    "reordering": lambda: NetworkFaults(reorder=0.5),
    "uneven": lambda: NetworkFaults(delay=(0.0, 2.0)),
    "everything": lambda: NetworkFaults(delay=(0.001, 0.2), drop=0.03, duplicate=0.2, reorder=0.3),
}
SHAPES = [(1, 4), (3, 2), (6, 1)]  # hosts, gpus: directly to each rank, along a tree, along a deeper one
COUNT = 24
every_network = pytest.mark.parametrize("network", NETWORKS)
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")


def histories(sim: Cluster, mesh: Any) -> list[list[Any]]:
    return list(sim.result(mesh.history.call(), 900).values())


def send_mixed(mesh: Any, count: int, dice: random.Random) -> dict[int, list[int]]:
    """Sends in all ways, to all, to slices and to single ranks; returns what each rank should get."""
    hosts, gpus = mesh.sizes["hosts"], mesh.sizes["gpus"]
    expected: dict[int, list[int]] = {rank: [] for rank in range(hosts * gpus)}
    for number in range(count):
        host, gpu = dice.randrange(hosts), dice.randrange(gpus)
        match dice.choice(["all", "call", "host", "column", "one", "flat"]):
            case "all":
                mesh.do.broadcast(number)
                ranks = list(expected)
            case "call":
                mesh.do.call(number)
                ranks = list(expected)
            case "host":
                mesh.slice(hosts=host).do.broadcast(number)
                ranks = [host * gpus + column for column in range(gpus)]
            case "column":
                mesh.slice(gpus=gpu).do.call(number)
                ranks = [row * gpus + gpu for row in range(hosts)]
            case "one":
                mesh.slice(hosts=host, gpus=gpu).do.call_one(number)
                ranks = [host * gpus + gpu]
            case "flat":
                mesh.flatten("all").slice(all=slice(0, None, 2)).do.broadcast(number)
                ranks = list(expected)[::2]
        for rank in ranks:
            expected[rank].append(number)
    return expected


@every_shape
@every_network
def test_whatever_is_mixed_each_rank_gets_its_messages_in_order(network: str, shape: tuple[int, int]) -> None:
    hosts, gpus = shape
    with cluster(hosts=hosts, seed=hosts, faults=NETWORKS[network]()) as sim:
        _, mesh = workers(sim, gpus)
        expected = send_mixed(mesh, COUNT, random.Random(f"{network}{shape}"))
        assert histories(sim, mesh) == list(expected.values())


@pytest.mark.parametrize("cls", [Worker, AsyncWorker])
@every_network
def test_each_of_several_senders_has_an_order_of_its_own(network: str, cls: Any) -> None:
    with cluster(hosts=3, seed=5, faults=NETWORKS[network]()) as sim:
        _, receivers = workers(sim, 1, cls, "receivers")
        _, senders = workers(sim, 2, Worker, "senders")
        calls = [
            senders.slice(hosts=host, gpus=gpu).tell.call_one(receivers, [(host, gpu, n) for n in range(8)])
            for host, gpu in itertools.product(range(3), range(2))
        ]
        for future in calls:
            sim.result(future, 900)
        sim.advance(60)
        for history in histories(sim, receivers):
            assert len(history) == 48
            for sender in itertools.product(range(3), range(2)):
                assert [n for *origin, n in history if tuple(origin) == sender] == list(range(8))


@every_network
def test_a_cut_and_mended_link_changes_no_order(network: str) -> None:
    with cluster(hosts=2, seed=9, faults=NETWORKS[network]()) as sim:
        _, mesh = workers(sim, 2)
        sim.result(mesh.do.call(-1), 900)
        for number in range(COUNT):
            if number % 8 == 3:
                sim.partition(1)
            if number % 8 == 6:
                sim.mend()
            mesh.slice(gpus=number % 2).do.broadcast(number) if number % 3 else mesh.do.broadcast(number)
        sim.mend()
        sim.advance(5)
        for rank, history in enumerate(histories(sim, mesh)):
            assert history == [-1, *(n for n in range(COUNT) if n % 3 == 0 or n % 2 == rank % 2)]


@every_network
def test_values_of_a_port_come_in_the_order_of_each_sender(network: str) -> None:
    with cluster(hosts=3, seed=3, faults=NETWORKS[network]()) as sim:
        _, mesh = workers(sim, 1)
        port, receiver = Channel[Any].open()
        calls = [mesh.slice(hosts=host).fill.call_one(port, [(host, n) for n in range(10)]) for host in range(3)]
        for future in calls:
            sim.result(future, 900)
        sim.advance(30)
        values = [receiver.recv().get(1) for _ in range(30)]
        for host in range(3):
            assert [n for origin, n in values if origin == host] == list(range(10))


@pytest.mark.parametrize("depth", range(1, 4))
@pytest.mark.parametrize("network", ["calm", "reordering", "uneven"])
def test_broadcasts_sent_before_an_indirect_call_arrive_before_its_answer(network: str, depth: int) -> None:
    """Causality along a chain: each tells the last, then asks the next."""
    with cluster(hosts=4, seed=depth, faults=NETWORKS[network]()) as sim:
        _, mesh = workers(sim, 1)
        last = mesh.slice(hosts=3)
        for number in range(3):
            last.do.broadcast(("root", number))
            chain = [mesh.slice(hosts=host) for host in range(depth)]
            if depth == 1:
                answer = chain[0].ask.call_one(last, number)
            elif depth == 2:
                answer = chain[0].ask_through.call_one(chain[1], last, number)
            else:
                answer = chain[2].ask_through.call_one(chain[0], last, number)
            sim.result(answer, 900)
        [history] = histories(sim, last)
        assert [item for item in history if isinstance(item, tuple)] == [("root", n) for n in range(3)]
        assert [item for item in history if isinstance(item, int)] == [0, 1, 2]
