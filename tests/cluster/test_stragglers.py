"""Slow ranks found among real ones in training."""

import gc
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset

from monarch_nb.actor import Actor, current_rank, endpoint
from monarch_nb.diagnosis import Diagnosis, Finding, StragglerWatch, stragglers
from monarch_nb.distributed import Mesh
from tests.cluster.actor_tools import SECONDS, joined, line_of, spawned

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(
        tuple(map(int, torch.__version__.split(".")[:2])) < (2, 10),
        reason="this PyTorch records no collectives of gloo",
    ),
]
LATE_S = 0.03
STEPS = 40


class Numbers(Dataset[torch.Tensor]):
    def __init__(self, slow: bool) -> None:
        self.slow = slow

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.slow:
            time.sleep(LATE_S)  # reading
        return torch.ones(8)

    def __len__(self) -> int:
        return 1 << 20


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        self.slow = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.slow:
            time.sleep(LATE_S)  # thinking
        return torch.as_tensor(self.layers(x))


class Trainer(Actor):
    """Trains for some steps; rank 1 is slow in one thing."""

    @endpoint
    def join(self) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        self.net = Net()
        self.model = DistributedDataParallel(self.net)
        self.optimizer = torch.optim.SGD(self.model.parameters())

    @endpoint
    def hold(self, count: int) -> None:
        """Creates objects for the garbage collector."""
        self.objects = [{1: [number]} for number in range(count)]

    @endpoint
    def train(self, cause: str) -> None:
        slow = cause if dist.get_rank() == 1 else ""
        self.net.slow = slow == "forward" or cause == "all alike"
        hooks = []
        if slow == "backward":
            hooks.append(self.net.layers[0].weight.register_hook(lambda _: time.sleep(LATE_S)))  # grieving
        if slow == "optimizer":
            hooks.append(self.optimizer.register_step_pre_hook(lambda *_: time.sleep(LATE_S)))  # tidying
        for batch in islice(DataLoader(Numbers(slow == "data")), STEPS):
            self.model(batch).sum().backward()
            self.optimizer.step()
            if slow == "collection":
                gc.collect()  # sweeping
        for hook in hooks:
            hook.remove()

    @endpoint
    def work(self, index: int) -> None:
        time.sleep(LATE_S if index == 1 else LATE_S / 5)

    @endpoint
    def together(self) -> None:
        time.sleep(LATE_S if current_rank().rank == 1 else LATE_S / 5)  # together


@pytest.fixture(scope="module")
def trainers() -> Iterator[Any]:
    yield from joined(Trainer)


def compare(trainers: Any, cause: str) -> Diagnosis:
    """The diagnosis of a training."""
    trainers.slice(gpus=1).hold.call_one(200_000 if cause == "collection" else 0).get(SECONDS)
    with StragglerWatch(trainers) as watch:
        trainers.train.call(cause).get(SECONDS)
    return watch.diagnosis


@pytest.mark.parametrize(
    ("cause", "phase", "comment"),
    [
        ("data", "in the data iterator, at test_stragglers.py", "reading"),
        ("forward", "in the forward pass, at test_stragglers.py", "thinking"),
        ("backward", "in the backward pass, at test_stragglers.py", "grieving"),
        ("optimizer", "in the optimizer, at test_stragglers.py", "tidying"),
        ("collection", "garbage collection", "sweeping"),
    ],
)
def test_the_slow_rank_is_named_with_its_phase_and_line(trainers: Any, cause: str, phase: str, comment: str) -> None:
    diagnosis = compare(trainers, cause)
    (finding,) = diagnosis.findings
    assert (finding.kind, finding.ranks, finding.source, finding.sure) == (
        "slow",
        (1,),
        line_of(__file__, f"# {comment}"),
        True,
    ), finding.text
    assert f"most of the difference is {phase}" in finding.text


def test_equal_ranks_have_no_sure_finding(trainers: Any) -> None:
    diagnosis = compare(trainers, "all alike")
    assert not any(finding.sure for finding in diagnosis.findings), diagnosis
    assert "3 processes of" in diagnosis.inspected


def test_ranks_without_collectives_are_compared_by_calls(trainers: Any) -> None:
    with StragglerWatch(trainers) as watch:
        for _ in range(25):
            calls = [trainers.slice(gpus=index).work.call_one(index) for index in range(3)]
            for call in calls:
                call.get(SECONDS)
    assert watch.diagnosis.findings == ()  # separate calls: no rank waits for another
    with StragglerWatch(trainers) as watch:
        for _ in range(STEPS):
            trainers.together.call().get(SECONDS)
    expected = ("slow", (1,), line_of(__file__, "# together"), True)
    finding = next(iter(watch.diagnosis.findings), Finding("dead", "", (), ""))
    assert (finding.kind, finding.ranks, finding.source, finding.sure) == expected, watch


class SlowProducts(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            time.sleep(LATE_S)
        return func(*args, **(kwargs or {}))


def slow_down_rank_1() -> None:
    torch.set_num_threads(1)
    if dist.get_rank() == 1:
        SlowProducts().__enter__()  # type: ignore[no-untyped-call]


def test_the_slow_operation_of_sharded_tensors_is_named() -> None:
    for procs in spawned(2, "sharded"):
        mesh = Mesh.of(procs, ("data",))
        mesh.execute(slow_down_rank_1)
        x = mesh.distribute(torch.randn(8, 8), ("data", None))
        w = mesh.distribute(torch.randn(8, 8))
        (x @ w).sum().item()
        with StragglerWatch(mesh) as watch:
            for _ in range(STEPS):
                (x @ w).sum().item()
        finding = watch.diagnosis.findings[0]
        assert (finding.kind, finding.ranks, finding.sure) == ("slow", (1,), True)
        assert finding.source == "aten.mm.default"
        assert "most of the difference is in aten.mm.default" in finding.text


@pytest.mark.parametrize("seconds", [0, -1, 1e9])
def test_a_time_out_of_range_is_refused(trainers: Any, seconds: float) -> None:
    with pytest.raises(ValueError, match="is not between 0 and 600"):
        stragglers(trainers, seconds)
