"""Meshes grow onto more hosts and let hosts go, while they are in use."""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from random import Random
from typing import Any

import pytest

from monarch_nb.actor import (
    Actor,
    HostMesh,
    ProcMesh,
    SupervisionError,
    context,
    current_rank,
    current_size,
    endpoint,
    heal_mesh,
)
from monarch_nb.lifecycle.watching import HostNotices
from monarch_nb.mesh.handle import state_of
from monarch_nb.mesh.host import host_labels
from monarch_nb.mesh.host_record import Fate, NoMoreHostsError
from monarch_nb.runtime import current_runtime
from monarch_nb.supervision import HealError
from monarch_nb.testing import Cluster
from tests.polling import until

pytestmark = [pytest.mark.timeout(60)]

HOSTS = 16


class Worker(Actor):
    def __init__(self, name: str) -> None:
        self.name = name
        self.new: list[list[int]] = []
        self.calls = 0

    @endpoint
    def where(self) -> tuple[int, int, str]:
        self.calls += 1
        return current_rank().rank, current_size().get("hosts", 1), context().actor_instance.proc_id.partition("/")[0]

    @endpoint
    def called(self) -> int:
        return self.calls

    @endpoint
    def heard(self) -> list[list[int]]:
        return self.new

    def __healed__(self, points: Any) -> None:
        self.new.append([point.rank for point in points])


class Picky(Actor):
    def __init__(self, refused: str) -> None:
        host = context().actor_instance.proc_id.partition("/")[0]
        if host == refused:
            raise ValueError(f"not on {host}")


class Holder(Actor):
    def __init__(self, mesh: Any) -> None:
        self.mesh = mesh

    @endpoint
    def hosts(self) -> list[str]:
        return [host for _, _, host in self.mesh.where.call().get(20).values()]


@pytest.fixture
def hosts(simulated: Cluster) -> HostMesh:
    return simulated.hosts()


@pytest.fixture
def procs(hosts: HostMesh) -> Iterator[ProcMesh]:
    """Processes on the first two hosts."""
    mesh = hosts.slice(hosts=slice(0, 2)).spawn_procs({"gpus": 1}, name="trainers")
    yield mesh
    mesh.stop().get(20)


@pytest.fixture
def workers(procs: ProcMesh) -> Any:
    return procs.spawn("workers", Worker, "w")


def hosts_of(workers: Any) -> list[str]:
    return [host for _, _, host in workers.where.call().get(20).values()]


def test_calls_reach_the_actors_on_all_ranks_of_a_grown_mesh(procs: ProcMesh, workers: Any) -> None:
    before = workers.where.call()
    change = procs.grow(hosts=2)
    assert repr(change) == "<'trainers' {hosts=4, gpus=1}: 2 hosts more (m2, m3), with workers created there>"
    assert len(before.get(20).values()) == 2
    assert [*workers.where.call().get(20).values()] == [(rank, 4, f"m{rank}") for rank in range(4)]
    assert (len(procs), len(workers)) == (4, 4)
    assert workers.called.call().get(20).values() == [2, 2, 1, 1]
    assert workers.heard.call().get(20).values() == [[[2, 3]], [[2, 3]], [], []]


def test_slices_mean_the_ranks_they_meant_before(procs: ProcMesh, workers: Any) -> None:
    single, both = workers.slice(hosts=1), workers.slice(hosts=slice(0, 2))
    procs.grow(hosts=1)
    assert single.where.call_one().get(20)[2] == "m1"
    assert hosts_of(both) == ["m0", "m1"]
    procs.shrink(hosts=[1])
    assert hosts_of(workers) == ["m0", "m2"]
    with pytest.raises(SupervisionError, match=r"trainers has shrunk, and hosts=1 was removed[\s\S]*take a slice"):
        both.where.call().get(20)
    assert hosts_of(both.slice(hosts=0)) == ["m0"]


