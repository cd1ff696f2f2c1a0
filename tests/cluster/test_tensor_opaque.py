"""Objects, autograd functions and generators of ranks, and operations that are sent together, on two real processes."""

import importlib
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import monarch_nb
from monarch_nb.actor import Channel, ProcMesh, send
from monarch_nb.distributed import (
    OpaqueModule,
    OpaqueObject,
    TensorError,
    coalescing,
    opaque_method,
    remote_autograd_function,
    spawn_tensor_engine,
)
from tests.cluster.actor_tools import spawned
from tests.polling import until

builtins: Any = importlib.import_module("monarch.builtins")
generators: Any = importlib.import_module("monarch.random")
gradients: Any = importlib.import_module("monarch_nb.tensor.ranks.gradients")
timing: Any = importlib.import_module("monarch.timer")
builtins_random: Any = importlib.import_module("monarch.builtins.random")

pytestmark = pytest.mark.timeout(120)
WAYS = ("start", "stop")


@pytest.fixture(scope="module")
def procs() -> Iterator[ProcMesh]:
    yield from spawned(2, "opaque")


@pytest.fixture
def rank(procs: ProcMesh) -> Any:
    """0 on rank 0, 1 on rank 1."""
    return procs.rank_tensor("gpus")


def both(tensor: object) -> list[object]:
    """The value of each rank, as lists."""
    return [monarch_nb.inspect(tensor, gpus=rank).tolist() for rank in range(2)]


class Cell:
    """Counts its live instances."""

    alive = 0

    def __init__(self, value: Any) -> None:
        self.value = value
        Cell.alive += 1

    def __del__(self) -> None:
        Cell.alive -= 1

    def plus(self, x: torch.Tensor, times: int = 1) -> Any:
        self.value = self.value + x * times
        return self.value


class CellHandle(OpaqueObject):
    """Its handle in a program."""

    @opaque_method
    def plus(self, x: torch.Tensor, times: int = 1) -> torch.Tensor:
        return x.clone()


def _make_cell(x: torch.Tensor) -> object:
    return monarch_nb.OpaqueRef(Cell(x.clone())), [x + 1]


def _read_cell(reference: monarch_nb.OpaqueRef) -> object:
    return reference.value.value


make_cell = monarch_nb.remote(_make_cell, propagate=lambda x: (monarch_nb.OpaqueRef(None), [x.clone()]))
read_cell = monarch_nb.remote(_read_cell, propagate=lambda reference: torch.empty((), dtype=torch.int64))


def count() -> list[int]:
    return [Cell.alive]


def test_objects_live_on_the_ranks_as_long_as_their_references(procs: ProcMesh, rank: Any) -> None:
    reference, [more] = make_cell(rank)
    assert both(more) == [1, 2]
    assert both(read_cell(reference)) == [0, 1]
    with procs.activate():
        alive = monarch_nb.remote(count)
        assert alive.call().get(30).values() == [[1], [1]]
        again = monarch_nb.remote(lambda reference: reference)(reference)  # shapes are those of the first call
        del reference
        assert both(read_cell(again)) == [0, 1]
        del again
        until(lambda: alive.call().get(30).values() == [[0], [0]])  # freed with the next operation
    with pytest.raises(RuntimeError, match="only remote functions can"):
        monarch_nb.OpaqueRef(1)
    with pytest.raises(RuntimeError, match="attempts to access"):
        make_cell(rank)[0].value  # noqa: B018 - it raises


def test_methods_of_objects_run_on_each_rank(procs: ProcMesh, rank: Any) -> None:
    with procs.activate():
        cell: Any = CellHandle("tests.cluster.test_tensor_opaque.Cell", 10)
    assert both(cell.plus(rank, times=5)) == [10, 15]
    assert both(cell.call_method("plus", lambda self, x: x.clone(), rank)) == [10, 16]
    assert cell.call_method_on_shard_and_fetch("plus", rank, shard={"gpus": 1}).get(30) == torch.tensor(17)
    cell.note = "of the program"
    assert cell.note == "of the program"
    assert both(CellHandle(cell).plus(rank)) == [10, 18]
    failed = cell.call_method("nothing", lambda self: torch.empty(1))
    with pytest.raises(TensorError, match="nothing"):
        monarch_nb.inspect(failed)


