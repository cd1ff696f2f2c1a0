"""A failed call runs again here, with state of another process: tensors, locks, and an environment."""

import importlib.util
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch_nb import debug
from monarch_nb.actor import Actor, ActorError, ProcMesh, current_rank, endpoint
from monarch_nb.config import configured
from monarch_nb.debug import DebugError
from tests.cluster.actor_tools import SECONDS, spawned

pytestmark = pytest.mark.timeout(120)
needs_torch = pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="torch is not installed")


class Flaky(Actor):
    """Fails only in a process of a mesh."""

    def __init__(self, pid: int) -> None:
        self.controller = pid
        self.log = Path(os.devnull).open("w")  # noqa: SIM115
        self.lock = threading.Lock()

    @endpoint
    def check(self, x: int) -> int:
        with self.lock:
            if os.getpid() != self.controller:
                raise OSError("not here")
        return x

    @endpoint
    def write(self) -> None:
        self.log.write("x")
        raise ValueError("after the line was written")

    @endpoint
    def hold(self, size: int) -> None:
        self.held = bytearray(size)
        raise ValueError("held")

    @endpoint
    def wait(self, path: str) -> None:
        while not Path(path).exists():
            time.sleep(0.01)


class Learner(Actor):
    def __init__(self) -> None:
        import torch

        self.model = torch.nn.Linear(2, 1)
        self.parameters = [*self.model.parameters()]

    @endpoint
    def step(self, batch: Any) -> None:
        batch += 1  # in place: the argument stays as the call left it
        self.parameters[0].data.fill_(2.0)
        raise ValueError(self.model.weight.sum().item(), batch.sum().item(), current_rank().rank)


@pytest.fixture(scope="module")
def procs() -> Iterator[ProcMesh]:
    yield from spawned(2, "failing")


@pytest.fixture
def flaky(procs: ProcMesh) -> Iterator[Any]:
    mesh = procs.spawn("flaky", Flaky, os.getpid())
    yield mesh
    mesh.stop().get(SECONDS)


def error_of(call: Any) -> ActorError:
    with pytest.raises(ActorError) as caught:
        call.get(SECONDS)
    return caught.value


def test_failure_of_the_rank_alone_names_what_differs(flaky: Any) -> None:
    error = error_of(flaky.check.call(7))
    with pytest.warns(UserWarning, match="did not fail again here") as records:
        assert error.reproduce() == 7
    text = str(records[0].message)
    assert "environment variables " in text
    assert "RANK" in text
    assert "not brought here: self.log, an _io.TextIOWrapper (" in text
    assert "locks are new ones, and free: self.lock" in text
    assert records[0].filename == __file__


def test_open_file_raises_where_it_is_used(flaky: Any) -> None:
    with pytest.raises(DebugError, match=r"this is not here: self\.log, an _io.TextIOWrapper"):
        error_of(flaky.write.call()).reproduce()


@needs_torch
def test_tensors_keep_what_they_share(procs: ProcMesh) -> None:
    import torch

    learners = procs.spawn("learners", Learner)
    error = error_of(learners.step.call(torch.zeros(2)))
    with pytest.raises(ValueError) as caught:
        error.reproduce(rank=1)
    assert caught.value.args == (4.0, 4.0, 1)
    assert caught.value.__cause__ is error
    learners.stop().get(SECONDS)


def test_large_state_comes_if_the_limit_allows_it(flaky: Any) -> None:
    error = error_of(flaky.slice(gpus=0).hold.call_one(30 << 20))
    with pytest.raises(DebugError, match=r"more than 20,000,000 bytes: reproduce\(limit=...\) takes larger ones"):
        error.reproduce(limit=20_000_000)
    with pytest.raises(ValueError, match="held"):
        error.reproduce()


def test_rank_that_is_busy_is_waited_for_and_named(flaky: Any, tmp_path: Path) -> None:
    error = error_of(flaky.slice(gpus=0).check.call_one(1))
    future = flaky.wait.call(str(tmp_path / "go"))
    with pytest.raises(TimeoutError, match="gpus=0 of flaky has not sent its actor within 0"):
        error.reproduce(timeout=0.2)
    (tmp_path / "go").touch()
    future.get(SECONDS)
    with pytest.warns(UserWarning, match="did not fail again here"):
        error.reproduce()


def test_successful_calls_keep_nothing(flaky: Any) -> None:
    with configured(debug_keep_failures=3):
        error = error_of(flaky.slice(gpus=0).check.call_one(1))
    debug.release(flaky)
    with pytest.raises(DebugError, match="has nothing of it any more"):
        error.reproduce()
