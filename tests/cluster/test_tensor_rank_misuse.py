"""Odd and wrong uses of values of ranks' own, on two processes: they are right, or their error names the remedy."""

import asyncio
import copy
import operator
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch

import monarch_nb
from monarch_nb.actor import ProcMesh
from monarch_nb.distributed import RankTensorError, TensorError
from tests.cluster.actor_tools import spawned
from tests.polling import until

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def procs() -> Iterator[ProcMesh]:
    yield from spawned(2, "misused")


@pytest.fixture
def rank(procs: ProcMesh) -> Any:
    """0 on rank 0, 1 on rank 1."""
    return procs.rank_tensor("gpus")


@pytest.fixture
def t(rank: Any) -> Any:
    """[1, 1] on rank 0, [2, 2] on rank 1."""
    return torch.stack([rank, rank]) + 1.0


def both(tensor: object) -> list[object]:
    """The value of each rank, as lists."""
    return [monarch_nb.inspect(tensor, gpus=rank).tolist() for rank in range(2)]


def code_of(use: Callable[[], object]) -> str:
    """The code of the error that a use raises."""
    with pytest.raises(RuntimeError, match=r"^[A-Z_]+: ") as caught:
        use()
    return str(caught.value).partition(":")[0]


def own(function: Callable[..., object], propagate: Any) -> Any:
    """The function, on each rank."""
    return monarch_nb.remote(function, propagate=propagate)


# -- borrows --------------------------------------------------------------------------------------------------------


def test_memory_is_lent_until_the_last_borrow_ends_in_any_order(t: Any) -> None:
    side, third = monarch_nb.Stream("other"), monarch_nb.Stream("third")
    _, first = side.borrow(t)
    lent, second = third.borrow(t)
    first.drop()
    assert code_of(lambda: t.add_(1)) == "MUTATING_BORROW"
    assert code_of(lambda: side.borrow(t, mutable=True)) == "MUTATING_BORROW"
    with third.activate():
        assert both(lent + 0) == [[1, 1], [2, 2]]
    second.drop()
    second.drop()
    assert both(t.add_(1)) == [[2, 2], [3, 3]]


def test_a_borrow_of_a_borrowed_tensor_ends_with_it(t: Any) -> None:
    side, third = monarch_nb.Stream("other"), monarch_nb.Stream("third")
    lent, borrow = side.borrow(t, mutable=True)
    with side.activate():
        view = lent[:1]
        further, inner = third.borrow(lent)
        assert code_of(lambda: lent.add_(1)) == "MUTATING_BORROW"
    with third.activate():
        assert both(further + 0) == [[1, 1], [2, 2]]
    borrow.drop()
    assert both(t.add_(1)) == [[2, 2], [3, 3]]
    with third.activate():
        assert code_of(lambda: further + 0) == "DROPPED"
    inner.drop()
    with side.activate():
        assert code_of(lambda: view + 0) == "DROPPED"
        assert code_of(lambda: third.borrow(lent)) == "DROPPED"


WRITES: list[tuple[str, Callable[[Any], object]]] = [
    ("in_place", lambda x: x.add_(1)),
    ("operator", lambda x: operator.iadd(x, 1)),
    ("division", lambda x: operator.itruediv(x, 2)),
    ("power", lambda x: operator.ipow(x, 2)),
    ("item", lambda x: x.__setitem__(0, 0.0)),
    ("view", lambda x: x.view(2, 1)[0].zero_()),
    ("detached", lambda x: x.detach().mul_(2)),
    ("data", lambda x: x.data.mul_(2)),
    ("out", lambda x: torch.add(torch.ones_like(x), 1, out=x)),
    ("foreach", lambda x: torch._foreach_add_([x], 1.0)),
    ("copy", lambda x: x.copy_(torch.ones_like(x))),
    ("fill", lambda x: torch.nn.init.constant_(x, 0.5)),
    ("draw", lambda x: x.uniform_()),
    ("reduce", lambda x: x.reduce_("gpus")),
    ("reduce_into", lambda x: torch.ones_like(x).reduce("gpus", out=x)),
    ("sharded", lambda x: x.as_sharded(["gpus"]).mul_(2)),
    ("remote", lambda x: own(torch.Tensor.zero_, torch.Tensor.zero_)(x)),
]