class Twice(torch.nn.Module):
    """Returns a tree, and does not use all its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 2)
        torch.nn.init.constant_(self.linear.weight, 0.5)

    def forward(self, x: torch.Tensor, unused: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.linear(x)
        return {"y": y, "twice": 2 * y}


def test_modules_of_ranks_have_parameters_and_gradients(procs: ProcMesh, rank: Any) -> None:
    with procs.activate():
        module = OpaqueModule(Twice)
        x = (torch.ones(2, 3) + rank).requires_grad_()
        unused = torch.ones(1, requires_grad=True)
    weight, bias = module.parameters()
    with torch.no_grad():
        bias.zero_()

    def shapes(self: object, x: torch.Tensor, unused: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": x[:, :2].clone(), "twice": x[:, :2].clone()}

    result = module(x, unused, propagator=shapes)
    loss: Any = result["y"].sum() + result["twice"].sum()
    loss.backward()
    for index in range(2):
        w: Any = torch.full((2, 3), 0.5, requires_grad=True)
        own: Any = (torch.ones(2, 3) + index).requires_grad_()
        local: Any = (3 * (own @ w.T)).sum()
        local.backward()
        assert monarch_nb.inspect(result["y"], gpus=index).tolist() == (own @ w.T).tolist()
        assert monarch_nb.inspect(x.grad, gpus=index).tolist() == own.grad.tolist()
        assert monarch_nb.inspect(weight.grad, gpus=index).tolist() == w.grad.tolist()
        assert monarch_nb.inspect(bias.grad, gpus=index).tolist() == [6, 6]
        assert monarch_nb.inspect(unused.grad, gpus=index).tolist() == [0]
    with torch.no_grad():
        assert not module(x, unused, propagator=shapes)["y"].requires_grad
        weight.zero_()
    assert both(module.call_method("forward", shapes, x, unused)["y"])[1] == [[0, 0]] * 2


class Scaled(torch.autograd.Function):
    """Keeps values on the ranks between its passes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor, options: dict[str, Any]) -> object:
        ctx.save_for_backward(x)
        ctx.times = options["times"]
        return x * y * ctx.times if x.requires_grad else x + y, y, torch.ones(4), 4

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> object:
        assert ctx.needs_input_grad == (True, True, False)
        return gradients[0] * ctx.times, gradients[1] + ctx.saved_tensors[0], None


