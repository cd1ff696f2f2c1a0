"""Replicas of real ranks that have drifted apart."""

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from monarch_nb.actor import Actor, endpoint
from monarch_nb.diagnosis import ReplicaWatch, compare_replicas, watch
from monarch_nb.mesh import run_on
from tests.cluster.actor_tools import SECONDS, joined, spawned

pytestmark = pytest.mark.timeout(120)


class Trainer(Actor):
    @endpoint
    def join(self) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")

    @endpoint
    def build(self, kind: str) -> None:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        if kind == "ddp":
            model = DistributedDataParallel(model)
        if kind == "fsdp":
            fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        self.model, self.optimizer = model, torch.optim.AdamW(model.parameters())
        model(torch.ones(2, 4) * dist.get_rank()).sum().backward()
        if kind == "by hand":
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        self.optimizer.step()

    @endpoint
    def steps(self, number: int, drift_at: int, rank: int) -> None:
        for step in range(1, number + 1):
            self.optimizer.zero_grad()
            self.model(torch.ones(2, 4) * dist.get_rank()).sum().backward()
            self.optimizer.step()
            if step == drift_at and dist.get_rank() == rank:
                self.drift()

    @endpoint
    def hide_torch(self) -> None:
        class Finder:
            def find_spec(self, name: str, path: object = None, target: object = None) -> None:
                if name.partition(".")[0] == "torch":
                    raise ModuleNotFoundError("No module named 'torch'", name="torch")

        for name in [*sys.modules]:
            if name.partition(".")[0] == "torch":
                del sys.modules[name]
        sys.meta_path.insert(0, Finder())

    @endpoint
    def draw(self) -> None:
        torch.rand(1)

    @endpoint
    def normalize(self) -> None:
        """Adds a layer whose buffers differ by rank."""
        self.norm = torch.nn.BatchNorm1d(4, affine=False)
        self.norm(torch.arange(8.0).view(2, 4) + dist.get_rank())

    @endpoint
    def drift(self) -> None:
        with torch.no_grad():
            list(self.model.parameters())[1].add_(1e-6)


@pytest.fixture(scope="module")
def trainers() -> Iterator[Any]:
    yield from joined(Trainer)


@pytest.mark.parametrize(("kind", "sure"), [("ddp", True), ("by hand", False)])
def test_the_rank_that_has_drifted_is_named(trainers: Any, kind: str, sure: bool) -> None:
    trainers.build.call(kind).get(SECONDS)
    equal = compare_replicas(trainers)
    assert equal.findings == ()
    assert equal.inspected == "17 tensors on 3 ranks of trainers"
    trainers.slice(gpus=1).drift.call_one().get(SECONDS)
    (finding,) = compare_replicas(trainers).findings
    assert (finding.kind, finding.mesh, finding.ranks, finding.sure) == ("diverged", "workers", (1,), sure)
    assert finding.text.startswith("gpus=1 has other values than the rest in 1 of 17 tensors, first in model.0.bias (")
    assert compare_replicas(trainers.slice(gpus=slice(0, 3, 2))).findings == ()


def test_the_step_since_which_a_rank_differs_is_named(trainers: Any) -> None:
    trainers.build.call("ddp").get(SECONDS)
    with ReplicaWatch(trainers) as drifting:
        trainers.steps.call(300, 201, 2).get(SECONDS)
    (finding,) = drifting.diagnosis.findings
    assert (finding.kind, finding.ranks, finding.sure) == ("diverged", (2,), True)
    # After 300 steps, every fourth step is compared.
    assert finding.text.startswith("after step 204, gpus=2 has other values than the rest in 1 of 17 tensors, first in")
    assert finding.text.endswith("; after step 200 they were equal")
    trainers.build.call("ddp").get(SECONDS)
    with ReplicaWatch(trainers, every=2) as equal:
        trainers.steps.call(5, 0, 0).get(SECONDS)
    assert (equal.diagnosis.findings, equal.diagnosis.inspected) == ((), "3 ranks of trainers in 5 steps")
    trainers.slice(gpus=0).drift.call_one().get(SECONDS)
    late = ReplicaWatch(trainers)
    with pytest.raises(TypeError, match="too many positional arguments") as raised, late:
        trainers.build.call("unknown", 1).get(SECONDS)
    assert "Before that, before the first step, gpus=0 has other values" in raised.value.__notes__[-1]
    assert late.diagnosis.findings[0].text.startswith("before the first step, gpus=0 has other values than the rest")
    with pytest.raises(ValueError, match="every=0 is not a positive number"):
        ReplicaWatch(trainers, 0)
    with pytest.raises(TypeError, match="a mesh of actors or of processes, not a str"):
        ReplicaWatch("trainers")  # type: ignore[arg-type]


def test_buffers_and_random_numbers_that_differ_are_suspicions(trainers: Any) -> None:
    trainers.build.call("ddp").get(SECONDS)
    trainers.slice(gpus=1).draw.call_one().get(SECONDS)
    (finding,) = compare_replicas(trainers).findings
    assert (finding.ranks, finding.sure) == ((1,), False)
    assert "in 1 of 17 tensors, first in PyTorch's random numbers" in finding.text
    trainers.normalize.call().get(SECONDS)
    assert compare_replicas(trainers).inspected == "20 tensors on 3 ranks of trainers"
    assert {finding.ranks for finding in compare_replicas(trainers).findings} == {(1,)}


def test_shards_are_compared_with_the_same_shard_of_other_ranks_alone(trainers: Any) -> None:
    trainers.build.call("fsdp").get(SECONDS)
    trainers.slice(gpus=1).drift.call_one().get(SECONDS)
    assert compare_replicas(trainers).findings == ()


@pytest.mark.slow
def test_models_of_cells_are_compared_and_silent_ranks_named(trainers: Any) -> None:
    spawning = spawned(2, "cells")
    procs = next(spawning)
    cell = "import torch\nnet = torch.nn.Linear(2, 2)\nfor each in net.parameters(): each.data.fill_(rank)"
    run_on(procs, cell).get(SECONDS)
    diagnosis = compare_replicas(procs)
    assert (diagnosis.findings, diagnosis.inspected) == ((), "3 tensors on 2 ranks of cells")
    busy = run_on(procs.slice(gpus=1), "import time; time.sleep(3)")
    assert "gpus=1 did not answer: no result within" in compare_replicas(procs, 0.5).inspected
    busy.get(SECONDS)
    with pytest.raises(ValueError, match="not a positive number"):
        compare_replicas(procs, 0)
    with pytest.raises(TypeError, match="a mesh of actors or of processes, not an int"):
        compare_replicas(3)  # type: ignore[arg-type]
    next(spawning, None)


def test_ranks_without_pytorch_are_named(capfd: pytest.CaptureFixture[str]) -> None:
    for procs in spawned(2, "bare"):
        actors = procs.spawn("actors", Trainer)
        actors.hide_torch.call().get(SECONDS)
        text = "PyTorch is not installed there: pip install torch"
        for watching in (watch(actors), ReplicaWatch(actors)):
            with pytest.raises(RuntimeError, match=text), watching:
                pass
        assert str(compare_replicas(actors)).endswith(f"gpus=0-1 did not answer: {text}")
    assert "Nobody waited" not in capfd.readouterr().err
