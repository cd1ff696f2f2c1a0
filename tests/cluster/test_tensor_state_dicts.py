"""State dicts move between the sharded tensors of a mesh and the ranks' own tensors, without the controller."""

import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import monarch_nb
from monarch_nb.actor import Actor, ProcMesh, endpoint
from monarch_nb.connect import shutdown
from monarch_nb.distributed import Mesh, MeshTensor
from monarch_nb.rdma import BufferDroppedError, routes
from monarch_nb.spmd import run, setup_torch_elastic_env
from monarch_nb.state_dict import SharedStateDict, share
from monarch_nb.transport.parcel import Parcel
from tests.cluster.actor_tools import spawned

pytestmark = pytest.mark.timeout(180)
SHAPES = {"rows": (10, 6), "columns": (4, 7), "bias": (5,), "count": ()}


def values(name: str) -> torch.Tensor:
    shape = SHAPES[name]
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape) + len(name)


class Trainer(Actor):
    """Holds the state as tensors of its own, or as DTensors that are sharded along a dimension."""

    @endpoint
    def begin(self, dim: int | None) -> None:
        self.state = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        if dim is None:
            return
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for name, tensor in self.state.items():
            placement = Shard(dim) if tensor.dim() > dim else Replicate()
            self.state[name] = distribute_tensor(tensor, mesh, [placement])

    @endpoint
    def load(self, shared: SharedStateDict, name: str = "") -> None:
        shared.load({name: self.state[name]} if name else self.state, timeout=20)

    @endpoint
    def share(self, add: float) -> SharedStateDict:
        for tensor in self.state.values():
            tensor += add
        return share(self.state)

    @endpoint
    def full_states(self) -> dict[str, torch.Tensor]:
        return {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in self.state.items()}

    @endpoint
    def load_other(self, shared: SharedStateDict, name: str, shape: tuple[int, ...]) -> None:
        shared.load({name: torch.zeros(shape)}, timeout=20)

    @endpoint
    def fill(self, shared: SharedStateDict, value: float) -> list[tuple[int, ...]]:
        return [tuple(shard.fill_(value).shape) for shard in shared.local_shards().values()]


@pytest.fixture(scope="module")
def procs() -> Iterator[ProcMesh]:
    yield from spawned(4, "learners")


@pytest.fixture(scope="module")
def mesh(procs: ProcMesh) -> Mesh:
    return Mesh.of(procs.split(gpus=("data", "model"), model=2))


@pytest.fixture(scope="module")
def three() -> Iterator[ProcMesh]:
    for procs in spawned(3, "trainers"):
        setup_torch_elastic_env(procs)
        yield procs


def sharded(mesh: Mesh) -> dict[str, MeshTensor]:
    specs: dict[str, Any] = {
        "rows": ["data", "model"], "columns": [None, ("data", "model")], "bias": ["model"], "count": None
    }  # fmt: skip
    return {name: mesh.distribute(values(name), spec) for name, spec in specs.items()}


def assert_equal(state: dict[str, torch.Tensor], add: float = 0) -> None:
    for name in SHAPES:
        assert torch.equal(state[name], values(name) + add), name


@pytest.mark.parametrize("dim", [None, 0, 1])
def test_a_state_goes_to_other_ranks_and_placements_and_back(mesh: Mesh, three: ProcMesh, dim: int | None) -> None:
    state: dict[str, Any] = sharded(mesh)
    if dim is not None:
        setup_torch_elastic_env(three)
    trainers: Any = three.spawn(f"trainers_{dim}", Trainer)
    trainers.begin.call(dim).get(60)
    with share(state) as shared:
        trainers.load.call(shared).get(60)
    for full_state in trainers.full_states.call().get(60).values():
        assert_equal(full_state)
    with SharedStateDict.join(trainers.share.call(1.0).get(60)) as back:
        back.load(state)
    assert_equal({name: tensor.full_tensor() for name, tensor in state.items()}, 1.0)


def test_actors_of_the_same_processes_have_the_shards_themselves(procs: ProcMesh, mesh: Mesh) -> None:
    state = sharded(mesh)
    actors: Any = procs.spawn("same", Trainer)
    with share({"rows": state["rows"]}) as shared:
        assert actors.fill.call(shared, 3.0).get(60).values() == [[(5, 3)]] * 4
    assert torch.equal(state["rows"].full_tensor(), torch.full((10, 6), 3.0))


