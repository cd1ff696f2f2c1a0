"""Actors of other processes that stop in the debugger: what goes on meanwhile, and commands to all of them."""

from collections.abc import Iterator
from typing import Any

import pytest

from monarch_nb import debug
from monarch_nb.actor import ProcMesh
from monarch_nb.store import describe
from tests.cluster.actor_tools import spawned
from tests.cluster.debug_tools import SECONDS, Trainer, line, resume_all, stopped

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def procs() -> Iterator[ProcMesh]:
    yield from spawned(3, "debugged")


@pytest.fixture(scope="module")
def trainers(procs: ProcMesh) -> Any:
    return procs.spawn("trainers", Trainer)


@pytest.fixture(autouse=True)
def nothing_stays_stopped(trainers: Any) -> Iterator[None]:
    yield
    resume_all()


def test_a_breakpoint_pauses_one_actor_and_not_its_process(procs: ProcMesh, trainers: Any) -> None:
    other = procs.spawn("others", Trainer)
    future = trainers.step.call(1)
    stopped(3)
    assert list(other.steps_done.call().get(SECONDS).values()) == [0, 0, 0]
    assert describe(trainers).counts == {"paused": 3}
    assert describe(other).counts == {"idle": 3}
    debug.resume()
    future.get(SECONDS)
    assert describe(trainers).counts == {"idle": 3}
    other.stop().get(SECONDS)


def test_expressions_statements_and_steps_go_to_all_and_change_locals(trainers: Any) -> None:
    future = trainers.step.call(1)
    stopped(3)
    group = debug.group(trainers)
    assert group.eval("loss").values == {0: 1, 1: 2, 2: 3}
    assert group.run("[loss * n for n in range(2)]").text.splitlines()[0].startswith("[0, ")
    assert (
        group.next(timeout=SECONDS).text
        == f"gpus=0-2  debug_tools.py:{line('doubled = loss * 2')} in Trainer.step  → doubled = loss * 2"
    )
    group.run("!loss = 100")
    group.next(timeout=SECONDS)
    assert group.eval("doubled").values == {0: 200, 1: 200, 2: 200}
    assert group.run("for n in range(2):\n    print(n)\n").text == "0\n1"
    assert "doubled" in group.locals()[0]
    group.resume()
    assert list(future.get(SECONDS).values()) == [200, 200, 200]


def test_a_users_own_thread_is_a_session_of_its_own(trainers: Any) -> None:
    future = trainers.slice(gpus=0).in_thread.call_one()
    (one,) = stopped(1)
    assert one.thread == "loader"
    assert debug.eval("inside").values == {0: "'thread'"}
    debug.resume()
    assert future.get(SECONDS) == "thread"
