"""Tensors of which each rank has a value of its own, on two real processes."""

import copy
import gc
import importlib
import io
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.distributed.tensor import Partial

import monarch_nb
from monarch_nb.actor import Actor, ProcMesh, SupervisionError, endpoint, this_host
from monarch_nb.distributed import ContentsLostError, MeshTensor, RankTensorError, TensorError
from tests.cluster.actor_tools import spawned
from tests.polling import until

pytestmark = pytest.mark.timeout(120)
generators: Any = importlib.import_module("monarch.random")


@pytest.fixture(scope="module")
def procs() -> Iterator[ProcMesh]:
    yield from spawned(2, "ranks")


@pytest.fixture
def rank(procs: ProcMesh) -> monarch_nb.Tensor:
    """0 on rank 0, 1 on rank 1."""
    return procs.rank_tensor("gpus")


def both(tensor: object) -> list[object]:
    """The value of each rank, as lists."""
    return [monarch_nb.inspect(tensor, gpus=rank).tolist() for rank in range(2)]


MAKERS: list[tuple[str, Callable[[], torch.Tensor]]] = [
    ("tensor", lambda: torch.tensor([1.0, 2.0])),
    ("scalar", lambda: torch.tensor(3)),
    ("as_tensor", lambda: torch.as_tensor([1, 2])),
    ("from_numpy", lambda: torch.from_numpy(numpy.arange(3))),
    ("arange", lambda: torch.arange(4)),
    ("eye", lambda: torch.eye(2)),
    ("full", lambda: torch.full((2,), 3.0)),
    ("empty_device", lambda: torch.zeros(2, device="cpu")),
    ("linspace", lambda: torch.linspace(0, 1, 3)),
    ("legacy", lambda: torch.FloatTensor([1, 2])),
]


@pytest.mark.parametrize("name", [name for name, _ in MAKERS])
def test_all_that_makes_tensors_makes_them_on_each_rank(procs: ProcMesh, name: str) -> None:
    make = dict(MAKERS)[name]
    with procs.activate():
        tensor = make()
    expected = make()
    assert isinstance(tensor, monarch_nb.Tensor)
    assert (tensor.shape, tensor.dtype) == (expected.shape, expected.dtype)
    assert both(tensor) == [expected.tolist()] * 2


def test_ranks_draw_different_numbers_and_the_same_after_a_seed(procs: ProcMesh) -> None:
    with procs.activate():
        torch.manual_seed(5)
        first = both(torch.rand(3))
        dropped = both(torch.nn.functional.dropout(torch.ones(64)))
        generated = torch.randn(2, generator=torch.Generator())
        torch.manual_seed(5)
        again = both(torch.rand(3))
    assert first == again
    assert first[0] != first[1]
    assert dropped[0] != dropped[1]
    assert generated.shape == (2,)


DRAWS: list[tuple[str, Callable[[], torch.Tensor]]] = [
    ("randint", lambda: torch.randint(1000, (5,))),
    ("randperm", lambda: torch.randperm(50)),
    ("normal", lambda: torch.normal(0.0, 1.0, (3,))),
    ("generator", lambda: torch.randn(3, generator=torch.Generator().manual_seed(1))),
    ("in_place", lambda: torch.empty(3).uniform_(generator=torch.Generator().manual_seed(1))),
    ("multinomial", lambda: torch.multinomial(torch.ones(99), 5)),
    ("bernoulli", lambda: torch.bernoulli(torch.full((64,), 0.5), generator=torch.Generator().manual_seed(1))),
]


@pytest.mark.parametrize("name", [name for name, _ in DRAWS])
def test_ranks_draw_numbers_of_their_own_by_every_operation(procs: ProcMesh, name: str) -> None:
    draw = dict(DRAWS)[name]
    with procs.activate():
        torch.manual_seed(5)
        first = both(draw())
        following = both(draw())
        torch.manual_seed(5)
        assert both(draw()) == first
        torch.manual_seed(6)
        third = both(draw())
    assert first[0] != first[1]
    is_seeded = name in ("generator", "in_place", "bernoulli")  # a generator with a seed of its own
    assert [following == first, third == first] == [is_seeded, is_seeded]


def test_a_write_to_memory_that_it_reads_leaves_the_seed(procs: ProcMesh) -> None:
    with procs.activate():
        torch.manual_seed(5)
        first, second = both(torch.rand(2)), both(torch.rand(2))
        torch.manual_seed(5)
        x = torch.arange(4.0)
        assert both(torch.rand(2)) == first
        with pytest.raises(RuntimeError, match="refer to a single memory location"):
            x[1:].copy_(x[:-1])
        assert both(torch.rand(2)) == second


