"""Actors can be tested with no process started."""

import os
import subprocess
import sys
import threading
import time

import psutil
import pytest

import monarch_nb.actor
from monarch_nb.actor import Actor, ActorError, SupervisionError, current_rank, endpoint, heal_mesh, shutdown_context
from monarch_nb.testing import in_process_host, kill

pytestmark = pytest.mark.timeout(30)


class Counter(Actor):
    def __init__(self, start=0):
        self.n = start

    @endpoint
    def add(self, k):
        self.n += k
        return self.n

    @endpoint
    def where(self):
        return current_rank().rank, os.getpid(), threading.current_thread().name

    @endpoint
    def boom(self):
        raise ValueError("no")


class Asker(Actor):
    @endpoint
    async def ask(self, counters):
        return (await counters.add.call(1)).values()


@pytest.fixture(autouse=True)
def faults(monkeypatch):
    failures = []
    monkeypatch.setattr(monarch_nb.actor, "unhandled_fault_hook", failures.append)
    yield failures
    shutdown_context()


@pytest.fixture
def procs():
    return in_process_host().spawn_procs(per_host={"gpus": 3}, name="pretend")


def test_no_process_is_started(procs):
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    values = procs.spawn("counters", Counter).where.call().get(10).values()
    assert [rank for rank, _, _ in values] == [0, 1, 2]
    assert {pid for _, pid, _ in values} == {os.getpid()}
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


def test_state_slices_errors_and_references_work_as_ever(procs):
    counters = procs.spawn("counters", Counter, 10)
    assert counters.slice(gpus=1).add.call_one(5).get(10) == 15
    assert counters.add.call(1).get(10).values() == [11, 16, 11]
    with pytest.raises(ActorError, match="no"):
        counters.boom.call().get(10)
    asker = procs.slice(gpus=0).spawn("asker", Asker)
    assert asker.ask.call_one(counters).get(10) == [12, 17, 12]


def test_a_killed_rank_fails_only_slices_that_hold_it_and_heals(procs, faults):
    counters = procs.spawn("counters", Counter)
    counters.add.call(1).get(10)
    kill(procs.slice(gpus=2))
    with pytest.raises(SupervisionError, match=r"counters, gpus=2"):
        counters.add.call(1).get(10)
    assert counters.slice(gpus=slice(0, 2)).add.call(1).get(10).values() == [2, 2]
    assert heal_mesh(counters) is counters
    assert counters.add.call(1).get(10).values() == [3, 3, 1]
    deadline = time.monotonic() + 20
    while not faults and time.monotonic() < deadline:  # the hook is called on a thread of its own
        time.sleep(0.005)
    assert len(faults) == 1


def test_real_processes_are_not_killed_this_way(procs):
    with pytest.raises(ValueError, match="real processes"):
        kill(monarch_nb.actor.this_proc())


def test_a_program_needs_no_other_import_for_it() -> None:
    program = "from monarch_nb.testing import in_process_host; print(len(in_process_host().spawn_procs({'x': 2})))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr
