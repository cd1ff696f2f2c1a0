"""Behaviour on which torchmonarch programs rely: names, coordinates, fetches, shapes and gradients, on four ranks."""

import asyncio
import importlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import monarch_nb
from monarch._testing import TestingContext
from monarch_nb.actor import Actor, ProcMesh, context, endpoint, this_host
from monarch_nb.distributed import Mesh, RankTensorError, TensorError
from monarch_nb.mesh import ValueMesh
from monarch_nb.runtime import Future, pending_future, resolve_future, resolve_later
from monarch_nb.shape import Extent
from monarch_nb.tensor.commands import CommandBatch
from tests.polling import until
from tests.processes import alive

pytestmark = pytest.mark.timeout(120)
generators: Any = importlib.import_module("monarch.random")
builtins_random: Any = importlib.import_module("monarch.builtins.random")
POINTS = [{"hosts": host, "gpus": gpu} for host in range(2) for gpu in range(2)]


@pytest.fixture(scope="module")
def procs() -> Iterator[ProcMesh]:
    grid = this_host().spawn_procs({"hosts": 2, "gpus": 2}, name="grid")
    yield grid
    grid.stop().get(30)


@pytest.fixture(scope="module")
def mesh(procs: ProcMesh) -> Mesh:
    with procs.activate() as active:
        mesh: Mesh = active
    return mesh


@pytest.fixture
def t(mesh: Mesh) -> Any:
    """[0, 1] on each rank, and ten times its number more."""
    with mesh.activate():
        return torch.arange(2.0) + 10 * mesh.rank_tensor(("hosts", "gpus"))


def ones(count: int, *, requires_grad: bool = False) -> Any:
    """Ones on each rank of the active mesh."""
    return torch.ones(count, requires_grad=requires_grad)


def every(tensor: object) -> list[object]:
    """The value of each rank, as lists."""
    return [monarch_nb.inspect(tensor, point).tolist() for point in POINTS]


RANKS: list[tuple[str, Callable[[Mesh], object], list[int]]] = [
    ("one_dimension", lambda mesh: mesh.rank_tensor("gpus"), [0, 1, 0, 1]),
    ("several_row_major", lambda mesh: mesh.rank_tensor(("hosts", "gpus")), [0, 1, 2, 3]),
    ("several_in_their_order", lambda mesh: mesh.rank_tensor(("gpus", "hosts")), [0, 2, 1, 3]),
    ("all_at_once", lambda mesh: mesh.procs.rank_tensors()["hosts"], [0, 0, 1, 1]),
    ("of_the_mesh", lambda mesh: mesh.rank("hosts"), [0, 0, 1, 1]),
    ("by_name", lambda mesh: mesh.ranks["gpus"], [0, 1, 0, 1]),
    ("of_the_process", lambda mesh: mesh.process_idx(), [0, 1, 2, 3]),
    ("renamed", lambda mesh: mesh.rename(gpus="dp").rank_tensor("dp"), [0, 1, 0, 1]),
]


def test_coordinates_are_on_the_active_part_of_their_mesh(mesh: Mesh) -> None:
    with mesh.slice(hosts=1).activate():
        moved: Any = torch.ones(2) * mesh.rank(("hosts", "gpus"))
    assert monarch_nb.inspect(moved, gpus=1).tolist() == [3, 3]
    with mesh.flatten("all").activate():
        flat: Any = torch.ones(2) * mesh.process_idx()
    assert monarch_nb.inspect(flat, all=2).tolist() == [2, 2]


@pytest.mark.parametrize("name", [name for name, *_ in RANKS])
def test_coordinates_of_ranks_are_tensors(mesh: Mesh, name: str) -> None:
    [(make, expected)] = [(make, expected) for label, make, expected in RANKS if label == name]
    tensor: Any = make(mesh)
    assert (tensor.shape, tensor.dtype) == ((), torch.int64)
    names = tensor.mesh.names
    assert [
        monarch_nb.inspect(tensor, dict(zip(names, point.values(), strict=True))).item() for point in POINTS
    ] == expected