def test_operations_views_and_writes_are_those_of_each_rank(procs: ProcMesh, rank: monarch_nb.Tensor) -> None:
    with procs.activate():
        t = torch.arange(6.0).reshape(2, 3) + 10 * rank
    t[0] = rank.float()
    column = t[:, 1]
    column += 1
    t[1, 2] = 7.5
    expected = []
    for number in range(2):
        local = torch.arange(6.0).reshape(2, 3) + 10 * number
        local[0] = float(number)
        local[:, 1] += 1
        local[1, 2] = 7.5
        expected.append(local.tolist())
    assert both(t) == expected
    assert (t.device.type, len(t), t.stride()) == ("mesh", 2, (3, 1))
    assert t.cpu() is t
    assert isinstance(t.to("cpu", torch.float64), monarch_nb.Tensor)
    assert [piece.shape for piece in t] == [(3,), (3,)]
    assert both(torch.where(t > 5, t, 0.0).sum()) == [
        float(sum(x for row in rows for x in row if x > 5)) for rows in expected
    ]


def test_models_train_with_each_ranks_own_gradients(procs: ProcMesh, rank: monarch_nb.Tensor) -> None:
    def train(make: Callable[..., torch.optim.Optimizer], x: torch.Tensor) -> list[torch.Tensor]:
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.GELU(), torch.nn.Linear(4, 1))
        for index, parameter in enumerate(model.parameters()):
            torch.nn.init.constant_(parameter, 0.1 * (index + 1))
        optimizer = make(model.parameters(), lr=0.05)
        for _ in range(3):
            optimizer.zero_grad()
            loss = (model(x) - 1).square().mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        return [parameter.detach() for parameter in model.parameters()]

    adam = torch.optim.Adam
    for make in (torch.optim.SGD, adam, lambda parameters, lr: adam(parameters, lr, fused=True)):
        with procs.activate():
            remote = train(make, torch.arange(6.0).reshape(2, 3) / 6 + rank)
        for number in range(2):
            local = train(make, torch.arange(6.0).reshape(2, 3) / 6 + number)
            for expected, result in zip(local, monarch_nb.inspect(remote, gpus=number), strict=True):
                torch.testing.assert_close(result, expected)


def test_trees_are_fetched_from_the_rank_at_coordinates(procs: ProcMesh, rank: monarch_nb.Tensor) -> None:
    tree = {"a": rank + 1, "b": [rank * 2, "text"]}
    future = monarch_nb.fetch_shard(tree, gpus=1)
    assert future.get(30) == {"a": torch.tensor(2), "b": [torch.tensor(2), "text"]}
    assert future.result(30) is future.get()
    assert monarch_nb.inspect(tree, {"gpus": 0}) == {"a": torch.tensor(1), "b": [torch.tensor(0), "text"]}
    assert monarch_nb.inspect(rank) == torch.tensor(0)
    with procs.activate():
        assert monarch_nb.fetch_shard(None).get(30) is None


def test_wrong_coordinates_raise_at_once(rank: monarch_nb.Tensor) -> None:
    with pytest.raises(IndexError, match="gpus=2 is out of range"):
        monarch_nb.fetch_shard(rank, gpus=2)
    with pytest.raises(IndexError):
        monarch_nb.fetch_shard(rank, gpus=-1)
    with pytest.raises(KeyError, match="no dimension 'hosts'"):
        monarch_nb.fetch_shard(rank, hosts=0)
    with pytest.raises(KeyError, match="no dimension 'x'"):
        rank.mesh.rank_tensor("x")


def test_one_value_is_read_where_all_ranks_have_it(procs: ProcMesh, rank: monarch_nb.Tensor) -> None:
    with procs.activate():
        t = torch.full((2,), 1.5)
    assert t.sum().item() == 3.0
    assert float(t[0]) == 1.5
    assert bool((t > 1).all())
    assert f"{t.sum():.2f}" == "3.00"
    assert t.tolist() == [1.5, 1.5]
    assert "on each of 2 ranks" in str(t)
    with pytest.raises(
        RankTensorError, match=r"rank 1 has another value than rank 0 \(rank 0 has 0, rank 1 1\)"
    ) as caught:
        rank.item()
    assert "monarch.inspect(t, gpus=1)" in str(caught.value)
    assert "rank 1 differs" in str(rank)


