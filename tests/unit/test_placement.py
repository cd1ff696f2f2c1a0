"""Where the parts of a sharded tensor lie: by PyTorch's own rules, for even, uneven and empty pieces."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import placement_types as pt
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from monarch_nb.tensor.placement import Partial, Placement, Replicate, Shard, kind_of, place, text_of
from monarch_nb.tensor.placement.text import grid_of

pytestmark = pytest.mark.timeout(60)
MESH = ("data", "model")
Layout = tuple[tuple[int, ...], tuple[int, ...], list[pt.Placement]]


def placed(shape: tuple[int, ...], *kinds: object, sizes: tuple[int, ...] = (4, 2)) -> Placement:
    labels = tuple(f"d{dim}" for dim in range(len(sizes))) if len(sizes) != 2 else MESH
    return place(shape, "float32", 4, labels, sizes, kinds)


def torch_values(shape: tuple[int, ...], sizes: tuple[int, ...], kinds: list[pt.Placement], rank: int) -> set[int]:
    """The values, by their number in the tensor, that DTensor's own splitting gives a rank."""
    local = torch.arange(math.prod(shape)).reshape(shape)
    for kind, size, index in zip(kinds, sizes, torch.unravel_index(torch.tensor(rank), sizes), strict=True):
        if hasattr(kind, "dim"):
            pieces, _ = kind._split_tensor(local, size, with_padding=False, contiguous=False)
            local = pieces[int(index)]
    return set(local.flatten().tolist())


def values_on(placement: Placement, rank: int) -> set[int]:
    if placement.block_of[rank] < 0:
        return set()
    block = placement.blocks[placement.block_of[rank]]
    values = torch.arange(math.prod(placement.shape)).reshape(placement.shape)
    for dim, spans in enumerate(block.spans):
        values = values.index_select(dim, torch.tensor([i for start, stop in spans for i in range(start, stop)]))
    assert tuple(values.shape) == block.shape
    return set(values.flatten().tolist())


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    sizes = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    kind = st.one_of(
        st.builds(pt.Shard, st.integers(0, len(shape) - 1)), st.just(pt.Replicate()), st.just(pt.Partial("sum"))
    )
    return shape, sizes, [draw(kind) for _ in sizes]


@settings(max_examples=80, deadline=None)
@given(layouts())
def test_every_rank_holds_what_dtensor_gives_it(layout: Layout) -> None:
    shape, sizes, kinds = layout
    placement = placed(shape, *kinds, sizes=sizes)
    for rank in range(math.prod(sizes)):
        assert values_on(placement, rank) == torch_values(shape, sizes, kinds, rank)
        local, offset = _compute_local_shape_and_global_offset(shape, sizes, placement.point(rank), kinds)
        assert placement.bytes_on(rank) == 4 * math.prod(local)
        if math.prod(local):
            block = placement.blocks[placement.block_of[rank]]
            assert block.shape == tuple(local)
            assert tuple(spans[0][0] for spans in block.spans) == tuple(offset)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 24), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
def test_parts_that_are_cut_one_by_one_are_dtensors_strided_shards(
    size: int, first: int, second: int, factor: int
) -> None:
    kinds = [pt._StridedShard(0, split_factor=factor), pt.Shard(0)]
    placement = placed((size,), *kinds, sizes=(first, second))
    for rank in range(first * second):
        assert values_on(placement, rank) == torch_values((size,), (first, second), kinds, rank)


@settings(max_examples=60, deadline=None)
@given(layouts())
def test_the_picture_has_every_block_once_at_its_place(layout: Layout) -> None:
    shape, sizes, kinds = layout
    placement = placed(shape, *kinds, sizes=sizes)
    grid = grid_of(placement)
    cells = [
        grid.at(slab, row, column)
        for slab in range(len(grid.slabs))
        for row in range(len(grid.rows))
        for column in range(len(grid.columns))
    ]
    assert sorted(block for blocks in cells for block in blocks) == list(range(len(placement.blocks)))