MESHES: list[tuple[str, Callable[[Mesh], Mesh], dict[str, int], list[int]]] = [
    ("itself", lambda mesh: mesh, {"hosts": 2, "gpus": 2}, [0, 1, 2, 3]),
    ("slice", lambda mesh: mesh.slice(hosts=1), {"gpus": 2}, [2, 3]),
    ("rename", lambda mesh: mesh.rename(gpus="dp"), {"hosts": 2, "dp": 2}, [0, 1, 2, 3]),
    ("split", lambda mesh: mesh.split(gpus=("dp", "pp"), pp=2), {"hosts": 2, "dp": 1, "pp": 2}, [0, 1, 2, 3]),
    ("flatten", lambda mesh: mesh.flatten("all"), {"all": 4}, [0, 1, 2, 3]),
]


@pytest.mark.parametrize("name", [name for name, *_ in MESHES])
def test_meshes_of_a_mesh_have_names_sizes_and_processes(mesh: Mesh, name: str) -> None:
    [(make, sizes, numbers)] = [case[1:] for case in MESHES if case[0] == name]
    derived = make(mesh)
    assert (derived.sizes, derived.names, list(derived.processes)) == (sizes, tuple(sizes), numbers)
    assert derived.size() == len(numbers)
    assert derived.size(derived.names[0]) == next(iter(sizes.values()))
    assert derived.size(derived.names) == len(numbers)
    assert all(label in derived.to_table() for label in sizes)
    with derived.activate():
        assert monarch_nb.inspect(torch.ones(2)).tolist() == [1, 1]
    assert make(mesh).rank_tensor(derived.names[-1]).mesh is derived.rank_tensor(derived.names[-1]).mesh


def test_a_mesh_is_active_without_a_block_until_it_is_deactivated(mesh: Mesh) -> None:
    mesh.activate()
    try:
        assert monarch_nb.get_active_mesh() is mesh
        with mesh.slice(hosts=0).activate() as part:
            assert ones(1).mesh is part
        assert isinstance(torch.ones(1), monarch_nb.Tensor)
        types: list[type] = []
        thread = threading.Thread(target=lambda: types.append(type(torch.ones(1))))
        thread.start()
        thread.join()
        assert types == [torch.Tensor]
    finally:
        mesh.deactivate()
    mesh.deactivate()
    assert type(torch.ones(1)) is torch.Tensor


def test_a_tensor_knows_its_number_mesh_and_stream(mesh: Mesh, t: Any) -> None:
    assert t.mesh is mesh
    assert t.stream.name == "main"
    assert isinstance(t.ref, int)
    assert "monarch.Tensor((2,), torch.float32" in repr(t)
    assert t.add_(0) is t
    assert (t.requires_grad, t.ndim, t.numel()) == (False, 1, 2)
    t.drop()
    assert t.ref is None


@pytest.mark.parametrize(
    ("coordinates", "error", "text"),
    [
        ({"hosts": 1}, ValueError, "Missing key 'gpus' in shard map"),
        ({"hosts": 1, "gpus": 1, "x": 0}, KeyError, "no dimension 'x'"),
        ({"hosts": 2, "gpus": 0}, IndexError, "hosts=2 is out of range"),
    ],
)
def test_coordinates_that_name_no_rank_raise_at_once(
    t: Any, coordinates: dict[str, int], error: type[Exception], text: str
) -> None:
    remote = monarch_nb.remote(lambda x: x)
    for ask in (
        lambda: monarch_nb.inspect(t, coordinates),
        lambda: monarch_nb.inspect(t, None, **coordinates),
        lambda: monarch_nb.call_on_shard_and_fetch(remote, t, shard=coordinates),
    ):
        with pytest.raises(error, match=text):
            ask()


