"""Errors after which a process cannot use its GPU: the driver of pretence in real processes."""

from collections.abc import Iterator
from typing import Any

import pytest

import monarch_nb
from monarch_nb.actor import Actor, ActorError, ProcMesh, SupervisionError, endpoint, this_host
from tests.cluster.actor_tools import Faults, faults

__all__ = ["faults"]
pytestmark = pytest.mark.timeout(120)
SECONDS = 30.0


class Trainer(Actor):
    @endpoint
    def step(self) -> int:
        return 1

    @endpoint
    def fail(self, *, stays: bool) -> None:
        from monarch_nb.gpu import driver

        if stays:
            driver().break_down()  # type: ignore[union-attr]
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.fixture
def procs() -> Iterator[ProcMesh]:
    mesh = this_host().spawn_procs(per_host={"ranks": 2}, env={"MONARCH_NB_GPU": "pretence"}, name="gpus")
    yield mesh
    mesh.stop().get(SECONDS)


def test_an_error_that_stays_ends_the_process_and_heal_replaces_it(procs: ProcMesh, faults: Faults) -> None:
    trainers: Any = procs.spawn("trainers", Trainer)
    with pytest.raises(ActorError, match="illegal memory access") as raised:
        trainers.slice(ranks=0).fail.call_one(stays=True).get(SECONDS)
    assert "cannot use its GPU any more, and ends: heal_mesh" in str(raised.value)
    assert trainers.slice(ranks=1).step.call_one().get(SECONDS) == 1
    assert faults.next().crashed_ranks == [0]
    with pytest.raises(SupervisionError, match="it cannot use its GPU any more: pretence: CUDA_ERROR_ILLEGAL_ADDRESS"):
        trainers.slice(ranks=0).step.call_one().get(SECONDS)
    assert faults.left() == []
    monarch_nb.heal_mesh(procs)
    assert list(trainers.step.call().get(SECONDS).values()) == [1, 1]


def test_an_error_that_passes_is_an_error_of_its_call_alone(procs: ProcMesh) -> None:
    trainers: Any = procs.spawn("trainers", Trainer)
    with pytest.raises(ActorError, match="illegal memory access"):
        trainers.fail.call(stays=False).get(SECONDS)
    assert list(trainers.step.call().get(SECONDS).values()) == [1, 1]