def test_operators_name_the_local_operand(rank: monarch_nb.Tensor) -> None:
    local = torch.ones(3)
    for operate in (lambda: rank + local, lambda: local + rank, lambda: rank.add(local), lambda: local.add_(rank)):
        with pytest.raises(RankTensorError, match="is a local tensor") as caught:
            operate()
        assert caught.value.code == "LOCAL_TENSOR"
    assert both(rank + torch.tensor(2)) == [2, 3]  # a number


def test_a_dropped_tensor_cannot_be_used(rank: monarch_nb.Tensor) -> None:
    t = rank + 1
    assert not t.dropped
    t.drop()
    assert t.dropped
    assert "dropped" in repr(t)
    for operate in (lambda: t + 1, lambda: monarch_nb.inspect(t)):
        with pytest.raises(RankTensorError, match=r"test_tensor_ranks.py:\d+") as caught:
            operate()
        assert caught.value.code == "DROPPED"


def test_no_mesh_makes_local_tensors_in_an_active_mesh(procs: ProcMesh) -> None:
    with pytest.raises(ValueError, match="no device mesh is active"):
        monarch_nb.get_active_mesh()
    with procs.activate() as mesh:
        assert monarch_nb.get_active_mesh() is mesh
        with monarch_nb.no_mesh.activate():
            assert type(torch.ones(2) + 1) is torch.Tensor
        assert isinstance(torch.ones(2), monarch_nb.Tensor)
    assert type(torch.ones(2)) is torch.Tensor


def test_slices_have_tensors_of_their_own(procs: ProcMesh, rank: monarch_nb.Tensor) -> None:
    part = procs.slice(gpus=1)
    with part.activate() as mesh:
        t = torch.ones(2)
    assert t.mesh is mesh
    assert mesh.sizes == {"rank": 1} or mesh.sizes == {}
    assert monarch_nb.inspect(t).tolist() == [1, 1]
    with pytest.raises(RankTensorError) as caught:
        t + rank
    assert caught.value.code == "WRONG_MESH"


def test_each_fetch_that_depends_on_a_failure_raises_it(rank: monarch_nb.Tensor) -> None:
    fine = rank + 1
    wrong = torch.stack([rank, rank]).index_select(0, rank * 5)  # rank 1 has no element 5
    after = wrong * 2
    target = rank.clone()
    target += after[0]
    for tree in (wrong, after, [fine, after], target):
        for gpu in range(2):  # first all ranks are right
            with pytest.raises(
                TensorError, match=r"index_select.default failed on rank 1 of ranks: (?s:.)*test_tensor_ranks"
            ):
                monarch_nb.inspect(tree, gpus=gpu)
    assert both(fine) == [1, 2]
    assert both(fine * 2) == [2, 4]


def test_copies_are_made_on_the_ranks_and_nothing_is_pickled(rank: monarch_nb.Tensor) -> None:
    copied = copy.deepcopy(rank)
    rank += 5
    assert both(copied) == [0, 1]
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(rank)
    with pytest.raises(TypeError, match="cannot be pickled"):
        torch.save(rank, io.BytesIO())


def test_shapes_are_checked_when_operations_are_issued(procs: ProcMesh) -> None:
    with procs.activate():
        a, b = torch.ones(2, 3), torch.ones(2, 3)
        with torch.inference_mode():
            assert a[1:].mean().item() == torch.ones(3).mean().item() == 1
    with pytest.raises(RuntimeError, match="reduction dim"):
        a @ b
    with pytest.raises(RuntimeError, match="depends on values"):
        a[a > 0]


def test_a_failure_that_nobody_fetches_is_reported(rank: monarch_nb.Tensor, caplog: pytest.LogCaptureFixture) -> None:
    torch.stack([rank, rank]).index_select(0, rank * 7)
    failed = "index_select.default failed on rank 1"  # failures of earlier programs may be reported now, too
    until(lambda: any(failed in line and "Nobody has fetched" in line for line in caplog.messages))
    assert "test_tensor_ranks.py" in next(line for line in caplog.messages if failed in line)