@pytest.mark.parametrize("name", [name for name, _ in WRITES])
def test_nothing_writes_to_memory_that_is_lent(t: Any, name: str) -> None:
    write = dict(WRITES)[name]
    side = monarch_nb.Stream("other")
    lent, borrow = side.borrow(t)
    with borrow:
        assert code_of(lambda: write(t)) == "MUTATING_BORROW"
        with side.activate():
            assert code_of(lambda: write(lent)) == "MUTATING_BORROW"
        assert both(t) == [[1, 1], [2, 2]]
    write(t)


READS: list[tuple[str, Callable[[Any], object]]] = [
    ("operation", lambda x: x + 1),
    ("view", lambda x: x[0]),
    ("fetch", lambda x: monarch_nb.fetch_shard({"x": [x]})),
    ("list", lambda x: x.tolist()),
    ("truth", lambda x: bool(x[0])),
    ("shards", lambda x: x.local_shards()),
    ("reduce", lambda x: x.reduce("gpus")),
    ("move", lambda x: x.slice_mesh(gpus=0).to_mesh(x.mesh)),
    ("sharded", lambda x: x.as_sharded(["gpus"])),
    ("remote", lambda x: monarch_nb.remote(torch.Tensor.sum)(x)),
    ("call", lambda x: monarch_nb.remote(torch.Tensor.sum).call(x)),
    ("borrow", lambda x: monarch_nb.Stream("third").borrow(x)),
]


@pytest.mark.parametrize("name", [name for name, _ in READS])
def test_nothing_reads_what_another_stream_may_write(t: Any, name: str) -> None:
    read = dict(READS)[name]
    sharded = t.as_sharded(["gpus"])
    lent, borrow = monarch_nb.Stream("other").borrow(t, mutable=True)
    with borrow:
        assert code_of(lambda: read(t)) == "BORROWED"
        assert code_of(lambda: sharded + 1) == "BORROWED"
        if name != "borrow":
            assert code_of(lambda: read(lent)) == "WRONG_STREAM"
        assert str(t).endswith("# BORROWED")
        assert str(lent).endswith("# WRONG_STREAM")
    if name == "borrow":
        read(t)[1].drop()
    elif name not in ("list", "truth"):  # ranks have different values
        read(t)


@pytest.mark.parametrize("name", [name for name, _ in (*READS, *WRITES)])
def test_each_use_of_a_dropped_tensor_says_where_it_was_dropped(t: Any, name: str) -> None:
    use = dict([*READS, *WRITES])[name]
    result, value = t + 1, monarch_nb.fetch_shard(t, gpus=1)
    t.drop()
    t.drop()
    with pytest.raises(RankTensorError, match=r"DROPPED: .*test_tensor_rank_misuse\.py:\d+"):
        use(t)
    assert value.get(60).tolist() == [2, 2]
    assert both(result) == [[2, 2], [3, 3]]


def test_a_lender_that_is_dropped_leaves_the_borrower_its_memory(t: Any) -> None:
    side = monarch_nb.Stream("other")
    lent, borrow = side.borrow(t, mutable=True)
    t.drop()
    with side.activate():
        assert both(lent.mul_(2)) == [[2, 2], [4, 4]]
    borrow.drop()
    with side.activate():
        assert code_of(lambda: lent + 1) == "DROPPED"


def test_compiled_steps_obey_streams_and_borrows(t: Any) -> None:
    @monarch_nb.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2) + 1

    for _ in range(3):
        step(t)
    assert step.calls > 0
    side = monarch_nb.Stream("other")
    with side.activate():
        assert code_of(lambda: step(t)) == "WRONG_STREAM"
    with side.borrow(t)[1]:
        assert code_of(lambda: step(t)) == "MUTATING_BORROW"
    assert both(step(t)) == [[17, 17], [33, 33]]


