"""`watch` finds the first NaN on real processes, and accuses no rank without one."""

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

import monarch_nb
from monarch_nb import module_to_mesh
from monarch_nb.actor import Actor, ActorMesh, current_rank, endpoint
from monarch_nb.distributed import Mesh
from monarch_nb.mesh import run_on
from tests.cluster.actor_tools import joined, spawned

pytestmark = pytest.mark.timeout(120)
RANKS = 3


class Log(nn.Module):
    def __init__(self, bad: bool) -> None:
        super().__init__()
        self.linear, self.bad = nn.Linear(4, 4), bad

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        return torch.log(x - 100) if self.bad else torch.log(x.abs() + 1)


class Root(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sqrt(x)


def _refuse(*args: object) -> None:
    raise ArithmeticError


class Net(nn.Module):
    def __init__(self, bad: bool) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([nn.ReLU(), Log(bad)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def _refused_step() -> Net:
    net = Net(True)
    optimizer = torch.optim.SGD(net.parameters())
    optimizer.register_step_pre_hook(_refuse)
    with contextlib.suppress(ArithmeticError):
        optimizer.step()
    return net


class Trainer(Actor):
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.rank = current_rank().rank

    def _step(self, *, bad: bool) -> None:
        net = Net(bad)
        optimizer = torch.optim.AdamW(net.parameters(), foreach=True)
        net(torch.randn(8, 4)).sum().backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()

    @endpoint
    def healthy(self) -> None:
        """Uses infinities and unwritten memory, with no fault."""
        self._step(bad=False)
        queries = torch.randn(1, 2, 5, 8, requires_grad=True)
        mask = torch.zeros(5, 5).masked_fill(torch.ones(5, 5).triu(1).bool(), float("-inf"))
        functional.scaled_dot_product_attention(queries, queries, queries, attn_mask=mask).sum().backward()
        (queries @ queries.mT + mask).softmax(-1).sum().backward()
        torch.full((3,), float("inf")).min()
        torch.empty(1000)[::2].view(torch.int32)

    @endpoint
    def forward(self) -> None:
        self._step(bad=self.rank == 1)

    @endpoint
    def backward(self) -> None:
        (Root()(nn.Linear(4, 4)(torch.randn(2, 4)).relu() * 0) * 0).sum().backward()

    @endpoint
    def batch(self, values: torch.Tensor) -> None:
        (values * 2).sum()

    @endpoint
    def optimizer(self) -> None:
        """Divides by zero where a gradient is zero, after an aborted step."""
        net = nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(net.parameters(), eps=0.0)
        refusal = optimizer.register_step_pre_hook(_refuse)
        with contextlib.suppress(ArithmeticError):
            optimizer.step()
        refusal.remove()
        (net(torch.randn(2, 4)) * 0).sum().backward()
        optimizer.step()

    @endpoint
    def refused_step(self) -> None:
        _refused_step()

    @endpoint
    def after_a_refused_step(self) -> None:
        _refused_step()(torch.randn(8, 4))

    @endpoint
    def overflow(self) -> None:
        x = torch.full((4,), 80.0)
        y = x.exp() * x.exp()
        _ = y - y

    @endpoint
    def large(self) -> None:
        torch.full((4,), 100.0).exp_()


class Sharded(Actor):
    """Trains with FSDP, whose buffers hold former contents of memory, or sums up the batch of a rank."""

    @endpoint
    def join(self) -> None:
        dist.init_process_group("gloo")

    @endpoint
    def train(self) -> None:
        net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        optimizer = torch.optim.AdamW(net.parameters())
        for _ in range(5):
            net(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    @endpoint
    def share(self) -> None:
        batch = torch.full((4,), float("nan") if dist.get_rank() == 1 else 1.0) * 2
        dist.all_reduce(batch)
        _ = batch * 2


class Concurrent(Actor):
    @endpoint
    async def divide(self) -> None:
        await asyncio.sleep(0)
        torch.zeros(2) / torch.zeros(2)


@pytest.fixture(scope="module")
def trainers() -> Iterator[ActorMesh[Trainer]]:
    for procs in spawned(RANKS, "values"):
        yield procs.spawn("trainers", Trainer)


@pytest.mark.parametrize(
    ("name", "ranks", "text"),
    [
        ("forward", (1,), "aten.log.default gave 32 NaN in float32[8×4] in Net.blocks.1 (test_nonfinite.py:"),
        ("backward", (0, 1, 2), "in the backward of Root (test_nonfinite.py:"),
        ("overflow", (0, 1, 2), "from inputs with infinities, the first from aten.mul.Tensor"),
        ("optimizer", (0, 1, 2), "AdamW.step gave 16 NaN in float32[4×4] in Linear.weight (test_nonfinite.py:"),
        ("after_a_refused_step", (0, 1, 2), "in Net.blocks.1 (test_nonfinite.py:"),
    ],
)
def test_the_rank_operation_module_and_line_are_named(
    trainers: Any, name: str, ranks: tuple[int, ...], text: str
) -> None:
    with monarch_nb.watch(trainers) as watch:
        trainers.healthy.call().get()
        getattr(trainers, name).call().get()
    assert [(finding.kind, finding.ranks, finding.sure) for finding in watch.findings] == [("nonfinite", ranks, True)]
    assert text in str(watch)
    assert f"in call 2 of {name}()" in str(watch)


def test_healthy_steps_are_not_accused(trainers: Any) -> None:
    with monarch_nb.watch(trainers) as watch:
        for _ in range(3):
            trainers.healthy.call().get()
    assert (watch.findings, str(watch)) == ((), "no NaN was found")
    trainers.forward.call().get()
    for last in (trainers.healthy, trainers.refused_step, trainers.healthy):
        with monarch_nb.watch(trainers) as watch:
            last.call().get()
        assert not watch.findings


def test_data_with_nan_differs_from_numbers_that_overflow(trainers: Any) -> None:
    with monarch_nb.watch(trainers) as watch:
        trainers.batch.call(torch.tensor([1.0, float("nan")])).get()
    assert "its inputs had NaN already" in watch.findings[0].text
    with monarch_nb.watch(trainers) as watch:
        trainers.large.call().get()
    assert [finding.sure for finding in watch.findings] == [False]
    assert str(watch).startswith("perhaps: ")


def test_ranks_that_receive_a_nan_and_fsdp_buffers_are_not_named() -> None:
    for sharded in joined(Sharded):
        with monarch_nb.watch(sharded) as watch:
            sharded.train.call().get()
        assert not watch.findings
        with monarch_nb.watch(sharded) as watch:
            sharded.share.call().get()
        assert [finding.ranks for finding in watch.findings] == [(1,)]


def test_slices_are_watched_and_errors_carry_the_finding(trainers: Any) -> None:
    error = KeyError("loss")
    with contextlib.suppress(KeyError), monarch_nb.watch(trainers.slice(gpus=slice(1, 3))):
        trainers.forward.call().get()
        raise error
    assert ["gpus=1: in call 1 of forward() aten.log" in note for note in error.__notes__] == [True]
    with pytest.raises(TypeError, match="not an int"):
        monarch_nb.watch(3)  # type: ignore[arg-type]


def test_async_actors_and_cells_on_processes_are_watched() -> None:
    for procs in spawned(2, "cells"):
        concurrent = procs.spawn("concurrent", Concurrent)
        with monarch_nb.watch(concurrent) as watch:
            concurrent.divide.call().get()
        assert "in call 1 of divide() aten.div.Tensor gave 2 NaN" in str(watch)
        with monarch_nb.watch(procs) as watch:
            run_on(procs, "import torch\nif rank == 1: torch.log(torch.tensor(-1.0))").get()
        assert [finding.ranks for finding in watch.findings] == [(1,)]


def step_of(x: torch.Tensor) -> torch.Tensor:
    return (x * 3 - 100).sqrt()


def test_sharded_tensors_are_watched_and_the_issuing_line_is_named() -> None:
    for procs in spawned(2, "sharded_values"):
        torch.manual_seed(0)
        mesh = Mesh.of(procs, ("data",))
        x = mesh.distribute(torch.randn(8, 4), ("data", None))
        net = module_to_mesh(nn.Sequential(nn.Linear(4, 4), Root()), mesh)
        step = monarch_nb.compile(step_of)
        for _ in range(3):
            step(x)
        with monarch_nb.watch(mesh) as healthy:
            net[0](x).sum().backward()
        with monarch_nb.watch(mesh) as forward:
            net(x - 100)
        with monarch_nb.watch(mesh) as backward:
            net[1](net[0](x) * 0 + 0).sum().backward()
        with monarch_nb.watch(mesh) as compiled:
            step(x)
        with monarch_nb.watch(mesh) as data:
            _ = mesh.distribute(torch.tensor([1.0, float("nan")]), ("data",)) * 2
        assert not healthy.findings
        assert "in Sequential.1 (test_nonfinite.py:" in str(forward)
        assert "in the backward" in str(backward)
        line = step_of.__code__.co_firstlineno + 1
        assert f"aten.sqrt.default gave 16 NaN in float32[4×4] (test_nonfinite.py:{line})" in str(compiled)
        assert [finding.ranks for finding in data.findings] == [(1,)]
        with pytest.raises(ValueError, match="for actors"):
            monarch_nb.watch(mesh, stop=True)


def test_operations_of_all_streams_are_watched() -> None:
    first, second = monarch_nb.Stream("first"), monarch_nb.Stream("second")
    for procs in spawned(2, "streams"):
        with procs.activate() as mesh:
            rank = mesh.rank_tensor("gpus")
            with first.activate():
                x = torch.ones(2)
                monarch_nb.inspect(x)
            with monarch_nb.watch(mesh) as existing, first.activate():
                torch.log(x - 5)
            with monarch_nb.watch(mesh) as fresh, second.activate():  # a stream that begins now
                torch.log(1 - 2 * mesh.rank_tensor("gpus"))
            with monarch_nb.watch(mesh) as lent:
                value = 1.0 - 2 * rank
                borrowed, borrow = second.borrow(value, mutable=True)
                with borrow, second.activate():
                    borrowed.sqrt_()
                value * 2
            with monarch_nb.watch(mesh) as function, first.activate():
                monarch_nb.remote(lambda x: (x - 7).log(), propagate=lambda x: x.clone())(x)
            with monarch_nb.watch(mesh) as healthy, first.activate():
                x + 1
        assert "aten.log.default gave 2 NaN in float32[2] (test_nonfinite.py:" in str(existing)
        assert [finding.ranks for finding in fresh.findings] == [(1,)]
        assert [("sqrt_" in finding.text, finding.ranks) for finding in lent.findings] == [(True, (1,))]
        assert "aten.log.default gave 2 NaN" in str(function)
        assert not healthy.findings


class Descent(Actor):
    """Trains without being watched."""

    @endpoint
    def steps(self, bad: int, scaled: bool = False) -> None:
        torch.set_num_threads(1)
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        optimizer = torch.optim.AdamW(net.parameters(), fused=scaled)
        scaler = torch.amp.GradScaler("cpu", enabled=scaled)
        for step in range(5):
            loss = net(torch.ones(2, 4)).sum() * (float("nan") if step == bad else 1.0)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)  # skips what is not finite
            scaler.update()


def test_gradients_that_are_not_finite_are_said_without_being_asked(capfd: pytest.CaptureFixture[str]) -> None:
    spawning = spawned(2, "workers")
    actors: Any = next(spawning).spawn("descents", Descent)
    actors.steps.call(-1).get(60)
    actors.steps.call(2, scaled=True).get(60)
    actors.slice(gpus=1).steps.call(2).get(60)
    actors.slice(gpus=1).steps.call(1).get(60)
    output = ""
    while "%%watch" not in output:
        output += "".join(capfd.readouterr())
    assert output.count("gradients are not finite") == 1
    assert "before step 3 of AdamW (test_nonfinite.py:" in output
    assert "4 of 4 gradients are not finite, first that of group 0, parameter 0; `loss` is nan. Run the steps" in output
    next(spawning, None)


class Cautious(torch.optim.SGD):
    """Skips steps with gradients that are not finite."""

    def step(self, closure: Any = None) -> Any:
        parameters = [weight for group in self.param_groups for weight in group["params"] if weight.grad is not None]
        return super().step(closure) if all(weight.grad.isfinite().all() for weight in parameters) else None


class Clipped(Actor):
    """Takes the logarithm of data that are sometimes zero, and skips such steps."""

    @endpoint
    def steps(self, zeros: tuple[int, ...], mode: bool = False) -> None:
        torch.set_num_threads(1)
        net = nn.Linear(4, 4)
        optimizer = Cautious(net.parameters(), lr=0.1)
        with FlopCounterMode(display=False) if mode else contextlib.nullcontext():
            for step in range(6):
                data = torch.full((2, 4), 0.0 if step in zeros else 1.0)
                optimizer.zero_grad()
                (net(data).mul(data).abs().log() * 0 + net(data)).sum().backward()
                optimizer.step()


@pytest.mark.parametrize(
    ("zeros", "mode", "expected"),
    [
        ((2, 3), False, "in step 4 of Cautious, aten.mul.Tensor gave 8 NaN"),
        ((2,), False, "in step 4 of Cautious, no operation gave a NaN"),
        ((2, 3), True, "Run the steps before it within"),
    ],
)
def test_the_step_after_one_that_was_left_out_is_watched(
    zeros: tuple[int, ...], mode: bool, expected: str, capfd: pytest.CaptureFixture[str]
) -> None:
    spawning = spawned(1, "workers")
    actors: Any = next(spawning).spawn("clipped", Clipped)
    actors.steps.call(zeros, mode).get(60)
    output = ""
    while expected not in output:
        output += "".join(capfd.readouterr())
    assert "before step 3 of Cautious (test_nonfinite.py:" in output
    assert ("The parameters are still finite, and the next step is watched." in output) == (not mode)
    next(spawning, None)