def test_references_elsewhere_follow_a_resize(simulated: Cluster, procs: ProcMesh, workers: Any) -> None:
    beside = simulated.this_host().spawn_procs({"one": 1}, name="beside")
    holder = beside.spawn("holder", Holder, workers).slice(one=0)
    assert holder.hosts.call_one().get(20) == ["m0", "m1"]
    procs.grow(hosts=2)
    assert holder.hosts.call_one().get(20) == ["m0", "m1", "m2", "m3"]
    procs.shrink(hosts=[0, 2])
    assert holder.hosts.call_one().get(20) == ["m1", "m3"]
    beside.stop().get(20)


def test_ranks_are_renumbered_after_a_middle_host_leaves_and_is_replaced(procs: ProcMesh, workers: Any) -> None:
    procs.grow(hosts=1)
    change = procs.shrink(hosts=["m1"])
    assert (change.removed, change.hosts, change.actors, change.freed) == ("hosts=1", ("m1",), ("workers",), ())
    assert [rank for rank, _, _ in workers.where.call().get(20).values()] == [0, 1]
    extra = procs.spawn("late", Worker, "late")
    assert hosts_of(extra) == ["m0", "m2"]
    procs.grow(hosts=2)
    assert hosts_of(workers) == ["m0", "m2", "m1", "m3"]
    assert hosts_of(extra) == ["m0", "m2", "m1", "m3"]
    procs.shrink(hosts=-3)
    assert hosts_of(workers) == ["m0"]


def test_actors_on_a_part_of_a_mesh_stay_where_they_are(procs: ProcMesh) -> None:
    part = procs.slice(hosts=slice(1, 2)).spawn("part", Worker, "p")
    assert procs.grow(hosts=1).actors == ()
    assert hosts_of(part) == ["m1"]
    assert procs.shrink(hosts=[1]).actors == ("part",)
    with pytest.raises(SupervisionError, match="part"):
        part.where.call().get(20)


def test_where_an_actor_does_not_start_nothing_has_changed(procs: ProcMesh, workers: Any) -> None:
    procs.spawn("picky", Picky, "m3").initialized.get(20)
    with pytest.raises(HealError, match=r"trainers has not grown, and is as it was before[\s\S]*not on m3"):
        procs.grow(hosts=2)
    assert (len(procs), len(workers)) == (2, 2)
    assert hosts_of(workers) == ["m0", "m1"]


def test_a_host_dying_during_a_growth_ends_it_and_harms_nothing(
    simulated: Cluster, procs: ProcMesh, workers: Any
) -> None:
    simulated.kill_host(5)
    five = HostMesh("five", ["m5"], simulated.hosts().slice(hosts=slice(0, 1)).region)
    with pytest.raises(HealError, match="trainers has not grown"):
        procs.grow(hosts=five)
    assert hosts_of(workers) == ["m0", "m1"]
    assert procs.grow(hosts=1).hosts == ("m2",)
    assert hosts_of(workers) == ["m0", "m1", "m2"]


def test_a_failed_rank_is_healed_while_the_mesh_grows(
    simulated: Cluster, procs: ProcMesh, workers: Any, kill: Callable[[ProcMesh], None]
) -> None:
    hosts_of(workers)
    kill(procs.slice(hosts=1))
    simulated.failures.clear()
    procs.grow(hosts=1)
    with pytest.raises(SupervisionError, match="hosts=1"):
        workers.where.call().get(20)
    heal_mesh(procs)
    assert hosts_of(workers) == ["m0", "m1", "m2"]
    procs.shrink(hosts=[1])
    assert hosts_of(workers) == ["m0", "m2"]