def test_values_are_reduced_gathered_and_scattered_by_name(procs: ProcMesh, rank: monarch_nb.Tensor) -> None:
    with procs.activate():
        t = torch.arange(4.0).reshape(2, 2) + 10 * rank
        ids = torch.tensor([1, 2]) + rank
        flags = torch.tensor([True, False])
    a, b = (torch.arange(4.0).reshape(2, 2) + 10 * number for number in range(2))
    results = {"sum": a + b, "avg": (a + b) / 2, "product": a * b, "min": a, "max": b, "stack": torch.stack([a, b])}
    for kind, expected in results.items():
        assert both(t.reduce("gpus", kind)) == [expected.tolist()] * 2
    assert both(t.reduce((), "sum")) == both(t.reduce("", "sum")) == [(a + b).tolist()] * 2
    assert both(t.reduce("gpus", scatter=True)) == [(a + b)[0].tolist(), (a + b)[1].tolist()]
    moved = t.reduce("gpus", "stack", scatter=True)  # all to all
    assert both(moved) == [[a[0].tolist(), b[0].tolist()], [a[1].tolist(), b[1].tolist()]]
    bits = {"band": [0, 2], "bor": [3, 3], "bxor": [3, 1]}
    for kind, expected_bits in bits.items():
        assert both(ids.reduce("gpus", kind)) == [expected_bits] * 2
    assert both((flags & (rank == 0)).reduce("gpus", "max")) == [[True, False]] * 2
    out = torch.empty_like(t)
    assert t.reduce("gpus", out=out) is out
    assert both(out) == [(a + b).tolist()] * 2
    target = t.clone()
    assert target.reduce_("gpus") is target
    tree = monarch_nb.reduce({"a": t, "b": [rank]}, "gpus", "max")
    assert both(tree["a"]) == [b.tolist()] * 2
    assert both(tree["b"][0]) == [1, 1]
    assert both(monarch_nb.reduce_([target], "gpus", "min")[0]) == [(a + b).tolist()] * 2


def test_a_wrong_reduction_raises_at_once(rank: monarch_nb.Tensor) -> None:
    vector = torch.stack([rank, rank, rank]).float()
    with pytest.raises(KeyError, match="not found"):
        rank.reduce("hosts")
    with pytest.raises(TypeError, match="When scattering"):
        vector.reduce("gpus", scatter=True)
    with pytest.raises(ValueError, match="none of stack"):
        rank.reduce("gpus", "median")
    with pytest.raises(ValueError, match="not valid in place"):
        rank.reduce_("gpus", "stack")
    with pytest.raises(ValueError, match=r"Reduce expects the shape to be torch\.Size"):
        rank.reduce("gpus", out=vector)
    with pytest.raises(NotImplementedError):
        rank.reduce("gpus", mesh=rank.mesh)
    with pytest.raises(TypeError, match="REQUIRES_GRAD"):
        vector.requires_grad_().reduce("gpus")


def test_ranks_that_cannot_exchange_say_so_and_go_on(procs: ProcMesh, rank: monarch_nb.Tensor) -> None:
    lost = torch.stack([rank, rank]).index_select(0, rank * 5)
    for result in (lost.reduce("gpus"), lost.to_mesh(procs), lost.slice_mesh(gpus=1).to_mesh(procs)):
        with pytest.raises(TensorError, match=r"select.default failed on rank 1(?s:.)*index_select"):
            monarch_nb.inspect(result, gpus=0)
    assert both(lost.slice_mesh(gpus=0).to_mesh(procs)) == [[0], [0]]  # the value of rank 0 is right
    assert both(rank.reduce("gpus")) == [1, 1]


def test_tensors_move_between_meshes_of_all_processes(procs: ProcMesh, rank: monarch_nb.Tensor) -> None:
    first, second = procs.slice(gpus=0), procs.slice(gpus=1)
    moved = rank.slice_mesh(gpus=1).to_mesh(first)
    assert monarch_nb.inspect(moved) == torch.tensor(1)
    stages = monarch_nb.to_mesh([moved + 1, moved], second)
    assert [int(stage) for stage in monarch_nb.inspect(stages)] == [2, 1]
    assert both(stages[0].to_mesh(procs)) == [2, 2]
    rank += 5
    assert monarch_nb.inspect(moved) == torch.tensor(1)  # a copy
    with pytest.raises(ValueError, match="does not have dimensions"):
        rank.to_mesh(first)
    for other_procs in spawned(2, "others"):
        away = rank.to_mesh(other_procs)
        assert both(away + away.mesh.rank_tensor("gpus")) == [5, 7]
        part = monarch_nb.slice_mesh({"a": rank}, gpus=0)
        assert both(monarch_nb.to_mesh(part, other_procs)["a"]) == [5, 5]


