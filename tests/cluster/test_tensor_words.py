"""DTensor's own methods on handles of tensors: redistribute, device_mesh, to_local, from_local."""

import gc
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

import monarch_nb as monarch
from monarch_nb.distributed import CompileWarning, Mesh, MeshTensor
from monarch_nb.tensor.propagation import PropagationError
from tests.cluster.actor_tools import spawned
from tests.effort import daily

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    for procs in spawned(4, "words"):
        yield Mesh.of(procs.split(gpus=("dp", "tp"), dp=2), ("dp", "tp"))


def matrix(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor([[3, -1, 7], [2, 5, -4], [0, 6, 1]]).to(dtype)


def test_redistribute_takes_placements_by_name_and_after_the_mesh(mesh: Mesh) -> None:
    t = monarch.distribute(matrix(), mesh, ["dp", None])
    expected = (Replicate(), Shard(1))
    for result in (
        t.redistribute(placements=[Replicate(), Shard(-1)]),
        t.redistribute(t.device_mesh, [Replicate(), Shard(1)]),
        t.redistribute(mesh, placements=expected, async_op=True),
        t.redistribute([None, "tp"]),
    ):
        assert result.placements == expected
        assert torch.equal(result.full_tensor(), matrix())
    assert t.redistribute(placements=t.placements) is t
    with pytest.raises(TypeError, match=r"say how it is to be placed, once: redistribute\(placements="):
        t.redistribute()
    with pytest.raises(TypeError, match="once"):
        t.redistribute([None, "tp"], expected)
    part = mesh.slice(dp=0)
    with pytest.raises(ValueError, match=r"the tensor is on .*'words'.*t\.to\(mesh\)"):
        t.redistribute(part, [Shard(0)])


def test_a_tensor_knows_its_mesh_also_when_nothing_else_does(mesh: Mesh) -> None:
    t = mesh.ones(4)
    assert t.device_mesh is mesh
    alone = Mesh.of(mesh.procs).ones(4, sharding_spec=["tp"])
    gc.collect()
    again: Any = alone.device_mesh
    assert (again.mesh_dim_names, again.shape) == (("dp", "tp"), (2, 2))
    assert again is alone.device_mesh is (alone + 1).device_mesh
    assert (again.ones(4) + alone).tolist() == [2.0] * 4


KINDS = [Replicate(), Shard(0), *map(Partial, ("sum", "avg", "product", "max", "min"))]
PAIRS = [pair for pair in product(KINDS, repeat=2) if len({str(kind) for kind in pair if kind.is_partial()}) < 2]


@pytest.mark.parametrize("dtype", daily([torch.float32, torch.int64, torch.bool], 1))
def test_a_tensor_is_exactly_the_same_however_it_is_placed(mesh: Mesh, dtype: torch.dtype) -> None:
    tensor = matrix(dtype)
    pairs = [pair for pair in PAIRS if dtype.is_floating_point or not any(kind.is_partial("avg") for kind in pair)]
    t = monarch.distribute(tensor, mesh)
    tried = [(a, b, t.redistribute(a).redistribute(b)) for i, a in enumerate(pairs) for b in pairs[i % 3 :: 3]]
    for before, after, result in tried:
        assert result.placements == after
        assert torch.equal(result.full_tensor(), tensor), (before, after)


def test_nan_and_infinities_are_kept_by_parts(mesh: Mesh) -> None:
    t = torch.tensor([1.0, torch.nan, torch.inf, -torch.inf])
    for kind in ("sum", "product", "max", "min"):
        result = monarch.distribute(t, mesh).redistribute([Partial(kind), Replicate()]).redistribute([Shard(0)] * 2)
        assert torch.equal(result.full_tensor().nan_to_num(7), t.nan_to_num(7)), kind


def test_parts_that_do_not_fit_are_refused_with_line_and_remedy(mesh: Mesh) -> None:
    t = mesh.ones(4)
    for placements, dtype, text in (
        ([Partial("sum"), Partial("max")], torch.float32, r"several kinds, P.*sum.*, P.*max.*Take one kind"),
        ([Partial("avg"), Replicate()], torch.int32, r"its dtype is torch.int32.*t\.float\(\)"),
    ):
        with pytest.raises(PropagationError, match=rf"redistribute \(at .*test_tensor_words.py:\d+\): .*{text}"):
            t.to(dtype).redistribute(placements=placements)


def test_writing_to_a_product_in_parts_gives_what_it_gives_locally(mesh: Mesh) -> None:
    tensor = matrix()
    t = monarch.distribute(tensor, mesh, ["dp", None]).prod(0)
    assert any(kind.is_partial("product") for kind in t.placements)
    t.add_(mesh.ones(3))
    assert torch.equal(t.full_tensor(), tensor.prod(0) + 1)


def test_to_local_says_what_to_use(mesh: Mesh) -> None:
    with pytest.raises(RuntimeError, match=r"t\.local_shards\(\) gives what each rank holds.*mesh\.execute"):
        mesh.ones(4).to_local()


@pytest.mark.parametrize("spec", [["dp", None], [("dp", "tp"), None], ["tp", "dp"], None])
def test_from_local_puts_together_what_local_shards_takes_apart(mesh: Mesh, spec: Any) -> None:
    t = monarch.distribute(matrix(), mesh, spec)
    again = monarch.from_local(t.local_shards(), mesh, spec)
    assert isinstance(again, MeshTensor)
    assert (again.shape, again.placements) == (t.shape, t.placements)
    assert torch.equal(again.full_tensor(), matrix())
    assert torch.equal((again * 2).full_tensor(), matrix() * 2)


def test_from_local_takes_partial_sums_and_one_tensor_for_all(mesh: Mesh) -> None:
    parts = [torch.full((2,), float(rank)) for rank in range(4)]
    assert monarch.from_local(parts, mesh, [Partial(), Partial()]).full_tensor().tolist() == [6.0, 6.0]
    assert monarch.from_local(torch.ones(2), mesh, [Shard(0), Partial()]).full_tensor().tolist() == [2.0] * 4
    changed = torch.zeros(2)
    t = monarch.from_local(changed, mesh, [Replicate(), Replicate()])
    changed += 1
    assert t.full_tensor().tolist() == [0.0, 0.0]


def test_from_local_refuses_what_is_no_tensor_of_that_placement(mesh: Mesh) -> None:
    ones = [torch.ones(2)] * 4
    for tensors, placements, kind, text in (
        (ones[:3], [Shard(0)] * 2, ValueError, "3 local tensors for a mesh of 4 ranks"),
        ([*ones[:3], torch.ones(1)], [Replicate(), Shard(0)], ValueError, r"rank 3 holds \(1,\).*it holds \(2,\)"),
        ([*ones[:3], torch.ones(2, 1)], [Shard(0)] * 2, ValueError, "ranks 0 and 3 hold tensors of 1 and 2 dimensions"),
        ([*ones[:3], torch.zeros(2)], [Replicate(), Shard(0)], ValueError, "ranks 1,3 hold different values.*'dp'"),
        ([*ones[:3], 1.0], [Shard(0)] * 2, TypeError, "rank 3 is to hold is a local tensor, not float"),
        (mesh.ones(2), [Shard(0)] * 2, TypeError, "not a tensor on mesh"),
        (ones, [Shard(0)], ValueError, "1 placement.*for a mesh of 2 dimensions"),
    ):
        with pytest.raises(kind, match=text):
            monarch.from_local(tensors, mesh, placements)


def test_a_step_that_sends_parts_runs_as_it_is_written(mesh: Mesh) -> None:
    run = monarch.compile(lambda x: x + monarch.from_local(torch.ones(2), mesh, [Shard(0), Shard(0)]))
    x = mesh.ones(8)
    run(x)
    with pytest.warns(CompileWarning, match="sends a tensor for each rank"):
        assert run(x).tolist() == [2.0] * 8