def test_futures_of_values_are_waited_for_in_any_way(tmp_path: Path, mesh: Mesh, t: Any) -> None:
    flag = tmp_path / "flag"

    def wait_for(flag: Path) -> None:
        until(flag.exists)

    slow = monarch_nb.remote(wait_for, propagate="inspect")
    with mesh.activate():
        slow(flag)
    future = monarch_nb.fetch_shard(t)  # waits for what was issued before, of whatever tensor
    with pytest.raises(TimeoutError):
        future.get(0.05)
    with pytest.raises(TimeoutError):
        future.result(timeout=0.05)
    flag.touch()
    assert future.result(30).tolist() == [0, 1]
    assert future.exception() is None

    async def awaited() -> list[object]:
        return [(await monarch_nb.fetch_shard(t)).tolist(), (await monarch_nb.fetch_shard(t).as_asyncio()).tolist()]

    assert asyncio.run(awaited()) == [[0, 1], [0, 1]]
    lost = monarch_nb.fetch_shard(t.index_select(0, torch.tensor(0) + t.long()[:1] + 2))
    assert isinstance(lost.exception(), TensorError)


def test_ranks_may_have_other_shapes_where_they_do_not_exchange(mesh: Mesh, t: Any) -> None:
    rank = mesh.rank_tensor(("hosts", "gpus"))
    counted = monarch_nb.remote(lambda rank: torch.ones(int(rank) + 1))(rank)
    assert counted.shape == (1,)  # that of the first rank
    assert every(counted * 2) == [[2.0] * (number + 1) for number in range(4)]
    assert str(counted) == "tensor([1.])  # on rank 0; ranks 1, 2, 3 differ: monarch.inspect(t, …)"
    with pytest.raises(RankTensorError, match="ranks 1, 2, 3 have another value"):
        counted.tolist()
    with pytest.raises(TensorError, match=r"DifferentShapesError: ranks hold tensors of different shapes"):
        monarch_nb.inspect(counted.reduce("gpus"))
    assert every(t.reduce(("hosts", "gpus"))) == [[60, 64]] * 4
    lie = monarch_nb.remote(lambda x: torch.ones(5), propagate=lambda x: torch.empty(2))(t)
    assert (lie.shape, monarch_nb.inspect(lie + 1).shape) == ((2,), (5,))


def test_arguments_of_remote_functions_are_trees_and_closures(mesh: Mesh, t: Any) -> None:
    factor = 3

    def scaled(tree: dict[str, Any], *, times: list[int]) -> tuple[torch.Tensor, str]:
        return tree["a"][0] * factor * times[0], tree["b"]

    remote = monarch_nb.remote(scaled)
    result, word = remote({"a": [t], "b": "first"}, times=[2])
    assert (every(result)[1], word) == ([60, 66], "first")
    _, word = remote({"a": [t], "b": "second"}, times=[2])  # an argument decides what is cached
    assert word == "second"


def test_a_group_serves_functions_on_a_part_with_equal_groups(mesh: Mesh) -> None:
    def summed(part: torch.Tensor, group: Any) -> torch.Tensor:
        torch.distributed.all_reduce(part, group=group)
        return part

    remote, group = monarch_nb.remote(summed, propagate=lambda part, group: part), mesh.process_group(("gpus",))
    with mesh.slice(hosts=1).activate():
        x: Any = torch.ones(1) * mesh.process_idx()
        assert monarch_nb.inspect(remote(x, group)).tolist() == [5]
    with mesh.slice(gpus=0).activate(), pytest.raises(RankTensorError, match="WRONG_MESH"):
        remote(ones(1), group)
    group.drop()
    assert (group.dropped, group.size()) == (True, 2)


def test_a_group_is_along_several_dimensions_of_a_part() -> None:
    def summed(part: torch.Tensor, group: Any) -> torch.Tensor:
        torch.distributed.all_reduce(part, group=group)
        return part

    procs = this_host().spawn_procs({"gpus": 5})
    with procs.slice(gpus=slice(1, 5)).split(gpus=("dp", "tp"), tp=2).activate() as square:
        remote = monarch_nb.remote(summed, propagate=lambda part, group: part)
        sums = remote(torch.ones(1) * square.process_idx(), square.process_group(("tp", "dp")))
        assert [monarch_nb.inspect(sums, dp=dp, tp=tp).item() for dp in range(2) for tp in range(2)] == [10] * 4
    procs.stop().get(30)