def test_the_two_views_share_memory(procs: ProcMesh, rank: monarch_nb.Tensor) -> None:
    with procs.activate() as mesh:
        t = torch.ones(2, 3) * (rank + 1)
    sharded = t.as_sharded(["gpus", None])
    assert (type(sharded), tuple(sharded.shape)) == (MeshTensor, (4, 3))
    assert sharded.full_tensor().tolist() == [[1] * 3] * 2 + [[2] * 3] * 2
    assert t.as_sharded([Partial()]).full_tensor().tolist() == [[3] * 3] * 2
    sharded *= 7
    assert both(t)[0][0] == [7, 7, 7]
    parts = monarch_nb.distribute(torch.arange(4.0), mesh, ["gpus"]).per_rank()
    assert both(parts * 10) == [[0, 10], [20, 30]]
    with pytest.raises(ValueError, match="different shapes"):
        monarch_nb.distribute(torch.arange(3.0), mesh, ["gpus"]).per_rank()
    with pytest.raises(RuntimeError, match="per_rank"):
        t + mesh.ones(2, 3, sharding_spec=["gpus", None])
    lost = t.index_select(0, rank * 5).as_sharded(["gpus", None])
    with pytest.raises(TensorError, match="failed on rank 1"):
        (lost + 1).full_tensor()
    assert both(rank) == [0, 1]


def counted(folder: Path, x: torch.Tensor, times: int = 2) -> dict[str, object]:
    """Notes that it was called, changes its argument and returns a view, a new tensor and a number."""
    with (folder / str(os.getpid())).open("a") as calls:
        calls.write("x")
    x += 1
    return {"view": x[1:], "new": x * times, "number": 7}


def test_a_remote_function_runs_once_on_each_rank(tmp_path: Path, procs: ProcMesh, rank: monarch_nb.Tensor) -> None:
    remote = monarch_nb.remote(counted)
    for calls in range(1, 4):
        with procs.activate():
            t = torch.zeros(3) + rank
        result = remote(tmp_path, t)
        assert result["number"] == 7
        assert both(result["new"]) == [[2.0] * 3, [4.0] * 3]
        result["view"].zero_()  # shows the memory of the argument
        assert both(t) == [[1, 0, 0], [2, 0, 0]]
        assert [len(file.read_text()) for file in tmp_path.iterdir()] == [calls] * 2
    assert both(remote(tmp_path, t, times=3)["new"]) == [[6, 3, 3], [9, 3, 3]]  # another argument


def test_shapes_of_a_remote_function_are_given_by_propagate(rank: monarch_nb.Tensor) -> None:
    @monarch_nb.remote(propagate=lambda x: x.add_(1))
    def increased(x: torch.Tensor) -> torch.Tensor:
        return x.add_(1)

    t = rank.clone()
    result = increased(t)
    result *= 10
    assert both(t) == [10, 20]
    assert monarch_nb.remote(torch.Tensor.zero_, propagate="inspect")(t) is None
    assert both(t) == [0, 0]
    wrong = monarch_nb.remote(lambda x: (x, x), propagate=lambda x: x.clone())(rank)
    with pytest.raises(TensorError, match="unexpected number of returns from op, expected 1, got 2"):
        monarch_nb.inspect(wrong)
    with pytest.raises(NotImplementedError):
        monarch_nb.remote(len, propagate="mocked")(rank)
    with pytest.raises(ValueError, match="propagate='x'"):
        monarch_nb.remote(len, propagate="x")


def test_what_remote_functions_return_is_fetched_by_adverbs(procs: ProcMesh, rank: monarch_nb.Tensor) -> None:
    double = monarch_nb.remote(lambda x, y=1: (x * 2 + y, "text"))
    assert double.call(rank, y=5).get(30).values() == [(torch.tensor(5), "text"), (torch.tensor(7), "text")]
    assert [future.get(30)[0] for future in double.stream(rank)] == [1, 3]
    assert double.choose(rank).get(30)[0] in (1, 3)
    assert monarch_nb.call_on_shard_and_fetch(double, rank, shard={"gpus": 1}).get(30) == (torch.tensor(3), "text")
    assert double.broadcast(rank) is None
    with pytest.raises(ValueError, match="exactly one"):
        double.call_one(rank)
    with procs.slice(gpus=1).activate() as mesh:
        assert double.call_one(mesh.rank_tensor("rank")).get(30)[0] == 1
        assert monarch_nb.remote("os.getpid").call_one().get(30) > 0
    with pytest.raises(ValueError, match="require an active device mesh"):
        monarch_nb.remote("os.getpid").call()
    with pytest.raises(RankTensorError, match="LOCAL_TENSOR"):
        double(torch.ones(2))