class Squared(torch.autograd.Function):
    """With its context apart."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return 2 * ctx.saved_tensors[0] * gradient


def test_both_passes_of_an_autograd_function_run_on_the_ranks(procs: ProcMesh, rank: Any) -> None:
    function = remote_autograd_function(Scaled)
    for _ in range(2):
        x, y = (rank + 2.0).requires_grad_(), (rank + 1.0).requires_grad_()
        out, same, ones, number = function.apply(x, y, {"times": 10})
        assert number == 4
        assert both(out) == [20, 60]
        (out + same).sum().backward()
        assert both(x.grad) == [10, 10]
        assert both(y.grad) == [3, 4]
        assert both(ones) == [[1] * 4] * 2
    assert both(function.apply(x.detach(), y.detach(), {"times": 10})[0]) == [3, 5]
    z = (rank + 1.0).requires_grad_()
    remote_autograd_function(Squared).apply(z).backward()
    assert both(z.grad) == [2, 4]


def test_coalesced_operations_are_sent_at_the_end(procs: ProcMesh, rank: Any) -> None:
    sizes: list[int] = []
    rank.mesh.observe(lambda site: site, lambda stream, first, sites: sizes.append(len(sites)))
    try:
        assert both(rank) == [0, 1]
        sizes.clear()
        t = rank
        with coalescing():
            for _ in range(600):
                t = t + 1
            with coalescing():
                t = t * 2
            with pytest.raises(NotImplementedError, match="sends all at its end"):
                monarch_nb.inspect(t)
            assert sizes == []
        assert len(sizes) == 1
        assert sizes[0] >= 601
    finally:
        rank.mesh.observe(None, lambda stream, first, sites: None)
    assert both(t) == [1200, 1202]


def test_answers_of_remote_functions_go_to_a_port(procs: ProcMesh, rank: Any) -> None:
    port, receiver = Channel[Any].open()
    remote = monarch_nb.remote(lambda x, y: int(x) + y)
    send(remote, (rank, 5), {}, port)
    assert sorted(receiver.recv().get(30) for _ in range(2)) == [5, 6]
    send(remote, (rank,), {"y": 7}, port, "choose")
    assert receiver.recv().get(30) in (7, 8)
    send(remote, (rank, "no number"), {}, port)
    with pytest.raises(TensorError, match="unsupported operand"):
        receiver.recv().get(30)
    send(remote, (rank, 1), {})


def test_generators_of_ranks_are_set_and_restored(procs: ProcMesh) -> None:
    with procs.activate() as mesh:
        torch.manual_seed(1)
        by_seed = both(torch.rand(2))
        torch.manual_seed(1)
        before = generators.get_state()
        first = torch.rand(2)
        generators.set_state(before)
        assert both(torch.rand(2)) == both(first)
        assert both(first)[0] != both(first)[1]
        states = [generators.new_state(mesh.rank_tensor("gpus") + 4) for _ in range(2)]
        drawn = []
        for state in states:
            generators.set_state(state)
            drawn.append(both(torch.rand(2)))
        assert drawn[0] == drawn[1]
        with monarch_nb.no_mesh.activate():
            expected = [torch.rand(2, generator=torch.Generator().manual_seed(seed)).tolist() for seed in (4, 5)]
        assert drawn[0] == expected
        builtins_random.set_manual_seed_remote(12345)
        equal = both(torch.randn(3))
        assert equal[0] == equal[1]
        builtins_random.set_manual_seed_remote(12345, mesh.rank_tensor("gpus"))
        different = both(torch.randn(3))
        assert different[0] == equal[0]
        assert different[1] != equal[1]
        torch.manual_seed(1)  # the seed of the mesh, as before
        assert both(torch.rand(2)) == by_seed


def test_the_tensor_engine_of_processes_is_their_mesh(procs: ProcMesh, rank: Any, caplog: Any) -> None:
    mesh = spawn_tensor_engine(procs)
    with mesh.activate(), procs.activate() as active:
        assert mesh is active
        builtins.log_remote("hello %s", rank, level=logging.INFO)
        builtins.set_logging_level_remote(logging.DEBUG)
    everything = mesh.flatten("all")
    with everything.activate():
        assert monarch_nb.inspect(2 * torch.ones(2), all=1).tolist() == [2, 2]
    mesh.exit()
    torch.stack([rank, rank]).index_select(0, rank * 9)
    with pytest.raises(TensorError, match="index_select"):
        mesh.exit()


PATHS = {
    "monarch.builtins": "log_remote",
    "monarch.cached_remote_function": "remote_autograd_function",
    "monarch.common._coalescing": "coalescing compile",
    "monarch.common.client": "Client",
    "monarch.common.device_mesh": "DeviceMesh RemoteProcessGroup get_active_mesh no_mesh slice_mesh to_mesh",
    "monarch.common.fake": "fake_call",
    "monarch.common.future": "Future",
    "monarch.common.invocation": "RemoteException",
    "monarch.common.opaque_ref": "OpaqueRef",
    "monarch.common.remote": "Remote call_on_shard_and_fetch remote",
    "monarch.common.stream": "Stream get_active_stream",
    "monarch.common.tensor": "Tensor reduce reduce_",
    "monarch.common.tree": "flatten flattener tree_map",
    "monarch.fetch": "call_on_shard_and_fetch fetch_shard inspect show",
    "monarch.gradient": "GradientGenerator",
    "monarch.gradient_generator": "grad_function grad_generator gradient_execution_order",
    "monarch.mesh_controller": "RemoteException spawn_tensor_engine",
    "monarch.opaque_module": "OpaqueModule",
    "monarch.opaque_object": "OpaqueObject opaque_method",
    "monarch.timer": "ExecutionTimer execution_timer_start execution_timer_stop get_execution_timer_average_ms",
    "monarch.timer.execution_timer": "ExecutionTimer get_execution_timer_summary get_time_perfcounter",
    "monarch.random": "State get_state make_deterministic new_state set_state",
}


@pytest.mark.parametrize("path", PATHS)
def test_programs_find_names_where_torchmonarch_has_them(path: str) -> None:
    namespace: dict[str, object] = {}
    exec(f"from {path} import {', '.join(PATHS[path].split())}", namespace)
    assert all(namespace[name] is not None for name in PATHS[path].split())


def test_parts_of_a_program_are_timed_where_they_run(procs: ProcMesh) -> None:
    start, stop = (monarch_nb.remote(f"monarch.timer.execution_timer_{way}", propagate="inspect") for way in WAYS)
    mean: Any = monarch_nb.remote("monarch.timer.get_execution_timer_average_ms")
    with procs.activate():
        for _ in range(2):
            start("part")
            monarch_nb.remote("time.sleep", propagate="inspect")(0.02)
            stop("part")
        means: Any = both(mean("part"))
    assert all(20 <= value < 60_000 for value in means)
    timer = timing.ExecutionTimer
    timer.reset()
    with timer.time("outer"), timer.time("outer"), timer.time("inner", use_cpu=True):
        pass
    summary = timer.summary()
    assert {name: part["count"] for name, part in summary.items()} == {"outer": 2, "inner": 1}
    assert summary["outer"]["total_ms"] >= summary["outer"]["max_ms"] >= summary["inner"]["mean_ms"]
    assert timing.get_latest_timer_measurement("outer").item() == summary["outer"]["max_ms"]
    timer.reset()
    assert timer.get_latest_measurement() == 0.0
    with pytest.raises(ValueError, match="no part 'default' has begun"):
        timer.stop()


class Power:
    """The resolver's result for a number."""

    def __init__(self, exponent: int) -> None:
        self.exponent = exponent

    def resolve(self) -> Any:
        return lambda x: x**self.exponent