def test_a_wrong_reduction_over_dimensions_raises_at_once(t: Any) -> None:
    for arguments, text in (
        ({"dims": ("gpus", "gpus")}, "the same dimension twice"),
        ({"dims": ("hosts", "gpus"), "reduction": "stack"}, "is not valid for multiple dimensions"),
        ({"dims": ("hosts", "gpus"), "scatter": True}, "is not valid for multiple dimensions"),
    ):
        with pytest.raises(ValueError, match=text):
            t.reduce(**arguments)
    assert every(t.reduce("hosts")) == [[20, 22], [40, 42]] * 2
    assert every(t.reduce("gpus", "stack"))[3] == [[20, 21], [30, 31]]


def test_along_other_dimensions_moved_tensors_are_repeated(procs: ProcMesh, t: Any) -> None:
    assert every(t.slice_mesh(hosts=1).to_mesh(procs)) == [[20, 21], [30, 31]] * 2
    assert every(t.slice_mesh(hosts=1, gpus=0).to_mesh(procs)) == [[20, 21]] * 4
    with pytest.raises(ValueError, match="has a different length, 1"):
        t.to_mesh(procs.slice(gpus=slice(0, 1)))


def test_gradients_are_taken_on_the_stream_of_their_tensors(mesh: Mesh) -> None:
    side = monarch_nb.Stream("other")
    with side.activate(), mesh.activate():
        w = ones(2, requires_grad=True)
        loss = (w * w).sum()
    with pytest.raises(RankTensorError, match="WRONG_STREAM"):
        loss.backward()
    [gradient] = monarch_nb.grad_generator(loss, [w])  # on the stream of each operation
    assert isinstance(gradient, monarch_nb.Tensor)
    assert gradient.stream is side
    with side.activate():
        assert every(gradient) == [[2, 2]] * 4
        assert gradient.mesh is w.mesh


def test_gradients_are_generated_without_a_mesh(mesh: Mesh) -> None:
    with mesh.activate():
        w = torch.ones(2, requires_grad=True)
    with monarch_nb.no_mesh.activate():
        [gradient] = monarch_nb.grad_generator((w * 3).sum(), [w])
        local = torch.ones(2, requires_grad=True)
        [local_gradient] = monarch_nb.grad_generator((local * 3).sum(), [local])
    assert every(gradient) == [[3, 3]] * 4
    assert type(local_gradient) is torch.Tensor


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}, {"capturable": True}, {"amsgrad": True}])
def test_every_kind_of_adam_steps_and_is_restored(mesh: Mesh, options: dict[str, bool]) -> None:
    adam: Any = torch.optim.Adam

    def train() -> tuple[torch.Tensor, torch.optim.Optimizer]:
        w: Any = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
        optimizer = adam([w], lr=0.1, **options)
        for _ in range(3):
            optimizer.zero_grad()
            w.square().sum().backward()
            optimizer.step()
            optimizer.load_state_dict(optimizer.state_dict())
        return w.detach(), optimizer

    with mesh.activate():
        weight, optimizer = train()
    if options.get("capturable"):
        options = {}  # which PyTorch has on GPUs alone
    expected, _ = train()
    torch.testing.assert_close(torch.tensor(every(weight)[3]), expected)
    assert isinstance(next(iter(optimizer.state.values()))["exp_avg"], monarch_nb.Tensor)


class Policy:
    """Learns from samples of its own: each step draws states and actions, and clips advantages."""

    def __init__(self) -> None:
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
        self.optimizer: Any = torch.optim.Adam(self.model.parameters(), lr=1e-2, fused=True)

    def step(self) -> Any:
        """The loss of a step."""
        states = torch.randn(2, 4).repeat_interleave(8, 0)
        with torch.no_grad():
            before = torch.log_softmax(self.model(states), -1)
            actions = torch.multinomial(before.exp(), 1)
        rewards = (-(actions.float() - actions.float().mean()).abs()).view(2, 8)
        advantages = (rewards - rewards.mean(1, keepdim=True)).view(-1, 1)
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        after = torch.log_softmax(self.model(states), -1)
        ratio = (after.gather(1, actions) - before.gather(1, actions)).exp()
        loss: Any = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
        loss = loss + 0.1 * (after.exp() * after).sum(-1).mean()
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.detach()