@pytest.mark.parametrize(
    ("ask", "reason"),
    [
        (lambda mesh: mesh.grow(gpus=1), "trainers grows and shrinks along 'hosts' alone, got gpus"),
        (lambda mesh: mesh.grow(hosts=0), "say how many more, at least 1"),
        (lambda mesh: mesh.shrink(hosts=1), "say hosts=-1 for the last one, hosts=\\[1\\] for that one"),
        (lambda mesh: mesh.shrink(hosts=["m7"]), "has no host 'm7': it has 2, m0, m1"),
        (lambda mesh: mesh.shrink(hosts=-2), "at least one must stay; stop\\(\\) ends them all"),
        (lambda mesh: mesh.slice(hosts=0).grow(hosts=1), "only a whole mesh can grow, not a slice of trainers"),
    ],
)
def test_impossible_sizes_are_refused_with_the_reason(
    procs: ProcMesh, ask: Callable[[ProcMesh], object], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        ask(procs)


class Source:
    """Gives the other hosts of the cluster, and takes them back."""

    def __init__(self, *hosts: str) -> None:
        self.hosts, self.back = list(hosts), list[str]()
        self.spare: list[str] = []
        self.refilled = 0
        self.fates: dict[str, Fate] = {}
        self.queue = threading.Event()  # it answers once this is set
        self.queue.set()

    @property
    def waiting(self) -> tuple[str, ...]:
        return tuple(self.spare)

    def take_spares(self, dead: Sequence[str]) -> dict[str, str]:
        spares = dict(zip(dead, self.spare, strict=False))
        self.spare = self.spare[len(spares) :]
        return spares

    def fate(self, hosts: Sequence[str]) -> dict[str, Fate]:
        if not self.queue.is_set():
            raise NoMoreHostsError("the engine of job 7 has not answered")
        return {host: self.fates[host] for host in hosts}

    def written(self) -> str:
        return ""

    def refill(self) -> None:
        self.refilled += 1

    def more(self, count: int, timeout: float, *, instead: Sequence[str] = ()) -> tuple[str, ...]:
        assert self.queue.wait(20)
        if count > len(self.hosts):
            raise NoMoreHostsError(f"job 7 has given {len(self.hosts)} of {count} hosts within {timeout:g} s")
        hosts, self.hosts = self.hosts[:count], self.hosts[count:]
        return tuple(hosts)

    def give_back(self, hosts: Sequence[str]) -> None:
        self.back += hosts

    def __str__(self) -> str:
        return "job 7"


@pytest.fixture
def source() -> Source:
    return Source("m2", "m3")


@pytest.fixture
def fleet(source: Source) -> HostMesh:
    return HostMesh("fleet", ["m0", "m1"], host_labels(["m0", "m1"]), owned=True, source=source)


@pytest.fixture
def trainers(fleet: HostMesh) -> Iterator[Any]:
    procs = fleet.spawn_procs({"gpus": 1}, name="trainers")
    yield procs.spawn("workers", Worker, "w")
    procs.stop().get(20)


def procs_of(workers: Any) -> ProcMesh:
    state = state_of(workers).procs
    return ProcMesh(state, state.region)


def test_hosts_come_from_the_job_and_go_back_to_it(fleet: HostMesh, source: Source, trainers: Any) -> None:
    procs = procs_of(trainers)
    procs.grow(hosts=1)
    assert (len(fleet), hosts_of(trainers)) == (3, ["m0", "m1", "m2"])
    second = fleet.spawn_procs({"gpus": 1}, name="others")
    assert procs.shrink(hosts=[1]).freed == ()  # another mesh is on it
    second.stop().get(20)
    assert procs.shrink(hosts=[1]).freed == ("m2",)
    assert (source.back, fleet.sizes) == (["m2"], {"hosts": 2})
    change = procs.grow(hosts=2)  # the free host first
    assert change.hosts == ("m1", "m3")
    assert hosts_of(trainers) == ["m0", "m1", "m3"]
    change = fleet.shrink(hosts=["m1"])
    assert (change.actors, source.back) == (("workers",), ["m2", "m1"])
    assert hosts_of(trainers) == ["m0", "m3"]


def test_hosts_that_do_not_come_change_nothing_and_extras_go_back(
    fleet: HostMesh, source: Source, trainers: Any
) -> None:
    procs = procs_of(trainers)
    with pytest.raises(NoMoreHostsError, match="job 7 has given 2 of 3 hosts within 5 s"):
        procs.grow(hosts=3, timeout=5)
    assert (hosts_of(trainers), len(fleet)) == (["m0", "m1"], 2)
    procs.spawn("picky", Picky, "m2").initialized.get(20)
    with pytest.raises(HealError, match="not on m2"):
        procs.grow(hosts=1)
    assert hosts_of(trainers) == ["m0", "m1"]
    until(lambda: source.back == ["m2"])


def test_another_host_comes_in_the_place_of_one_that_is_lost(
    simulated: Cluster, fleet: HostMesh, source: Source, trainers: Any
) -> None:
    procs = procs_of(trainers)
    procs.grow(hosts=1)
    slice_of_last = trainers.slice(hosts=2)
    second = fleet.spawn_procs({"gpus": 1}, name="other").spawn("other", Worker, "o")
    hosts_of(second)
    simulated.kill_host(2)
    simulated.failures.clear()
    assert heal_mesh(trainers, replace=True) is trainers
    assert (hosts_of(trainers), slice_of_last.where.call_one().get(20)[2]) == (["m0", "m1", "m3"], "m3")
    heal_mesh(second, replace=True)  # no other host is requested
    assert hosts_of(second) == ["m0", "m1", "m3"]
    procs_of(second).stop().get(20)
    simulated.kill_host(3)
    simulated.failures.clear()
    with pytest.raises(NoMoreHostsError, match="job 7 has given 0 of 1"):
        heal_mesh(trainers, replace=True)
    procs.shrink(hosts=-1)
    assert hosts_of(trainers) == ["m0", "m1"]


def test_a_heal_replaces_only_hosts_that_ended_by_their_engine(
    simulated: Cluster, fleet: HostMesh, source: Source, trainers: Any
) -> None:
    notices: list[str] = []
    current_runtime().part(HostNotices).present(lambda event: notices.append(event.text))
    procs = procs_of(trainers)
    source.hosts = ["m6", "m7"]
    procs.grow(hosts=1)
    simulated.kill_host(6)
    [failure] = {failure.cause.giver: failure for failure in simulated.failures}.values()
    assert failure.next_step.startswith("heal_mesh(")
    assert "brings it back; if host m6 does not come back, job 7 is asked for another" in failure.next_step
    simulated.failures.clear()
    source.queue.clear()
    with pytest.raises(NoMoreHostsError, match="the engine of job 7 has not answered"):
        heal_mesh(trainers)
    source.queue.set()
    source.fates["m6"] = Fate(False, "trainers_2 on node7")
    with pytest.raises(HealError, match=r"(?s)host m6 is lost, and may come back, as job 7 says: trainers_2 on node7"
                                        r".*heal_mesh\(trainers, replace=True\).*host m6 was lost"):  # fmt: skip
        heal_mesh(trainers)
    source.fates["m6"] = Fate(True, "trainers_2 was preempted")
    with pytest.raises(HealError, match="if host m6 does not come back, job 7 is asked"):
        heal_mesh(trainers, replace=False)
    assert (notices, source.hosts) == ([], ["m7"])
    assert heal_mesh(trainers) is trainers
    assert (hosts_of(trainers), notices) == (["m0", "m1", "m7"], [
        "trainers has lost m6 (trainers_2 was preempted): job 7 is asked for another host"
    ])  # fmt: skip
    current_runtime().part(HostNotices).present(None)
    procs.shrink(hosts=-1)


def test_spares_replace_lost_hosts_at_once_and_another_is_requested(
    simulated: Cluster, fleet: HostMesh, source: Source, trainers: Any
) -> None:
    procs = procs_of(trainers)
    source.hosts = ["m12"]
    procs.grow(hosts=1)
    source.spare = ["m13"]
    assert repr(fleet) == "<HostMesh 'fleet' {hosts=3} and 1 spare>"
    simulated.kill_host(12)
    simulated.failures.clear()
    assert heal_mesh(trainers) is trainers  # no host is requested
    assert hosts_of(trainers) == ["m0", "m1", "m13"]
    until(lambda: source.back == ["m12"] and source.refilled == 1)
    assert repr(fleet) == "<HostMesh 'fleet' {hosts=3}>"
    simulated.kill_host(13)
    simulated.failures.clear()
    with pytest.raises(NoMoreHostsError, match="job 7 has given 0 of 1"):
        heal_mesh(trainers, replace=True)
    procs.shrink(hosts=-1)


def test_a_spare_arrives_at_once_while_somebody_awaits_other_hosts(
    simulated: Cluster, fleet: HostMesh, source: Source, trainers: Any
) -> None:
    source.hosts = ["m10"]
    procs_of(trainers).grow(hosts=1)
    source.spare = ["m11"]
    source.queue.clear()
    errors: list[BaseException] = []

    def grow() -> None:
        try:
            fleet.grow(hosts=1)
        except NoMoreHostsError as error:
            errors.append(error)

    thread = threading.Thread(target=grow)
    thread.start()
    simulated.kill_host(10)
    simulated.failures.clear()
    heal_mesh(trainers)
    assert (hosts_of(trainers), thread.is_alive()) == (["m0", "m1", "m11"], True)
    source.queue.set()
    thread.join(20)
    assert len(errors) == 1
    until(lambda: source.back == ["m10"])


def test_hosts_that_no_job_gives_do_not_become_more(procs: ProcMesh, hosts: HostMesh) -> None:
    with pytest.raises(NoMoreHostsError, match="hosts cannot grow: its hosts were attached one by one"):
        procs.grow(hosts=99)
    assert len(procs) == 2


class Slow(Actor):
    """Waits on one host, in its constructor or clean-up, for the test to go on."""

    reached, go_on = threading.Event(), threading.Event()

    def __init__(self, begins: str, ends: str) -> None:
        self.ends = ends
        self._wait(begins)

    def _wait(self, host: str) -> None:
        if context().actor_instance.proc_id.partition("/")[0] == host:
            self.reached.set()
            self.go_on.wait(30)

    @endpoint
    def host(self) -> str:
        return context().actor_instance.proc_id.partition("/")[0]

    def __cleanup__(self, error: Exception | None) -> None:
        self._wait(self.ends)


@pytest.fixture
def slow() -> Iterator[type[Slow]]:
    Slow.reached.clear()
    Slow.go_on.clear()
    yield Slow
    Slow.go_on.set()


def start(work: Callable[[], object]) -> "Future[object]":
    """Runs it on another thread, until `Slow` waits."""
    pool = ThreadPoolExecutor(1, "pytest_timeout resize")
    done = pool.submit(work)
    pool.shutdown(wait=False)
    until(lambda: Slow.reached.is_set() or done.done(), "it is under way")
    return done


def test_a_host_dying_in_mid_growth_ends_only_that_growth(
    simulated: Cluster, fleet: HostMesh, source: Source, trainers: Any, slow: type[Slow]
) -> None:
    source.hosts[:] = ["m8", "m9"]
    procs = procs_of(trainers)
    procs.spawn("slow", slow, "m8", "").initialized.get(20)
    growth = start(lambda: procs.grow(hosts=1))
    simulated.kill_host(8)
    with pytest.raises(HealError, match=r"trainers has not grown, and is as it was before"):
        growth.result(20)
    assert hosts_of(trainers) == ["m0", "m1"]
    until(lambda: source.back == ["m8"], "it is given back, dead as it is")
    assert procs.grow(hosts=1).hosts == ("m9",)
    assert hosts_of(trainers) == ["m0", "m1", "m9"]
    assert simulated.failures == []


def test_a_host_dying_in_mid_shrink_leaves_the_others_running(
    simulated: Cluster, fleet: HostMesh, source: Source, trainers: Any, slow: type[Slow]
) -> None:
    source.hosts[:] = ["m4", "m9"]
    procs = procs_of(trainers)
    procs.grow(hosts=1)
    slow_ones: Any = procs.spawn("slow", slow, "", "m4")
    slow_ones.initialized.get(20)
    shrink = start(lambda: procs.shrink(hosts=[2]))
    assert slow_ones.host.call().get(20).values() == ["m0", "m1"]
    simulated.kill_host(4)
    assert repr(shrink.result(20)).startswith("<'trainers' {hosts=2, gpus=1}: hosts=2 removed (m4)")
    assert (hosts_of(trainers), source.back) == (["m0", "m1"], ["m4"])
    assert procs.grow(hosts=1).hosts == ("m9",)
    assert hosts_of(trainers) == ["m0", "m1", "m9"]
    assert simulated.failures == []


class Notified(Slow):
    """Waits in `__healed__`."""

    def __init__(self) -> None:
        self.ends = ""

    def __healed__(self, points: Any) -> None:
        self._wait("m0")


def test_an_interrupt_while_survivors_are_renumbered_leaves_the_mesh_unchanged(
    simulated: Cluster, fleet: HostMesh, source: Source, trainers: Any, slow: type[Slow]
) -> None:
    source.hosts[:] = ["m14", "m15"]
    procs = procs_of(trainers)
    procs.spawn("notified", Notified).initialized.get(20)
    main = threading.main_thread().ident

    def press_stop() -> None:
        until(slow.reached.is_set)
        assert main is not None
        signal.pthread_kill(main, signal.SIGINT)

    threading.Thread(target=press_stop, name="pytest_timeout stop", daemon=True).start()
    with pytest.raises(KeyboardInterrupt, match="trainers has not grown, and is as it was before"):
        procs.grow(hosts=1)
    assert len(procs) == len(trainers) == 2
    assert hosts_of(trainers) == ["m0", "m1"]
    slow.go_on.set()
    until(lambda: len(source.back) == 1)
    assert procs.grow(hosts=1).hosts == ("m15",)
    assert len(hosts_of(trainers)) == 3


@pytest.mark.slow
def test_random_interrupts_leave_a_mesh_grown_or_not_without_lost_hosts(
    simulated: Cluster, fleet: HostMesh, source: Source, trainers: Any
) -> None:
    procs, main, random = procs_of(trainers), threading.main_thread().ident, Random(5)
    assert main is not None
    for _ in range(150):
        source.hosts[:], source.back[:] = ["m14", "m15"], []
        timer = threading.Timer(random.random() * 0.03, signal.pthread_kill, (main, signal.SIGINT))
        try:
            timer.start()
            procs.grow(hosts=1)
            timer.join()
            time.sleep(5)  # the interrupt comes within that time
        except KeyboardInterrupt:
            pass
        timer.join()
        assert len(hosts_of(trainers)) == len(procs)
        if len(procs) == 3:
            new = hosts_of(trainers)[2]
            timer = threading.Timer(random.random() * 0.01, signal.pthread_kill, (main, signal.SIGINT))
            try:
                timer.start()
                procs.shrink(hosts=-1)
                timer.join()
                time.sleep(5)
            except KeyboardInterrupt:
                pass
            timer.join()
            with contextlib.suppress(ValueError):  # the host has left already
                procs.shrink(hosts=[new])
            until(lambda: len(procs) == 2)
        until(lambda: len(source.hosts) + len(source.back) == 2 and len(fleet) == 2, "hosts are given back")
        assert hosts_of(trainers) == ["m0", "m1"]
    assert simulated.failures == []