def test_resolvers_of_a_program_say_what_runs_on_the_ranks(procs: ProcMesh, rank: Any) -> None:
    resolvers = monarch_nb.function_resolvers
    resolvers.append(lambda number: Power(number) if isinstance(number, int) else None)
    try:
        cubed: Any = monarch_nb.remote(3)
        assert both(cubed(rank + 1)) == [1, 8]
        assert both(monarch_nb.remote(torch.neg)(rank)) == [0, -1]
    finally:
        resolvers.pop()


def test_gradients_come_in_the_order_of_the_backward_pass() -> None:
    t, w1, w2, w3 = (torch.rand(3, 3, requires_grad=True) for _ in range(4))
    first = torch.relu(t @ w1)
    result = torch.relu(torch.relu(first @ w2) @ w3)
    loss = torch.std_mean(result)[0] * 2
    assert gradients.gradient_execution_order([loss], [w2, w3, w1, result]) == [3, 1, 0, 2]
    assert gradients.gradient_execution_order([loss], [t, torch.ones(1, requires_grad=True)]) == [1, 0]
    expected = torch.autograd.grad([loss], [w2, t], retain_graph=True)
    for gradient, right in zip(gradients.GradientGenerator([loss], [w2, t]), expected, strict=True):
        torch.testing.assert_close(gradient, right)


def test_trees_are_flattened_as_torchmonarch_does() -> None:
    tree: Any = importlib.import_module("monarch.common.tree")
    leaves, unflatten = tree.flatten({"a": 1, "b": [2, "x"]}, lambda leaf: isinstance(leaf, int))
    assert (leaves, unflatten([3, 4])) == ([1, 2], {"a": 3, "b": [4, "x"]})
    assert tree.flattener((8, {"a": 9}))((0, {"a": 1})) == [0, 1]
    fake: Any = importlib.import_module("monarch.common.fake")
    assert fake.fake_call(torch.empty, 3).shape == (3,)