def test_ranks_with_equal_data_lie_along_replicated_and_partial_dimensions() -> None:
    copied = placed((8, 6), Shard(0), Replicate())
    assert [block.ranks for block in copied.blocks] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert (copied.copies, copied.parts, copied.held) == (2, 1, 2 * copied.nbytes)
    summed = placed((8, 6), Partial(), Shard(1))
    assert [block.ranks for block in summed.blocks] == [(0, 2, 4, 6), (1, 3, 5, 7)]
    assert (summed.copies, summed.parts) == (1, 4)


def test_uneven_pieces_are_counted_on_each_rank() -> None:
    placement = placed((5, 7), Shard(0), Replicate())
    assert [placement.bytes_on(rank) for rank in range(8)] == [56, 56, 56, 56, 28, 28, 0, 0]
    assert (placement.even, placement.largest, placement.empty) == (False, 56, (6, 7))
    assert placement.describe(2, "t") == "t[4:5, :] · 1×7 · 28 B · ranks 4-5"


def test_a_tensor_without_values_is_on_every_rank() -> None:
    placement = placed((0, 3), Shard(0), Replicate())
    assert placement.empty == ()
    assert placement.held == 0
    assert "0 B on each rank" in text_of(placement)


def test_a_scalar_has_one_block() -> None:
    placement = placed((), Replicate(), Partial("avg"))
    assert [block.ranks for block in placement.blocks] == [tuple(range(8))]
    assert placement.describe(0, "loss") == "loss[()] · scalar · 4 B · ranks 0-7"


def test_pytorchs_placements_are_understood_and_others_refused() -> None:
    assert kind_of(pt.Shard(1)) == Shard(1)
    assert kind_of(pt._StridedShard(0, split_factor=2)) == Shard(0, 2)
    assert kind_of(pt.Replicate()) == Replicate()
    assert kind_of(pt.Partial("avg")) == Partial("avg")
    with pytest.raises(TypeError, match="is no placement: use Shard"):
        kind_of("data")


def test_placements_that_do_not_fit_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"needs 2 placements, not 1"):
        placed((4, 4), Shard(0))
    with pytest.raises(ValueError, match=r"Shard\(2\) does not fit a tensor of 2 dimensions"):
        placed((4, 4), Shard(2), Replicate())
    assert placed((4, 4), Shard(-1), Replicate()).blocks == placed((4, 4), Shard(1), Replicate()).blocks


def test_text_shows_shards_and_the_role_of_each_mesh_dimension() -> None:
    text = text_of(placed((1024, 64), Shard(0), Partial()), "grad", lost=[3])
    assert text.splitlines() == [
        "grad 1024×64 float32 on data=4 model=2 · 256 kB: 64.0 kB on each rank, 512 kB on the mesh",
        "  data=4   Shard(0)      cuts dimension 0: 1024 → 4 × 256",
        "  model=2  Partial(sum)  2 parts of every value, not reduced yet (sum)",
        "            0:64",
        "           ┌─────────┐",
        "     0:256 │ Σ 0-1   │",
        "           ├─────────┤",
        "   256:512 │ Σ 2-3 ✕ │",
        "           ├─────────┤",
        "   512:768 │ Σ 4-5   │",
        "           ├─────────┤",
        "  768:1024 │ Σ 6-7   │",
        "           └─────────┘",
        "  lost: ranks 3",
    ]


@pytest.mark.parametrize(
    ("shape", "kinds", "sizes", "text"),
    [
        ((5,), [Shard(0)], (4,), "5 → 2 + 2 + 1 + 0"),
        ((2, 3), [Shard(0), Shard(1)], (2, 2), "3 → 2 + 1"),
        ((16,), [Shard(0), Shard(0)], (4, 2), "cuts dimension 0 in 4, 8 together: 16 → 8 × 2"),
        ((100,), [Shard(0)], (16,), "100 → 16 pieces of 0 to 7"),
        ((4,), [Shard(0)], (1,), "one rank: nothing to divide"),
    ],
)
def test_pieces_are_told_by_their_sizes(
    shape: tuple[int, ...], kinds: list[object], sizes: tuple[int, ...], text: str
) -> None:
    assert text in text_of(placed(shape, *kinds, sizes=sizes))


def test_text_of_a_thousand_ranks_stays_short() -> None:
    text = text_of(placed((4096, 4096, 64), Shard(0), Shard(1), sizes=(64, 16)))
    assert len(text.splitlines()) < 60
    assert "… and 48 more rows, 8 more columns" in text