# -- arguments ------------------------------------------------------------------------------------------------------


def test_what_is_no_value_of_the_ranks_is_refused_by_name(procs: ProcMesh, t: Any) -> None:
    side, local = monarch_nb.Stream("other"), torch.ones(2)
    sharded: Any = t.as_sharded(["gpus"])
    for wrong in (local, sharded, 3, None):
        assert code_of(lambda wrong=wrong: side.borrow(wrong)) == "LOCAL_TENSOR"
    for use in (
        lambda: t.reduce("gpus", out=local),
        lambda: monarch_nb.reduce([t, local], "gpus"),
        lambda: monarch_nb.reduce_(local, "gpus"),
        lambda: monarch_nb.to_mesh({"a": local}, procs),
        lambda: monarch_nb.slice_mesh(local, gpus=0),
    ):
        assert code_of(use) == "LOCAL_TENSOR"
    with pytest.raises(TypeError, match="a mesh is wanted, not a str"):
        t.to_mesh("others")
    with pytest.raises(TypeError):
        monarch_nb.fetch_shard(t, gpus=0.5)  # type: ignore[arg-type]
    with pytest.raises(KeyError, match="no dimension 'x'"):
        t.mesh.process_group("x")
    for kind, error in (("band", TypeError), ("mean", ValueError)):
        with pytest.raises(error, match=f"reduce: .*'{kind}'"):
            t.reduce("gpus", kind)
    for kind in ("max", "product"):
        with pytest.raises(TypeError, match=rf"'{kind}' of values of torch\.complex64"):
            torch.complex(t, t).reduce("gpus", kind)
    with pytest.raises(TypeError, match="dims is the name of a dimension, several, or"):
        t.reduce(0)


def test_groups_of_other_meshes_are_refused(procs: ProcMesh, t: Any) -> None:
    def size(x: torch.Tensor, group: torch.distributed.ProcessGroup) -> torch.Tensor:
        return x * torch.distributed.get_world_size(group)

    remote = own(size, lambda x, group: x.clone())
    grid = procs.split(gpus=("dp", "pp"), pp=2)
    with grid.activate() as mesh:
        for dims in ((), ("dp", "dp")):
            with pytest.raises(ValueError, match="one or more different dimensions"):
                mesh.process_group(dims)
    part = procs.slice(gpus=slice(0, 1))
    with part.activate() as single:
        assert code_of(lambda: remote(t, single.process_group("gpus"))) == "WRONG_MESH"
        assert monarch_nb.inspect(remote(torch.ones(1), single.process_group("gpus"))).tolist() == [1]
    assert both(remote(t, t.mesh.process_group("gpus"))) == [[2, 2], [4, 4]]


class Pair(NamedTuple):
    """A tuple with names."""

    first: Any
    second: Any


def test_trees_of_any_kind_reach_functions_as_they_are(procs: ProcMesh, t: Any) -> None:
    def summed(pair: Pair, tree: Any) -> torch.Tensor:
        assert isinstance(pair, Pair)
        assert (type(tree), type(tree["b"])) == (OrderedDict, defaultdict)
        return pair.first + pair.second[0] + tree["a"] + tree["b"]["missing"]

    tree = OrderedDict(a=t, b=defaultdict(int))
    assert both(monarch_nb.remote(summed)(Pair(t, [t]), tree)) == [[3, 3], [6, 6]]
    plain = monarch_nb.remote(lambda pair: pair.first)
    assert plain.call(Pair(t, "word")).get(60).values()[1].tolist() == [2, 2]
    with procs.activate():
        assert plain.call(Pair(1, 2)).get(60).values() == [1, 1]
    assert t.mesh.execute(lambda pair: pair.second, Pair(1, 2)).values() == [2, 2]
    moved = monarch_nb.to_mesh(Pair(t, "word"), procs)
    assert (both(moved.first), moved.second) == ([[1, 1], [2, 2]], "word")
    reduced = monarch_nb.reduce({"t": t, "n": None, "at": 3}, "gpus")
    assert (both(reduced["t"]), reduced["n"], reduced["at"]) == ([[3, 3]] * 2, None, 3)


