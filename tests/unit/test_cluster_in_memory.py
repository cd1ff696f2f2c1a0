"""A cluster of several hosts inside the test: real actors, supervision and meshes; simulated network and time."""

import random
import time
from collections.abc import Iterator
from typing import Any

import pytest

from monarch_nb.actor import Actor, ActorError, Channel, DeadlockError, SupervisionError, endpoint, heal_mesh
from monarch_nb.testing import Cluster, cluster

pytestmark = pytest.mark.timeout(60)
SOON = 10.0  # real seconds


class Counter(Actor):
    def __init__(self) -> None:
        self.count = 0

    @endpoint
    def add(self, number: int) -> int:
        self.count += number
        return self.count

    @endpoint
    def wait(self) -> Any:
        return Channel.open()[1].recv().get()

    @endpoint
    def ask(self, peers: Any) -> list[int]:
        return list(peers.add.call(1).get().values())

    @endpoint
    def ask_back(self, peer: Any, caller: Any) -> Any:
        return peer.ask.call_one(caller).get()

    @endpoint
    def work(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            pass


@pytest.fixture
def two() -> Iterator[Cluster]:
    with cluster(hosts=2) as simulation:
        yield simulation


def counters(of: Cluster, gpus: int = 2) -> tuple[Any, Any]:
    procs = of.hosts().spawn_procs(per_host={"gpus": gpus}, name="procs")
    return procs, procs.spawn("counters", Counter)


def test_a_call_is_late_only_once_so_much_time_has_passed(two: Cluster) -> None:
    _, actors = counters(two)
    call = actors.wait.options(timeout=30).call()
    two.advance(29)
    assert not call.done()
    two.advance(2)
    with pytest.raises(TimeoutError, match="30 s"):
        call.get(SOON)


def test_time_advances_to_what_is_due_while_test_and_actors_wait(two: Cluster) -> None:
    _, actors = counters(two)
    with pytest.raises(TimeoutError, match="3600 s"):
        actors.wait.options(timeout=3600).call().get()
    assert 3600 <= two.now < 3700


def test_time_does_not_run_ahead_of_a_wait_with_a_limit(two: Cluster) -> None:
    _, actors = counters(two)
    call = actors.wait.options(timeout=30).call()
    with pytest.raises(TimeoutError, match=r"0\.05 s"):
        call.get(0.05)
    assert two.now < 29
    assert not call.done()


def test_time_passes_as_real_time_does_while_an_actor_works(two: Cluster) -> None:
    _, actors = counters(two)
    actors.add.call(1).get(SOON)
    two.settle()
    call = actors.slice(hosts=1).wait.options(timeout=30).call()
    before = two.now
    actors.slice(hosts=0, gpus=0).work.call_one(0.2).get(SOON)
    assert 0.1 < two.now - before < 29
    assert not call.done()


def test_actors_that_wait_for_each_other_are_told(two: Cluster) -> None:
    _, actors = counters(two, gpus=1)
    first, second = actors.slice(hosts=0), actors.slice(hosts=1)
    circle = first.ask_back.call_one(second, first)
    two.advance(5)
    with pytest.raises(ActorError) as caught:
        circle.get(SOON)
    assert DeadlockError.__name__ in str(caught.value)


@pytest.mark.parametrize("seed", range(4))
def test_whatever_dies_everything_that_was_healed_answers(seed: int) -> None:
    dice = random.Random(seed)
    with cluster(hosts=3, seed=seed) as random_cluster:
        procs, actors = counters(random_cluster)
        for _ in range(8):
            match dice.choice(["call", "kill", "cut", "wait"]):
                case "call":
                    call = actors.add.call(1)
                    try:
                        random_cluster.result(call, within=200)
                    except SupervisionError:
                        continue
                case "kill":
                    random_cluster.kill(procs.slice(hosts=dice.randrange(3), gpus=dice.randrange(2)))
                case "cut":
                    random_cluster.partition(dice.choice([1, 2]))
                    random_cluster.advance(dice.choice([1, 70]))
                    random_cluster.mend()
                case "wait":
                    random_cluster.advance(dice.random())
        random_cluster.advance(120)
        heal_mesh(actors, timeout=SOON)
        assert len(random_cluster.result(actors.add.call(0)).values()) == 6


def test_a_process_has_one_cluster_at_a_time(two: Cluster) -> None:
    with pytest.raises(RuntimeError, match="shutdown_context"):
        cluster()
    with pytest.raises(ValueError, match="there is no host 2"):
        two.kill_host(2)