class Learner(Actor):
    """Has its policy as tensors of a mesh, which is its own process."""

    def __init__(self) -> None:
        self.procs = context().actor_instance.proc_mesh
        with self.procs.activate():
            builtins_random.set_manual_seed_remote(7)
            self.policy = Policy()

    @endpoint
    async def step(self) -> float:
        """The loss of a step."""
        with self.procs.activate():
            loss = self.policy.step()
        return float(await monarch_nb.fetch_shard(loss))


def test_losses_of_a_policy_are_those_of_plain_torch(mesh: Mesh) -> None:
    torch.manual_seed(7)
    policy = Policy()
    expected = [float(policy.step()) for _ in range(5)]
    with mesh.activate():
        builtins_random.set_manual_seed_remote(7)
        policy = Policy()
        losses = [policy.step() for _ in range(5)]
    for point in (POINTS[0], POINTS[3]):
        torch.testing.assert_close([float(loss) for loss in monarch_nb.inspect(losses, point)], expected)
    own = this_host().spawn_procs({"gpus": 1}, name="learner")
    learner = own.spawn("learner", Learner)
    torch.testing.assert_close([learner.step.call_one().get(60) for _ in range(5)], expected)
    own.stop().get(30)


def test_ranks_compute_deterministically_where_they_are_told_to(mesh: Mesh) -> None:
    reset = monarch_nb.remote("torch.use_deterministic_algorithms", propagate="inspect")
    with mesh.activate():
        generators.make_deterministic()
        reply = monarch_nb.remote(torch.are_deterministic_algorithms_enabled).call()
        reset(False)
    assert reply.get(30).values() == [True] * 4
    assert not torch.are_deterministic_algorithms_enabled()


def test_the_end_of_a_program_raises_what_nobody_fetched(mesh: Mesh, t: Any) -> None:
    mesh.client.shutdown()
    t.index_select(0, t.long()[:1] + 5)
    with pytest.raises(TensorError, match="index_select"):
        mesh.client.shutdown()
    side = monarch_nb.Stream("other")
    with side.activate(), mesh.activate():
        torch.ones(1).index_select(0, torch.tensor([3]))
    with pytest.raises(TensorError, match="index_select"):
        mesh.client.shutdown()


@pytest.fixture
def alone() -> Iterator[Mesh]:
    mesh = Mesh(shape=(1,), mesh_dim_names=("gpus",))
    mesh.stream.synchronise()
    yield mesh
    mesh.stop().get(30)


def test_a_batch_that_fails_whole_is_raised_at_the_next_use(alone: Mesh) -> None:
    broken: Future[Any] = pending_future()
    resolve_later(broken, lambda: 1 / 0)  # resolved by its first reader
    alone.stream._batches.append(CommandBatch(-1, alone.stream._issued, [], 0, broken))
    alone.stream.tick()  # on a thread that flushes other streams, too
    with pytest.raises(ZeroDivisionError):
        alone.stream.synchronise()


def test_an_error_behind_a_batch_without_operations_is_raised_once(alone: Mesh) -> None:
    late: Future[Any] = pending_future()
    alone.stream._batches.append(CommandBatch(-1, alone.stream._issued, [], 0, late))  # which has freed tensors
    threading.Timer(0.5, resolve_future, (late, ValueMesh(Extent(("gpus",), (1,)), [([], [], -1)]))).start()
    with pytest.raises(TensorError, match="division by zero"):
        alone.execute(lambda: 1 / 0)
    alone.stream.synchronise()


class Pid(Actor):
    @endpoint
    def pid(self) -> int:
        return os.getpid()


def test_a_testing_context_has_meshes_of_local_hosts_and_ends_them() -> None:
    with TestingContext() as testing:
        with testing.local_device_mesh(2, 1) as mesh:
            assert mesh.names == ("host", "gpu")
            assert monarch_nb.fetch_shard(mesh.rank("host") + 1, host=1, gpu=0).result(30).item() == 2
            pids = [pid for _, pid in mesh.procs.spawn("pids", Pid).pid.call().get(30).items()]
        with testing.local_device_mesh(2, 1, activate=False) as reused:
            assert reused.procs == mesh.procs
        with pytest.raises(ZeroDivisionError), testing.local_device_mesh(2, 1):
            raise ZeroDivisionError
    until(lambda: not any(map(alive, pids)), "its processes have ended")