def failing(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Fails on rank 1, after a write."""
    target += 1
    if x:
        raise ValueError("not here")
    return x + target


def test_a_remote_function_that_fails_is_any_failure(rank: monarch_nb.Tensor) -> None:
    target = rank.clone()
    remote = monarch_nb.remote(failing, propagate=lambda x, target: x + target.add_(1))
    result = remote(rank, target) * 2
    for tensor in (result, target):
        with pytest.raises(TensorError, match=r"failing failed on rank 1 of ranks: ValueError: not here"):
            monarch_nb.inspect(tensor, gpus=0)
    for call in (lambda: monarch_nb.remote(failing)(rank, target.clone()), lambda: remote.call(rank, target).get(30)):
        with pytest.raises(TensorError, match="failing failed on rank 1") as caught:
            call()
        assert ", in failing\n" in caught.value.exception_formatted
    assert both(rank) == [0, 1]


def test_a_remote_function_that_resizes_its_argument_is_refused(rank: monarch_nb.Tensor) -> None:
    resize = monarch_nb.remote(lambda x: x.resize_(99).sum(), propagate=lambda x: x.sum())
    target = rank.clone()
    for call in (lambda: monarch_nb.inspect(resize(target)), lambda: resize.call(target).get(30)):
        with pytest.raises(TensorError, match=r"has changed the size of a tensor from \[\] to \[99\]"):
            call()


def test_a_remote_function_gets_process_groups(rank: monarch_nb.Tensor) -> None:
    def summed(x: torch.Tensor, group: torch.distributed.ProcessGroup) -> torch.Tensor:
        x = x.clone()
        torch.distributed.all_reduce(x, group=group)
        return x

    remote = monarch_nb.remote(summed, propagate=lambda x, group: x.clone())
    group = rank.mesh.process_group("gpus")
    assert group.size() == 2
    assert both(remote(rank, group)) == [1, 1]


class Owner(Actor):
    """Has tensors of its own, on processes of its own."""

    @endpoint
    async def summed(self, times: int) -> list[torch.Tensor]:
        """Makes tensors on a mesh, `times` over."""
        procs = this_host().spawn_procs({"gpus": 2})
        totals = []
        for _ in range(times):
            with procs.activate():
                logits = torch.ones(3) + procs.rank_tensor("gpus")
                assert torch.multinomial(torch.softmax(logits, 0), 2).shape == (2,)
                total = logits.reduce("gpus")
            totals.append(await monarch_nb.fetch_shard(total, gpus=1))
        await procs.stop()
        return totals

    @endpoint
    async def plain(self) -> torch.Tensor:
        """A tensor of this process."""
        return torch.arange(3)


def test_actors_activate_meshes_and_their_answers_stay_local(procs: ProcMesh) -> None:
    for other_procs in spawned(1, "owners"):
        owner = other_procs.spawn("owner", Owner)
        assert [total.tolist() for total in owner.summed.call_one(2).get(60)] == [[3, 3, 3]] * 2
        with procs.activate():
            assert [total.tolist() for total in owner.summed.call_one(1).get(60)] == [[3, 3, 3]]
            answer = owner.plain.call_one().get(60)
            assert type(answer) is torch.Tensor
            assert (answer + 1).tolist() == [1, 2, 3]


def test_streams_that_are_no_more_leave_room_for_others(procs: ProcMesh, rank: monarch_nb.Tensor) -> None:
    for _ in range(140):  # more than there can be at once
        monarch_nb.Stream("one of many").borrow(rank)[1].drop()
    assert both(rank) == [0, 1]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_streams_exchange_values_by_the_same_groups(procs: ProcMesh) -> None:
    threads = monarch_nb.remote(lambda: len(os.listdir("/proc/self/task")))
    with procs.slice(gpus=slice(0, 1)).activate():
        values: Any = torch.ones(2)

    def reduced(stream: monarch_nb.Stream) -> int:
        borrowed, borrow = stream.borrow(values)
        with borrow, borrowed.stream.activate():
            assert borrowed.reduce("gpus").tolist() == [1, 1]
        with procs.slice(gpus=slice(0, 1)).activate():
            count: int = threads.call_one().get()
        return count

    streams = [monarch_nb.Stream("another") for _ in range(13)]  # which have eight threads
    *_, before, _, _, _, last = map(reduced, streams)
    assert last - before < 2  # each group has threads of its own


def test_a_reduction_is_the_first_thing_that_a_stream_does(procs: ProcMesh) -> None:
    with procs.activate() as mesh, monarch_nb.Stream("first").activate():
        assert mesh.rank_tensor("gpus").reduce("gpus").tolist() == 1


def test_gradients_pass_through_exchanges_by_functions(procs: ProcMesh, rank: monarch_nb.Tensor) -> None:
    def summed(x: torch.Tensor) -> tuple[torch.Tensor, Callable[..., torch.Tensor]]:
        return x.reduce("gpus"), lambda gradient: gradient.reduce("gpus")

    with procs.activate():
        x = (torch.ones(2) + rank).requires_grad_()
        w = torch.ones(2, requires_grad=True)
        unused = torch.ones(1, requires_grad=True)
    loss = (monarch_nb.grad_function(summed)(x * w) * (rank + 1)).sum()
    gradients = list(monarch_nb.grad_generator(loss, [w, unused, x]))
    assert both(gradients[0]) == [[3, 3], [6, 6]]
    assert gradients[1] is None
    assert both(gradients[2]) == [[3, 3], [3, 3]]
    assert both(w) == [[1, 1]] * 2


def test_tensors_survive_a_failed_collective_of_another_view(procs: ProcMesh, rank: monarch_nb.Tensor) -> None:
    values = rank + 1
    mesh = rank.mesh

    def wrong(part: torch.Tensor) -> None:
        if torch.distributed.get_rank() == 1:
            raise ValueError("only here")
        torch.distributed.barrier()

    with pytest.raises(TensorError, match="only here"):
        mesh.execute(wrong, values)
    assert both(values * 2) == [2, 4]
    assert both(values.reduce("gpus")) == [3, 3]


def code_of(use: Callable[[], object]) -> str:
    """The code of the error that a use raises."""
    with pytest.raises(RankTensorError, match=r"test_tensor_ranks\.py:\d+|stream") as caught:
        use()
    return caught.value.code


def test_tensors_are_used_on_their_stream_alone(procs: ProcMesh, rank: monarch_nb.Tensor) -> None:
    side = monarch_nb.Stream("other")
    assert monarch_nb.get_active_stream().name == "main"
    with side.activate(), procs.activate():
        assert monarch_nb.get_active_stream() is side
        t = torch.ones(2) + rank.mesh.rank_tensor("gpus")
        assert t.stream is side
        assert t.mesh is rank.mesh
        assert both(t) == [[1, 1], [2, 2]]
        assert both(t.reduce("gpus")) == [[3, 3]] * 2
        assert code_of(lambda: rank + 1) == "WRONG_STREAM"
        assert monarch_nb.remote(torch.Tensor.sum)(t).stream is side
    for use in (lambda: t + 1, lambda: monarch_nb.inspect(t), lambda: t + rank, lambda: monarch_nb.remote(len).call(t)):
        assert code_of(use) == "WRONG_STREAM"


def test_streams_borrow_memory_from_each_other(procs: ProcMesh, rank: monarch_nb.Tensor) -> None:
    side = monarch_nb.Stream("other")
    lent, borrow = side.borrow(rank)
    again, second = side.borrow(rank)
    with side.activate():
        assert both(lent + again) == [0, 2]
        assert code_of(lambda: lent.add_(1)) == "MUTATING_BORROW"
    assert both(rank + 0) == [0, 1]
    assert code_of(lambda: rank.add_(1)) == "MUTATING_BORROW"
    assert code_of(lambda: side.borrow(rank, mutable=True)) == "MUTATING_BORROW"
    second.drop()
    borrow.drop()
    with side.activate():
        assert code_of(lambda: lent + 1) == "DROPPED"
    written, borrow = side.borrow(rank, mutable=True)
    with borrow:
        with side.activate():
            part = written.view(1)
            part += 5
        for use in (lambda: rank + 1, lambda: rank.add_(1), lambda: monarch_nb.inspect(rank)):
            assert code_of(use) == "BORROWED"
    assert both(rank) == [5, 6]
    with side.activate():
        assert code_of(lambda: part + 1) == "DROPPED"
    with pytest.warns(UserWarning, match="a borrow was not dropped"):
        lent = side.borrow(rank)[0]
    rank += 1
    assert both(rank) == [6, 7]


@pytest.mark.filterwarnings("ignore:a borrow was not dropped")
def test_a_collection_on_another_thread_waits_for_no_stream(procs: ProcMesh, rank: monarch_nb.Tensor) -> None:
    lent, borrow = monarch_nb.Stream("forgotten").borrow(rank)
    stream, cycle = lent.reference.stream, [borrow]  # type: ignore[attr-defined]
    cycle.append(cycle)
    del borrow, cycle
    thread = threading.Thread(target=gc.collect)
    with stream._lock:  # as while a batch waits for the reading thread
        thread.start()
        thread.join(20)
        assert not thread.is_alive()
    until(lambda: not rank.reference.memory.loans.lent, "it is given back")  # type: ignore[attr-defined]


def test_what_a_borrower_loses_is_lost_to_the_lender(procs: ProcMesh, rank: monarch_nb.Tensor) -> None:
    target, side = rank.clone(), monarch_nb.Stream("losing")
    lent, borrow = side.borrow(target, mutable=True)
    with borrow, side.activate():
        remote = monarch_nb.remote(failing, propagate=lambda x, target: x + target.add_(1))
        remote(rank.mesh.rank_tensor("gpus"), lent)
        lent.reduce_("gpus")  # rank 0 would have a sum of the half of it
    for number in range(2):
        with pytest.raises(TensorError, match="failing failed on rank 1"):
            monarch_nb.inspect(target.slice_mesh(gpus=number).to_mesh(procs.slice(gpus=number)))


def test_compiled_steps_run_on_each_ranks_values(procs: ProcMesh, rank: monarch_nb.Tensor) -> None:
    @monarch_nb.compile
    def step(x: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x * 0.5 + 1
        return x, torch.stack([x, x]).index_select(0, index)

    @monarch_nb.compile
    def exchanged(x: torch.Tensor) -> torch.Tensor:
        return (x + 1).reduce("gpus")

    with procs.activate():
        x = torch.ones(2) * rank
    expected = [0.0, 1.0]
    for _ in range(6):
        x, _ = step(x, rank)
        expected = [0.5 * value + 1 for value in expected]
    assert step.calls > 0
    assert both(x) == [[value] * 2 for value in expected]
    fine, lost = step(x, rank * 5)
    with pytest.raises(TensorError, match=r"select.default failed on rank 1"):
        monarch_nb.inspect(lost, gpus=0)
    assert both(fine) == [[0.5 * value + 1] * 2 for value in expected]
    with pytest.warns(UserWarning, match="ranks exchange values of their own"):
        results = [exchanged(rank) for _ in range(4)]
    assert both(results[-1]) == [3, 3]


def test_a_lost_rank_loses_its_values_and_a_healed_mesh_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monarch_nb.actor, "unhandled_fault_hook", lambda failure: None)

    def use(tensor: monarch_nb.Tensor) -> None:
        for _ in range(1000):  # a process that was killed may answer once more
            monarch_nb.inspect(tensor + 1)

    for procs in spawned(2, "mortal"):
        t = procs.rank_tensor("gpus") + 1
        assert both(t) == [1, 2]
        os.kill(procs.run(os.getpid).get(30).values()[1], signal.SIGKILL)
        with pytest.raises((ContentsLostError, SupervisionError)):
            use(t)
        monarch_nb.heal_mesh(procs)
        with pytest.raises(ContentsLostError, match="are gone, since the mesh was healed"):
            monarch_nb.inspect(t)
        assert both(procs.rank_tensor("gpus").reduce("gpus")) == [1, 1]


def test_generators_of_ranks_survive_heals_and_seeds_of_lost_meshes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monarch_nb.actor, "unhandled_fault_hook", lambda failure: None)
    for procs in spawned(2, "drawing"):
        for _ in range(2):
            with procs.activate():
                generators.set_manual_seed_remote(7)
                t = torch.rand(2)
            drawn = both(t)
            assert drawn[0] == drawn[1] == torch.rand(2, generator=torch.Generator().manual_seed(7)).tolist()
            os.kill(procs.run(os.getpid).get(30).values()[1], signal.SIGKILL)
            until(lambda t=t: t.reference.stream.lost is not None)
            torch.manual_seed(3)
            monarch_nb.heal_mesh(procs)