def test_the_tensors_do_not_pass_through_the_controller(
    mesh: Mesh, three: ProcMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = 0
    make = Parcel.__init__

    def counted(self: Parcel, *args: Any, **kwargs: Any) -> None:
        nonlocal moved
        make(self, *args, **kwargs)
        moved += self.nbytes

    monkeypatch.setattr(Parcel, "__init__", counted)
    weight = mesh.randn(1024, 512, sharding_spec=["data", "model"])
    trainers: Any = three.spawn("large", Large)
    before, ways = moved, {route.process: route.read for route in routes()}
    with share({"weight": weight}) as shared:
        trainers.load.call(shared).get(60)
    with trainers.share.call().get(60).get(0) as back:
        back.load({"weight": weight})
    assert moved - before < 100_000, "messages have names, shapes and addresses alone"
    assert {route.process: route.read for route in routes()} == ways
    weight.full_tensor()
    assert moved - before >= weight.nbytes, "what passes through the controller is counted"


class Large(Actor):
    @endpoint
    def load(self, shared: SharedStateDict) -> None:
        self.weight = torch.zeros(1024, 512)
        shared.load({"weight": self.weight})

    @endpoint
    def share(self) -> SharedStateDict:
        return share({"weight": self.weight})


def test_modules_and_their_optimizers_have_names_with_dots(mesh: Mesh) -> None:
    def train(device: Any) -> tuple[torch.nn.Linear, torch.optim.Optimizer]:
        torch.manual_seed(1)
        model = torch.nn.Linear(4, 2).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        model(torch.ones(3, 4, device=device)).sum().backward()
        optimizer.step()
        return model, optimizer

    model, optimizer = train(mesh.device)
    local, own = train("cpu")
    with torch.no_grad():
        local.weight.zero_()
    shared = share({"model": local.state_dict(), "optimizer": own.state_dict()})
    assert shared.shapes.keys() >= {"optimizer.state.0.exp_avg", "model.weight"}
    shared.load({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    assert not model.weight.any().item()
    shared.drop()
    with pytest.raises(monarch_nb.distributed.TensorError, match="was dropped") as caught:
        shared.load({"model": model.state_dict()})
    assert BufferDroppedError.__name__ in str(caught.value)


def test_a_program_as_under_torchrun_shares_and_loads(mesh: Mesh, tmp_path: Any) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, torch.distributed as dist\n"
        "from torch.distributed.fsdp import fully_shard\n"
        "dist.init_process_group('gloo')\n"
        "torch.manual_seed(0)\n"
        "model = fully_shard(torch.nn.Linear(5, 7))\n"
    )
    for ranks in spawned(2, "program"):
        run(str(script), on=ranks)
        holders: Any = ranks.spawn("holders", Holder)
        weight = mesh.zeros(7, 5, sharding_spec=["data", "model"])
        with SharedStateDict.join(holders.share.call().get(60)) as shared:
            assert shared.shapes == {"weight": (7, 5), "bias": (7,)}
            shared.load({"weight": weight})
        assert weight.full_tensor().abs().min() > 0
        doubled = mesh.distribute(weight.full_tensor() * 2, ["data", None])
        with share({"weight": doubled}) as shared:
            got = holders.load.call(shared).get(60)
        assert all(torch.equal(tensor, doubled.full_tensor()) for tensor in got.values())


class Holder(Actor):
    @endpoint
    def share(self) -> SharedStateDict:
        return share(sys.modules["__main__"].model)

    @endpoint
    def load(self, shared: SharedStateDict) -> torch.Tensor:
        weight: DTensor = sys.modules["__main__"].model.weight
        shared.load({"weight": weight})
        full: torch.Tensor = weight.full_tensor()
        return full


def test_errors_name_the_tensor_and_the_rank(mesh: Mesh, three: ProcMesh) -> None:
    state = sharded(mesh)
    trainers: Any = three.spawn("wrong", Trainer)
    trainers.begin.call(None).get(60)
    with share({name: state[name] for name in ("rows", "bias")}) as shared:
        with pytest.raises(monarch_nb.exceptions.ActorError, match="columns is not among the shared tensors"):
            trainers.load.call(shared).get(60)
        with pytest.raises(
            monarch_nb.exceptions.ActorError, match=r"rows is .*\(10, 6\) on rank 0.*learners.*\(6, 10\)"
        ):
            trainers.load_other.call(shared, "rows", (6, 10)).get(60)
        with pytest.raises(KeyError, match="count"):
            shared.load({"count": state["count"]})
    [first, *_] = trainers.share.call(0.0).get(60).values()
    with pytest.raises(ValueError, match=r"rows is torch\.float32 of shape"):
        first.load({"rows": mesh.zeros(2, 2)})
    parts = mesh.execute(_own_rows, state["rows"]).get(0)
    with pytest.raises(ValueError, match="15 of the 60 elements of rows that are wanted are shared, by rank 0"):
        parts.load({"rows": torch.zeros(10, 6)})


def _own_rows(rows: torch.Tensor) -> SharedStateDict:
    from monarch_nb.rdma import Shard as Part
    from monarch_nb.rdma.parameters import OfferedShards

    return SharedStateDict(OfferedShards.offer({"rows": Part(rows, start=(0, 0), of=(10, 6))}))


def test_of_a_killed_rank_what_others_have_is_loaded(mesh: Mesh, three: ProcMesh) -> None:
    trainers: Any = three.spawn("readers", Trainer)
    trainers.begin.call(None).get(60)
    dying = Mesh((2, 2), ("data", "model"), name="dying")
    state = {
        "rows": dying.distribute(values("rows"), ["data", "model"]),
        "columns": dying.distribute(values("columns"), ["model", None]),
    }
    shared = share(state)
    os.kill(dying.execute(os.getpid).get(3), signal.SIGKILL)
    trainers.load.call(shared, "columns").get(60)
    for full_state in trainers.full_states.call().get(60).values():
        assert torch.equal(full_state["columns"], values("columns"))
    with pytest.raises(monarch_nb.exceptions.ActorError, match=r"rows cannot be loaded: its part on rank 3 on .*dying"):
        trainers.load.call(shared, "rows").get(60)
    target = {name: mesh_tensor for name, mesh_tensor in sharded(mesh).items() if name in state}
    with pytest.raises(
        monarch_nb.distributed.TensorError, match=r"rows cannot be loaded: its part on rank 3 on .*dying"
    ):
        shared.load(target)
    shared.drop()
    trainers.load_other.call(share({"rows": values("rows")}), "rows", (10, 6)).get(60)
    share({name: values(name) for name in state}).load(target)
    assert torch.equal(target["rows"].full_tensor(), values("rows"))


def teardown_module() -> None:
    shutdown()