def test_what_functions_return_and_cannot_be_sent_is_their_failure_alone(t: Any) -> None:
    rank, triple = t.mesh.rank_tensor("gpus"), t * 3
    locked = monarch_nb.remote(lambda x: threading.Lock())
    for use, text in (
        (lambda: locked(t), "cannot be sent: TypeError: cannot pickle"),
        (lambda: locked.call(t).get(60), "cannot be sent"),
        (lambda: t.mesh.execute(threading.Lock), "cannot be sent"),
        (lambda: monarch_nb.remote(lambda x: (item for item in x))(t), "cannot be sent"),
        (lambda: monarch_nb.remote(lambda x: x.to("meta"))(t), "Cannot copy out of meta tensor"),
    ):
        with pytest.raises(TensorError, match=text):
            use()
        assert both(triple) == [[3, 3], [6, 6]]
    counted = monarch_nb.remote(lambda rank: [torch.ones(1)] * (1 + int(rank)))(rank)
    with pytest.raises(TensorError, match="unexpected number of returns from op, expected 1, got 2"):
        monarch_nb.inspect(counted[0])
    assert both(t) == [[1, 1], [2, 2]]


def test_an_exchange_that_fails_alike_everywhere_is_raised_by_its_fetches(
    t: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("monarch_nb.tensor.ranks.exchanging._COMPLEX", {"product"})  # which ranks cannot do either
    failed = torch.complex(t, t).reduce("gpus", "product")
    for _ in range(2):
        with pytest.raises(TensorError, match="reduce failed on ranks 0, 1"):
            monarch_nb.inspect(failed)
    assert (t * 0).tolist() == [0, 0]
    t.mesh.synchronise()


def test_copies_and_comparisons_are_as_those_of_local_tensors(t: Any) -> None:
    shared = copy.copy(t)
    shared.add_(1)
    assert both(t) == [[2, 2], [3, 3]]
    assert torch.allclose(t, shared + 1e-9)
    assert not torch.allclose(t, t + 1)
    assert torch.equal(t, shared)
    assert both(t.to(t.mesh)) == both(t)


def test_functions_that_outlive_streams_do_not_keep_them(procs: ProcMesh) -> None:
    doubled = monarch_nb.remote(lambda x: x * 2)
    with procs.activate():
        for number in range(140):  # more than there can be meshes and streams at once
            with monarch_nb.Stream(f"stream {number}").activate():
                doubled(torch.ones(1))


# -- values ---------------------------------------------------------------------------------------------------------

VALUES: list[tuple[str, Callable[[], torch.Tensor]]] = [
    ("scalar", lambda: torch.tensor(1.5)),
    ("empty", lambda: torch.empty(0, 3)),
    ("bool", lambda: torch.tensor([True, False])),
    ("int16", lambda: torch.tensor([1, 2], dtype=torch.int16)),
    ("uint8", lambda: torch.tensor([1, 2], dtype=torch.uint8)),
    ("half", lambda: torch.tensor([1.0, 2.0], dtype=torch.float16)),
    ("bfloat16", lambda: torch.tensor([1.0, 2.0], dtype=torch.bfloat16)),
    ("float8", lambda: torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn)),
    ("complex", lambda: torch.tensor([1 + 2j, 3.0])),
    ("conjugate", lambda: torch.tensor([1 + 2j, 3.0]).conj()),
    ("transposed", lambda: torch.arange(6.0).reshape(2, 3).t()),
    ("strided", lambda: torch.arange(6.0)[::2]),
    ("expanded", lambda: torch.ones(1, 3).expand(2, 3)),
    ("many_dimensions", lambda: torch.ones(20 * (1,))),
    ("nan", lambda: torch.tensor([float("nan"), 1.0])),
]


