"""Actors of other processes that stop in the debugger: what keeps running, and commands to all of them."""

from collections.abc import Iterator
from typing import Any

import pytest

from monarch_nb import debug
from monarch_nb.actor import ActorError, ProcMesh
from monarch_nb.store import describe
from tests.cluster.actor_tools import spawned
from tests.cluster.debug_tools import SECONDS, Trainer, resume_all, stopped

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
    bystanders = procs.spawn("others", Trainer)
    future = trainers.step.call(1)
    stopped(3)
    assert list(bystanders.steps_done.call().get(SECONDS).values()) == [0, 0, 0]
    assert describe(trainers).counts == {"paused": 3}
    assert describe(bystanders).counts == {"idle": 3}
    debug.resume()
    future.get(SECONDS)
    assert describe(trainers).counts == {"idle": 3}
    bystanders.stop().get(SECONDS)


def test_a_users_own_thread_is_a_session_of_its_own(trainers: Any) -> None:
    future = trainers.slice(gpus=0).in_thread.call_one()
    (session,) = stopped(1)
    assert session.thread == "loader"
    assert debug.eval("inside").values == {0: "'thread'"}
    debug.resume()
    assert future.get(SECONDS) == "thread"


def test_quitting_a_users_own_thread_leaves_its_endpoint_running(trainers: Any) -> None:
    future = trainers.slice(gpus=0).in_thread.call_one()
    stopped(1)
    debug.group().quit()
    with pytest.raises(ActorError, match="list index out of range"):  # its thread has ended without a result
        future.get(SECONDS)
