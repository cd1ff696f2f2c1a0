"""The simulator: programs on values of ranks' own without processes, in simulated time."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import monarch_nb
from monarch_nb.actor import Actor, context, endpoint, this_host
from monarch_nb.compat.mock import get_tensor_engine_factory, patch_tensor_engine
from monarch_nb.distributed import ContentsLostError, SimulatorTraceMode

pytestmark = pytest.mark.timeout(120)
comms = monarch_nb.Stream("comms")


def simulator(tmp_path: Path, hosts: int = 1, gpus: int = 4, **options: Any) -> monarch_nb.Simulator:
    return monarch_nb.Simulator(hosts, gpus, trace_path=str(tmp_path / "trace.json"), **options)


def tasks_of(simulated: monarch_nb.Simulator, rank: int = 0, stream: object = None) -> list[tuple[str, float, float]]:
    tasks = simulated.timeline.tasks[rank][stream]
    return [(task.name, task.start, task.end) for task in tasks if task.end > task.start]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(4, 4), nn.ReLU())))

    def forward(self, data: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.layers(data), target)


def steps_of(model: nn.Module, data: torch.Tensor, target: torch.Tensor) -> Iterator[tuple[Any, Any]]:
    """The parameters, last first, and their gradients, each computed when it is asked for."""
    loss = model(data, target)
    parameters = list(reversed(list(model.parameters())))
    return zip(parameters, monarch_nb.grad_generator(loss, parameters), strict=True)


def on_one_stream(model: nn.Module, data: torch.Tensor, target: torch.Tensor) -> None:
    steps = steps_of(model, data, target)
    with torch.no_grad():
        todo = next(steps, None)
        while todo is not None:
            parameter, gradient = todo
            gradient.reduce_("dp", "sum")
            todo = next(steps, None)
            parameter += 0.01 * gradient


def on_two_streams(model: nn.Module, data: torch.Tensor, target: torch.Tensor, *, late: bool) -> None:
    steps = (
        (parameter, gradient, *comms.borrow(gradient, mutable=True))
        for parameter, gradient in steps_of(model, data, target)
    )
    with torch.no_grad():
        todo = next(steps, None)
        while todo is not None:
            parameter, gradient, shared, borrow = todo
            with comms.activate():
                shared.reduce_("dp", "sum")
            if not late:
                borrow.drop()
            todo = next(steps, None)
            borrow.drop()
            parameter += 0.01 * gradient


@pytest.mark.parametrize(
    ("train", "microseconds"),
    [(on_one_stream, 3510), (partial(on_two_streams, late=False), 3210), (partial(on_two_streams, late=True), 2547.5)],
    ids=["one stream", "borrows", "late drops"],
)
def test_data_parallel_training_takes_as_long_as_in_torchmonarch(
    train: Callable[..., None], microseconds: float, tmp_path: Path
) -> None:
    simulated = simulator(tmp_path, trace_mode="stream_only")
    with simulated.mesh.rename(gpu="dp").activate():
        train(Net(), torch.rand(3, 4), torch.full((3,), 1, dtype=torch.int64))
    assert simulated.elapsed == microseconds
    assert simulated.peak_memory > 0


def test_borrows_are_waited_for_at_first_use_and_at_the_drop(tmp_path: Path) -> None:
    simulated = simulator(tmp_path, gpus=2)
    with simulated.mesh.activate():
        x, y, z = (torch.randn(100, 100) for _ in range(3))
        flat: Any = torch.cat((x.view(10000), y.view(10000)))
        borrowed, borrow = comms.borrow(flat)
        with comms.activate():
            copied: Any = borrowed.clone()
            copied.reduce_("gpu", "avg")
        y = y @ z
        borrow.drop()
        x = torch.randn(100, 100)
        new_x, new_y = flat.split((10000, 10000))
        del flat, borrowed, copied, new_x
        torch.randn(100, 100)
        del new_y
        torch.randn(100, 100)
    assert tasks_of(simulated, 1)[3:7] == [
        ("aten.cat", 30, 40),
        ("aten.mm", 40, 50),
        ("waiting for comms", 50, 150),
        ("aten.randn", 150, 160),
    ]
    assert tasks_of(simulated, 1, comms) == [("waiting for main", 0, 40), ("aten.clone", 40, 50), ("reduce_", 50, 150)]
    memory = [bytes_ // 1000 for _, bytes_ in simulated.timeline.memory_of(1)]
    assert memory[:4] == [40, 80, 120, 200]
    assert memory[-1] < 200  # the borrowed memory was freed after its last view


def test_values_that_are_asked_for_are_zeros(tmp_path: Path) -> None:
    simulated = simulator(tmp_path, hosts=2, gpus=2)
    with simulated.mesh.activate():
        t = torch.rand(2, 3) + simulated.mesh.rank_tensor("gpu")
    assert torch.equal(monarch_nb.inspect(t, host=1, gpu=0), torch.zeros(2, 3))
    assert (t.sum().item(), bool(t.any()), t[0].tolist()) == (0.0, False, [0.0, 0.0, 0.0])
    assert "# on each of 4 ranks" in str(t)
    with pytest.raises(IndexError, match="gpu=2 is out of range"):
        monarch_nb.inspect(t, host=0, gpu=2)


def test_functions_do_not_run_but_show_what_they_return(tmp_path: Path) -> None:
    simulated = simulator(tmp_path, gpus=2)
    ran = []

    @monarch_nb.remote
    def halved(x: torch.Tensor) -> torch.Tensor:
        ran.append(isinstance(x, torch._subclasses.FakeTensor))
        return x[: len(x) // 2]

    with simulated.mesh.activate():
        assert halved(torch.ones(6)).shape == (3,)
        assert list(monarch_nb.remote("platform.node").call().get().values()) == [None, None]
    assert ran == [True]
    assert [name for name, _, _ in tasks_of(simulated)] == ["aten.ones", "halved", "platform.node"]


def test_parts_of_a_mesh_are_simulated_on_the_same_ranks(tmp_path: Path) -> None:
    simulated = simulator(tmp_path, hosts=2, gpus=2)
    first, second = (simulated.mesh.slice(host=host) for host in range(2))
    with first.activate():
        x: Any = torch.ones(4)
    moved = x.to_mesh(second)
    assert tasks_of(simulated, 0) == [("aten.ones", 0, 10), ("send", 10, 110)]
    assert tasks_of(simulated, 3) == [("receive", 0, 110)]
    assert monarch_nb.inspect((moved + 1).reduce("gpu"), gpu=1).shape == (4,)
    moved.to_mesh(second)
    assert tasks_of(simulated, 3)[1:] == [("aten.add.Tensor", 110, 120), ("reduce", 120, 220), ("send", 220, 221)]
    assert (x + simulated.mesh.slice(host=0).rank_tensor("gpu")).shape == (4,)  # an equal slice has the same tensors


def test_a_mesh_that_is_called_is_sliced_with_a_warning(tmp_path: Path) -> None:
    mesh = simulator(tmp_path, hosts=2, gpus=2).mesh
    with pytest.warns(DeprecationWarning, match="mesh.slice"):
        part = mesh(host=1)
    assert part.region == mesh.slice(host=1).region


def test_reductions_wait_only_along_their_dimension(tmp_path: Path) -> None:
    simulated = simulator(tmp_path, hosts=2, gpus=2)
    with simulated.mesh.slice(host=0).activate():
        torch.ones(1)
    with simulated.mesh.activate():
        x: Any = torch.ones(1)
        x.reduce("gpu")
        assert [simulated.timeline.clock(rank, None) for rank in range(4)] == [120, 120, 110, 110]
        x.reduce("host")
    assert simulated.elapsed == 220


def test_the_trace_opens_in_perfetto_and_names_lines(tmp_path: Path) -> None:
    simulated = simulator(tmp_path, gpus=2, group_workers=True)
    with simulated.mesh.activate(), monarch_nb.set_meta("forward"):
        ones: Any = torch.ones(1000)
        ones.reduce("gpu")
    simulated.display()
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [event["args"]["name"] for event in events if event["ph"] == "M"] == ["ranks 0-1", "main"]
    first, second = (event for event in events if event["ph"] == "X")
    assert (first["name"], first["ts"], first["dur"]) == ("aten.ones forward", 0, 10)
    assert (second["cat"], second["ts"], second["dur"]) == ("exchange", 10, 100)
    assert "test_tensor_simulator.py" in first["args"]["line"]
    assert next(event["args"]["bytes"] for event in events if event["ph"] == "C") == 4000


def test_the_controller_can_be_part_of_the_trace(tmp_path: Path) -> None:
    simulated = simulator(tmp_path, gpus=1, trace_mode=SimulatorTraceMode.EVERYTHING)
    with simulated.mesh.activate():
        torch.ones(3) + 1
    simulated.mesh.exit()
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    issued = [event for event in events if event.get("cat") == "issued"]
    assert [event["name"] for event in issued] == ["aten.ones", "aten.add.Tensor"]
    begun = [event["ts"] for event in events if event.get("cat") == "operation"]
    assert all(start >= issue["ts"] for start, issue in zip(begun, issued, strict=True))
    with pytest.raises(ValueError, match="trace_mode='all' is none of 'stream_only'"):
        simulator(tmp_path, trace_mode="all")


def test_commands_are_exported_where_they_were_kept(tmp_path: Path) -> None:
    simulated = simulator(tmp_path, gpus=2, build_ir=True, simulate_mode="simulate_with_report_only")
    with simulated.mesh.activate():
        a = torch.ones(3)
        a.add_(a)
    simulated.export_ir(str(tmp_path / "ir.json"))
    created, added = json.loads((tmp_path / "ir.json").read_text())["commands"]
    assert (created["name"], created["stream"], created["ranks"]) == ("aten.ones", "main", [0, 1])
    assert (added["reads"], added["writes"]) == (created["makes"] * 2, created["makes"])
    simulated.display()
    assert not (tmp_path / "trace.json").exists()
    with pytest.raises(ValueError, match="build_ir=True"):
        simulator(tmp_path).export_ir(str(tmp_path / "none.json"))


def test_a_stopped_simulation_takes_no_more_operations(tmp_path: Path) -> None:
    simulated = simulator(tmp_path, gpus=1)
    with simulated.mesh.activate():
        t = torch.ones(2)
    simulated.mesh.stop()
    with pytest.raises(ContentsLostError):
        t + 1


class Trainer(Actor):
    def __init__(self) -> None:
        self.procs = context().actor_instance.proc_mesh
        with self.procs.activate():
            self.model = nn.Linear(3, 1)

    @endpoint
    async def step(self) -> tuple[str, float]:
        with self.procs.activate() as mesh:
            loss = self.model(torch.ones(2, 3)).square().mean() + 1
            loss.backward()
            value = await monarch_nb.fetch_shard(loss.detach())
        return repr(mesh), value.item()


def test_actors_of_a_patched_class_train_on_simulated_ranks() -> None:
    def train_once() -> tuple[str, float]:
        procs = this_host().spawn_procs({"gpus": 1})
        try:
            result: tuple[str, float] = procs.spawn("trainer", Trainer).step.call_one().get(60)
            return result
        finally:
            procs.stop().get()

    assert patch_tensor_engine(Trainer)(train_once)() == ("<Mesh of simulated ranks {gpus=1}>", 0.0)
    with patch_tensor_engine(Trainer) as factory:
        assert get_tensor_engine_factory(Trainer) is factory
        with patch_tensor_engine(Trainer, lambda procs: factory(procs)) as replacement:
            assert get_tensor_engine_factory(Trainer) is replacement
    assert get_tensor_engine_factory(Trainer) is None
    assert train_once()[1] >= 1


@pytest.mark.parametrize("sizes", [(0, 2), (1, -1), (1, 2.0)])
def test_a_simulated_mesh_has_at_least_one_rank(sizes: Any) -> None:
    with pytest.raises(ValueError, match="must be a whole number of at least 1"):
        monarch_nb.Simulator(*sizes)
