"""heal_mesh with real processes: set-up, environment, stuck ranks; the rest is in memory_network."""

import os
import signal
import time
from typing import Any

import pytest

from monarch_nb.actor import Actor, ProcMesh, SupervisionError, endpoint, heal_mesh, this_host
from tests.cluster.actor_tools import SECONDS, Faults

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("faults")]


class Counter(Actor):
    def __init__(self) -> None:
        self.count = 0

    @endpoint
    def add(self) -> int:
        self.count += 1
        return self.count

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    @endpoint
    def env(self, name: str) -> str | None:
        return os.environ.get(name)


class SelfHealer(Actor):
    """Owns a mesh and heals it itself."""

    def __init__(self) -> None:
        procs = this_host().spawn_procs(per_host={"gpus": 2}, name="inner")
        self.mesh: Any = procs.spawn("inner", Counter)

    @endpoint
    def work(self) -> list[int]:
        self.mesh.add.call().get(20)
        with pytest.raises(SupervisionError):
            self.mesh.slice(gpus=0).die.call_one().get(20)
        heal_mesh(self.mesh)
        values: list[int] = self.mesh.add.call().get(20).values()
        return values

    def __supervise__(self, failure: Any) -> bool:
        return True


def kill(mesh: Any, rank: int, faults: Faults) -> None:
    with pytest.raises(SupervisionError):
        mesh.slice(gpus=rank).die.call_one().get(20)
    faults.next()


def test_an_actor_heals_what_it_owns(quad: ProcMesh) -> None:
    healer: Any = quad.slice(gpus=1).spawn("healer", SelfHealer)
    assert healer.work.call_one().get(30) == [1, 2]
    assert healer.work.call_one().get(30) == [1, 4]
    healer.stop().get(30)


def test_set_up_and_bootstrap_run_again(faults: Faults) -> None:
    def bootstrap() -> None:
        os.environ["MADE_BY_BOOTSTRAP"] = str(os.getpid())

    procs = this_host().spawn_procs(
        per_host={"gpus": 2}, name="prepared", bootstrap=bootstrap, setup="import os; os.environ['SET_UP'] = str(rank)"
    )
    counters: Any = procs.spawn("counters", Counter)
    assert counters.env.call("SET_UP").get(30).values() == ["0", "1"]
    kill(counters, 1, faults)
    heal_mesh(counters)
    assert counters.env.call("SET_UP").get(20).values() == ["0", "1"]
    pids = counters.pid.call().get(20).values()
    assert counters.env.call("MADE_BY_BOOTSTRAP").get(20).values() == [str(pid) for pid in pids]
    procs.stop().get(20)


class Stuck(Actor):
    def __init__(self, value: int) -> None:
        self.value = value

    @endpoint
    def hold(self) -> None:
        """Reacts to no interrupt: a C call that does not return."""
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(3600)  # another thread may stop first, and this one run for a moment

    @endpoint
    def identity(self) -> tuple[int, int]:
        return self.value, os.getpid()


def test_ranks_that_react_to_nothing_are_killed_and_brought_back(own_procs: ProcMesh, faults: Faults) -> None:
    mesh: Any = own_procs.spawn("stuck", Stuck, 7)
    first, second = mesh.identity.call().get(SECONDS).values()
    future = mesh.slice(gpus=1).hold.call_one()
    assert heal_mesh(mesh.slice(gpus=1), timeout=SECONDS, kill=True) is not mesh
    with pytest.raises(SupervisionError, match=r"Killed\(sig=9\)"):
        future.get(SECONDS)
    after = mesh.identity.call().get(SECONDS).values()
    assert after[0] == first
    assert after[1][0] == 7
    assert after[1][1] != second[1]
    assert faults.left() == []  # the killer gets no failure


def test_a_holder_of_a_reference_can_have_ranks_killed_and_healed(own_procs: ProcMesh, faults: Faults) -> None:
    class Other(Actor):
        @endpoint
        def renew(self, mesh: Any) -> None:
            heal_mesh(mesh, kill=True, timeout=SECONDS)

    mesh: Any = own_procs.slice(gpus=1).spawn("stuck", Stuck, 8)
    holder: Any = own_procs.slice(gpus=0).spawn("other", Other)
    before = mesh.identity.call_one().get(SECONDS)
    holder.renew.call_one(mesh).get(SECONDS)
    after = mesh.identity.call_one().get(SECONDS)
    assert (after[0], after[1] != before[1]) == (8, True)
    assert faults.left() == []


def test_a_rank_killed_a_moment_ago_is_healed(own_procs: ProcMesh, faults: Faults) -> None:
    counters: Any = own_procs.spawn("counters", Counter)
    for _ in range(2):
        pids = counters.pid.call().get(20).values()
        os.kill(pids[1], signal.SIGKILL)
        heal_mesh(counters)
        faults.next()
        assert [now == before for now, before in zip(counters.pid.call().get(20).values(), pids, strict=True)] == [
            True, False, *[True] * (len(pids) - 2)
        ]  # fmt: skip