@pytest.mark.parametrize("name", [name for name, _ in VALUES])
def test_values_of_each_kind_are_read_moved_and_lent(procs: ProcMesh, name: str) -> None:
    make = dict(VALUES)[name]
    expected = make()
    with procs.activate():
        tensor: Any = make()
    side = monarch_nb.Stream("other")
    lent, borrow = side.borrow(tensor)
    with borrow, side.activate():
        borrowed = monarch_nb.inspect(lent, gpus=1)
    moved = tensor.slice_mesh(gpus=1).to_mesh(procs.slice(gpus=0))
    for value in (monarch_nb.inspect(tensor, gpus=1), borrowed, monarch_nb.inspect(moved), tensor.full_tensor()):
        assert (value.shape, value.dtype) == (expected.shape, expected.dtype)
        torch.testing.assert_close(
            value.resolve_conj().resolve_neg(), expected.resolve_conj().resolve_neg(), equal_nan=True
        )
    assert str(tensor.tolist()) == str(expected.tolist())
    if name != "float8":  # which no backend reduces
        for kind in ("sum", "stack"):
            pair = torch.stack([expected, expected])
            total = pair if kind == "stack" else pair.sum(0, dtype=expected.dtype)
            reduced = monarch_nb.inspect(tensor.reduce("gpus", kind), gpus=1)
            torch.testing.assert_close(reduced.resolve_conj(), total.resolve_conj(), equal_nan=True)


def test_a_mesh_of_one_rank_exchanges_with_itself(procs: ProcMesh) -> None:
    with procs.slice(gpus=1).activate() as mesh:
        [name] = mesh.names
        x: Any = torch.tensor([[1.0, 2.0]])
        assert mesh.rank_tensor(name).item() == 0
        assert x.reduce(()).tolist() == x.reduce(name, "max").tolist() == [[1, 2]]
        assert x.reduce(name, "stack").tolist() == [[[1, 2]]]
        assert x.reduce(name, scatter=True).tolist() == [1, 2]
        assert x.to_mesh(mesh).tolist() == [[1, 2]]
        assert both(x.to_mesh(procs)) == [[[1, 2]]] * 2
        assert monarch_nb.remote(lambda x: x.sum()).call_one(x).get(60) == 3
    assert procs.slice(gpus=slice(0, 1)).slice(gpus=0).rank_tensor("rank").tolist() == 0


@pytest.mark.slow
def test_handles_that_are_no_more_are_freed_on_the_ranks(procs: ProcMesh, t: Any) -> None:
    entries = t.reference.stream.held.entries
    many: list[Any] = [[t + number for number in range(3000)]]
    before = len(entries)
    thread = threading.Thread(target=many.clear)
    thread.start()
    thread.join()
    until(lambda: len(entries) <= before - 3000)

    def are_freed() -> bool:  # the batch that says so may be on its way
        tables = t.mesh.workers.held.call().get(60).values()
        return all(len(of_rank[t.reference.stream.number][1]) < 1000 for of_rank in tables)

    until(are_freed)
    assert both(t) == [[1, 1], [2, 2]]


def test_an_error_of_a_function_shows_the_line_on_its_rank(t: Any) -> None:
    def halves(part: torch.Tensor) -> None:
        raise ValueError("no halves")  # the line of the rank

    with pytest.raises(TensorError, match="# the line of the rank") as caught:
        monarch_nb.remote(halves)(t)
    error = caught.value
    assert (error.rank, error.controller_frames[0].line) == (0, "monarch_nb.remote(halves)(t)")
    assert "in halves" in error.worker_error_string
    with pytest.raises(TensorError) as caught:
        monarch_nb.inspect(t.index_select(0, t.long()[:1] + 5))
    assert "Traceback" not in str(caught.value)


