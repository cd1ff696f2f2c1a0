"""One rank raises while the others wait in a collective: they are freed, and the same call succeeds in the same
processes."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.fsdp import fully_shard

from monarch_nb.actor import Actor, ActorError, Channel, ProcMesh, SupervisionError, endpoint, heal_mesh
from monarch_nb.collectives.connections import CAN_CUT
from monarch_nb.config import configured
from tests.cluster.fault_tools import SOON, spawned
from tests.effort import daily

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(180),
    pytest.mark.usefixtures("host"),
    pytest.mark.skipif(not CAN_CUT, reason="gloo's connections can be told apart on Linux alone"),
]
KINDS = ("all_reduce", "ddp", "fsdp2")
TIMES = pytest.mark.parametrize("times", [4, pytest.param(20, marks=pytest.mark.slow)])


@pytest.fixture(scope="module", autouse=True)
def short_window() -> Iterator[None]:
    """Procs start with torch, like those of users."""
    with pytest.MonkeyPatch.context() as patch, configured(call_error_window="300ms"):
        patch.delenv("MONARCH_NB_PRELOAD", raising=False)
        yield


class Trainer(Actor):
    """Trains a few steps, in one of three ways; one rank may raise in one of them."""

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def train(self, kind: str, fail_at: int = -1, rank: int = 1) -> float:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        own_rank = dist.get_rank()
        torch.manual_seed(0)
        model: Any = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
        if kind == "ddp":
            model = torch.nn.parallel.DistributedDataParallel(model)
        elif kind == "fsdp2":
            fully_shard(model[0])
            fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            loss = model(torch.ones(4, 8)).pow(2).mean()
            if (step, own_rank) == (fail_at, rank):
                raise ValueError(f"nan in batch {step}")
            loss.backward()
            if kind == "all_reduce":
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()
        return float(loss.item())


@pytest.fixture(scope="module")
def procs(host: Any, short_window: None) -> Iterator[ProcMesh]:
    with spawned(host, 3) as procs:
        yield procs


@pytest.fixture(scope="module")
def trainers(procs: ProcMesh) -> Any:
    return procs.spawn("trainers", Trainer)


def fail_and_retry(trainers: Any, kind: str, fail_at: int = 2) -> None:
    with pytest.raises(ActorError, match="nan in batch") as caught:
        trainers.train.call(kind, fail_at).get(SOON)
    assert isinstance(caught.value.exception, ValueError)
    assert sorted(caught.value.failures) == [0, 1, 2]
    assert "in consequence the collectives of gpus=0,2 broke off" in caught.value.summary
    losses = trainers.train.call(kind).get(SOON).values()
    assert all(loss == loss for loss in losses)


@TIMES
@pytest.mark.parametrize("kind", daily(KINDS, 1))
def test_ranks_waiting_for_one_that_raised_are_freed_and_may_retry(trainers: Any, kind: str, times: int) -> None:
    before = trainers.pid.call().get(SOON).values()
    for number in range(times):
        fail_and_retry(trainers, kind, (number + 2) % 4)
    assert trainers.pid.call().get(SOON).values() == before


class Joiner(Actor):
    """Makes groups, some of them of a few ranks."""

    @endpoint
    def begin(self, leaves: int) -> int:
        if dist.is_initialized():
            dist.destroy_process_group()
        if int(os.environ["RANK"]) == leaves:
            raise ValueError("no such folder")
        dist.init_process_group("gloo")
        return dist.get_world_size()

    @endpoint
    def make_two(self, leaves: int) -> list[int]:
        """Ranks 0 and 1 have a group, and 1 and 2."""
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        first, second = dist.new_group([0, 1]), dist.new_group([1, 2])
        rank = dist.get_rank()
        if rank == leaves:
            raise ValueError("nan")
        total = torch.ones(1)
        if rank > 0:
            dist.all_reduce(total, group=second)
        if rank < 2:
            dist.all_reduce(total, group=first)
        return total.int().tolist()

    @endpoint
    def own_group(self, name: str) -> None:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        self.group = dist.new_group()

    @endpoint
    def steps(self, begun: Any, go: str) -> int:
        """All-reduces in its own group, until the file exists."""
        total, steps = torch.zeros(1), 0
        while not total.item():
            total = torch.tensor([float(os.path.exists(go))])
            dist.all_reduce(total, group=self.group)
            if steps == 0:
                begun.send(1)
            steps += 1
        return steps


@pytest.mark.parametrize("leaves", [0, 2])  # rank 0 has the store, which is missing then
def test_ranks_waiting_for_a_rank_to_join_are_freed(procs: ProcMesh, leaves: int) -> None:
    joiners: Any = procs.spawn(f"joiners_{leaves}", Joiner)
    with pytest.raises(ActorError) as caught:
        joiners.begin.call(leaves).get(SOON)
    assert isinstance(caught.value.exception, ValueError)
    assert sorted(caught.value.failures) == [0, 1, 2]
    assert joiners.begin.call(-1).get(SOON).values() == [3] * 3


def test_ranks_waiting_indirectly_for_a_rank_that_raised_are_freed(procs: ProcMesh) -> None:
    joiners: Any = procs.spawn("chained", Joiner)
    with pytest.raises(ActorError, match="nan") as caught:
        joiners.make_two.call(2).get(SOON)
    assert sorted(caught.value.failures) == [0, 1, 2]
    assert joiners.make_two.call(-1).get(SOON).values() == [[3], [3], [2]]


def test_collectives_of_another_call_in_the_same_processes_go_on(
    procs: ProcMesh, trainers: Any, tmp_path: Path
) -> None:
    healthy: Any = procs.spawn("healthy", Joiner)
    healthy.own_group.call("own").get(SOON)
    port, receiver = Channel[int].open()
    call = healthy.steps.call(port, str(tmp_path / "go"))
    for _ in range(3):
        receiver.recv().get(SOON)
    fail_and_retry(trainers, "ddp")
    fail_and_retry(trainers, "all_reduce")
    (tmp_path / "go").touch()
    steps = call.get(SOON).values()
    assert steps[0] == steps[1] == steps[2] > 0


class Keeper(Actor):
    """Keeps its module, and its group, from call to call."""

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def build(self, kind: str) -> None:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        self.kind, self.group = kind, dist.new_group()
        torch.manual_seed(0)
        layers = [torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)]
        self.model: Any = torch.nn.Sequential(*layers)
        if kind == "ddp":  # several buckets
            self.model = torch.nn.parallel.DistributedDataParallel(
                self.model, process_group=self.group, bucket_cap_mb=1e-4
            )
        elif kind == "fsdp2":
            for layer in (layers[0], layers[2], self.model):
                fully_shard(layer)

    @endpoint
    def gradients(self, fail_at: int = -1, stage: str = "forward") -> list[float]:
        """Gradients of three steps without an optimizer, which are the same in every call without an error."""
        rank = dist.get_rank()
        self.model.zero_grad()
        for step in range(3):
            loss = self.model(torch.ones(4, 8) * (rank + 1)).pow(2).mean()
            if (step, rank) == (fail_at, 1):
                if stage == "backward":
                    loss.register_hook(_fail)
                else:
                    _fail()
            loss.backward()
            if self.kind == "all_reduce":
                for parameter in self.model.parameters():
                    dist.all_reduce(parameter.grad, group=self.group)
        gradients = [parameter.grad for parameter in self.model.parameters()]
        gradients = [gradient.full_tensor() if self.kind == "fsdp2" else gradient for gradient in gradients]
        return [round(float(gradient.double().sum()), 4) for gradient in gradients]

    @endpoint
    def compress(self, builtin: bool) -> None:
        """Gradients travel as float16."""
        if builtin:
            self.model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
        else:
            self.model.register_comm_hook(self.group, fp16_compress_hook)

    @endpoint
    def all_are_float16(self) -> bool:
        """Whether the gradients of a step have no more digits than float16 has."""
        self.gradients()
        return all(bool((weight.grad == weight.grad.half().float()).all()) for weight in self.model.parameters())

    @endpoint
    def forward(self) -> None:
        self.model(torch.ones(4, 8))


def _fail(*_: Any) -> None:
    raise ValueError("nan in batch")


def fail_and_reuse_module(procs: ProcMesh, kind: str, times: int) -> None:
    keepers: Any = procs.spawn(f"keepers_{kind}", Keeper)
    keepers.build.call(kind).get(SOON)
    before, pids = keepers.gradients.call().get(SOON).values(), keepers.pid.call().get(SOON).values()
    assert before[0] == before[1] == before[2]
    for number in range(times):
        stage = ("forward", "backward")[number // 3 % 2]
        with pytest.raises(ActorError, match="nan in batch") as caught:
            keepers.gradients.call(number % 3, stage).get(SOON)
        assert sorted(caught.value.failures) == [0, 1, 2]
        assert keepers.gradients.call().get(SOON).values() == before
    assert keepers.pid.call().get(SOON).values() == pids
    keepers.stop().get(SOON)


@TIMES
@pytest.mark.parametrize("kind", daily(KINDS, 1))
def test_a_module_that_was_made_before_the_error_goes_on(host: Any, kind: str, times: int) -> None:
    with spawned(host, 3) as procs:  # a group is reconnected 64 times at most, in all tests of a process together
        fail_and_reuse_module(procs, kind, times)


@pytest.mark.parametrize("builtin", daily([False, True], 1))
def test_a_communication_hook_of_ddp_lives_on_after_an_error(procs: ProcMesh, builtin: bool) -> None:
    keepers: Any = procs.spawn(f"compressed_{builtin}", Keeper)
    keepers.build.call("ddp").get(SOON)
    assert keepers.all_are_float16.call().get(SOON).values() == [False] * 3
    keepers.build.call("ddp").get(SOON)
    keepers.compress.call(builtin).get(SOON)
    for _ in range(2):
        assert keepers.all_are_float16.call().get(SOON).values() == [True] * 3
        with pytest.raises(ActorError, match="nan in batch"):
            keepers.gradients.call(1, "backward").get(SOON)
    assert keepers.all_are_float16.call().get(SOON).values() == [True] * 3
    keepers.stop().get(SOON)


class Joins(Actor):
    """Joins a process group in its `__init__`."""

    def __init__(self, value: int) -> None:
        dist.init_process_group("gloo")
        self.value = value + dist.get_rank()

    @endpoint
    def total(self) -> float:
        tensor = torch.tensor([float(self.value)])
        torch.distributed.all_reduce(tensor)
        return tensor.item()

    @endpoint
    def environment(self) -> list[str]:
        return [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")]

    @endpoint
    def pid(self) -> int:
        return os.getpid()


def test_healing_actors_that_join_a_group_in_init_reconstructs_all(host: Any, shown: list[Any]) -> None:
    with spawned(host, 3, name="healed") as procs:
        joins: Any = procs.spawn("joins", Joins, 10)
        assert joins.total.call().get(SOON).values() == [33.0] * 3
        pids, before = joins.pid.call().get(SOON).values(), joins.environment.call().get(SOON).values()
        for rank in (2, 0):
            os.kill(joins.pid.call().get(SOON).values()[rank], signal.SIGKILL)
            with pytest.raises(SupervisionError):
                joins.total.call().get(SOON)
            heal_mesh(procs, timeout=SOON)
            assert joins.total.call().get(SOON).values() == [33.0] * 3
        now = joins.environment.call().get(SOON).values()
        assert [values[:3] for values in now] == [values[:3] for values in before]
        assert len({values[3] for values in now}) == 1
        after = joins.pid.call().get(SOON).values()
        assert [old == new for old, new in zip(pids, after, strict=True)] == [False, True, False]


class Rejoins(Actor):
    """Joins a group of all ranks, or one of its own, in each call."""

    @endpoint
    def end(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    @endpoint
    def join(self, alone: bool = False) -> float:
        if dist.is_initialized():
            dist.destroy_process_group()
        if alone:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        else:
            dist.init_process_group("gloo")
        total = torch.ones(1)
        dist.all_reduce(total)
        return total.item()


def test_a_healed_rank_meets_ranks_that_destroyed_their_groups(host: Any, shown: list[Any]) -> None:
    with spawned(host, 2, name="rejoined") as procs:
        rejoins: Any = procs.spawn("rejoins", Rejoins)
        assert rejoins.slice(gpus=0).join.call_one(alone=True).get(SOON) == 1.0
        with pytest.raises(SupervisionError):
            rejoins.slice(gpus=1).end.call_one().get(SOON)
        heal_mesh(procs, timeout=SOON)
        assert rejoins.join.call().get(SOON).values() == [2.0, 2.0]


def test_modules_on_groups_with_a_lost_rank_ask_to_be_rebuilt(host: Any, shown: list[Any]) -> None:
    with spawned(host, 2, name="halved") as procs:
        teams: dict[str, Any] = {kind: procs.spawn(kind, Keeper) for kind in ("ddp", "fsdp2")}
        for kind, team in teams.items():
            team.build.call(kind).get(SOON)
            team.gradients.call().get(SOON)
        os.kill(teams["ddp"].pid.call().get(SOON).values()[1], signal.SIGKILL)
        with pytest.raises(SupervisionError):
            teams["ddp"].gradients.call().get(SOON)
        heal_mesh(procs, timeout=SOON)
        for kind, name in (("ddp", r"DistributedDataParallel\(Sequential\)"), ("fsdp2", "FSDPSequential")):
            with pytest.raises(ActorError, match=f"{name} was made on a process group that was given up"):
                teams[kind].slice(gpus=0).forward.call_one().get(SOON)
            teams[kind].build.call(kind).get(SOON)
            survivor, healed = teams[kind].gradients.call().get(SOON).values()  # full_tensor() of FSDP2's among them
            assert survivor == healed