def test_what_is_under_way_when_groups_end_is_lost(procs: ProcMesh, rank: Any) -> None:
    first, values = procs.slice(gpus=0), rank + 1

    def wrong(part: torch.Tensor) -> None:
        if torch.distributed.get_rank() == 1:
            raise ValueError("only here")
        torch.distributed.barrier()

    def fail() -> None:
        with pytest.raises(TensorError, match="only here"):
            rank.mesh.execute(wrong, values)

    with monarch_nb.coalescing():
        moved = rank.slice_mesh(gpus=1).to_mesh(first)
        lent, borrow = monarch_nb.Stream("other").borrow(rank)
        thread = threading.Thread(target=fail)
        thread.start()
        thread.join()
    with pytest.raises(TensorError, match="on its way to this stream or mesh when the process groups ended"):
        monarch_nb.inspect(moved)
    with lent.stream.activate(), pytest.raises(TensorError, match="on its way"):
        monarch_nb.inspect(lent)
    borrow.drop()
    assert both(rank) == [0, 1]
    assert monarch_nb.inspect(rank.slice_mesh(gpus=1).to_mesh(first)).item() == 1


# -- activation -----------------------------------------------------------------------------------------------------


def test_a_block_that_raises_leaves_the_mesh_and_stream_before_it(procs: ProcMesh) -> None:
    side = monarch_nb.Stream("other")
    with procs.activate() as mesh:
        with pytest.raises(ZeroDivisionError), procs.slice(gpus=0).activate(), side.activate():
            torch.ones(1 // 0)
        assert (monarch_nb.get_active_mesh(), monarch_nb.get_active_stream().name) == (mesh, "main")
        with pytest.raises(RuntimeError), side.activate(), monarch_nb.no_mesh.activate():
            torch.ones(2) @ torch.ones(3)
        assert isinstance(torch.ones(1), monarch_nb.Tensor)
    assert type(torch.ones(1)) is torch.Tensor


def test_an_activation_is_entered_again_and_in_another_thread(procs: ProcMesh) -> None:
    activation = procs.activate()
    with activation:
        pass
    assert type(torch.ones(1)) is torch.Tensor
    types: list[type] = []

    def make() -> None:
        with activation:
            types.append(type(torch.ones(1)))
        types.append(type(torch.ones(1)))

    for _ in range(2):
        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
    make()
    assert types == [monarch_nb.Tensor, torch.Tensor] * 3


def test_a_mesh_is_deactivated_within_modes_that_came_later(procs: ProcMesh) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    with procs.activate() as mesh:
        pass
    mesh.activate()
    with FlopCounterMode(display=False) as counter:
        mesh.deactivate()
        assert type(torch.ones(2, 2) @ torch.ones(2, 2)) is torch.Tensor
    assert counter.get_total_flops() == 16
    assert type(torch.ones(1)) is torch.Tensor
    with mesh.activate():
        assert type(torch.ones(1)) is monarch_nb.Tensor
    assert type(torch.ones(1)) is torch.Tensor


def test_tasks_fetch_at_the_same_time(procs: ProcMesh, t: Any) -> None:
    async def fetch(number: int) -> list[float]:
        values: list[float] = (await monarch_nb.fetch_shard(t * number, gpus=number % 2)).tolist()
        return values

    async def every() -> list[list[float]]:
        return await asyncio.gather(*map(fetch, range(50)))

    assert asyncio.run(every()) == [[number * (1 + number % 2)] * 2 for number in range(50)]


def test_threads_use_one_stream_at_the_same_time(procs: ProcMesh) -> None:
    shared, results = monarch_nb.Stream("shared"), dict[int, object]()

    def work(number: int) -> None:
        with procs.activate(), shared.activate():
            x: Any = torch.full((2,), float(number))
            for _ in range(50):
                x = x + 1
            results[number] = both(x.reduce("gpus"))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: [[2.0 * (number + 50)] * 2] * 2 for number in range(4)}


def test_threads_that_activate_it_first_share_one_mesh(procs: ProcMesh) -> None:
    renamed, meshes = procs.rename(gpus="first"), list[object]()
    together = threading.Barrier(4)

    def activate() -> None:
        together.wait(60)
        with renamed.activate() as mesh:
            meshes.append(mesh)

    threads = [threading.Thread(target=activate) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert meshes == meshes[:1] * 4
