import random
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_nb.shape import Extent, NDSlice, Region, runs
from monarch_nb.wire.header import Run

pytestmark = pytest.mark.timeout(30)


def expanded(pieces: Iterable[Run]) -> list[tuple[int, int]]:
    """(index, rank) pairs by index."""
    return sorted(
        (run.index + i * run.index_stride, run.rank + i * run.stride) for run in pieces for i in range(run.count)
    )


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 12)), max_size=4), st.integers(0, 9))
def test_expanding_runs_gives_back_every_index_and_rank_once(dims: list[tuple[int, int]], offset: int) -> None:
    ranks = NDSlice(offset, [size for size, _ in dims], [stride for _, stride in dims])
    region = Region([f"d{dim}" for dim in range(len(dims))], ranks)
    assert expanded(runs(region)) == list(enumerate(region.ranks()))


@given(st.lists(st.integers(1, 6), max_size=4), st.randoms(use_true_random=False))
def test_slices_of_whole_meshes_need_one_run_per_outer_index(sizes: list[int], rng: random.Random) -> None:
    region = Extent([f"d{dim}" for dim in range(len(sizes))], sizes).region
    dims: dict[str, Any] = {name: slice(rng.randrange(size), None) for name, size in region.sizes.items()}
    sliced = region.sliced(**dims)
    pieces = runs(sliced)
    assert expanded(pieces) == list(enumerate(sliced.ranks()))
    assert len(pieces) <= len(sliced) // max(sliced.sizes.values(), default=1)


def test_a_whole_mesh_of_any_size_is_one_run() -> None:
    assert list(runs(Extent(["hosts", "gpus"], [125_000, 8]).region)) == [Run(rank=0, count=1_000_000)]
    assert list(runs(Extent(["a", "b", "c"], [10**6, 10**6, 10**6]).region)) == [Run(rank=0, count=10**18)]


def test_a_column_of_a_mesh_is_one_strided_run() -> None:
    region = Extent(["hosts", "gpus"], [125_000, 8]).region.slice(gpus=3)
    assert list(runs(region)) == [Run(rank=3, count=125_000, stride=8)]


def test_few_columns_of_a_long_mesh_are_as_many_runs() -> None:
    region = Extent(["hosts", "gpus"], [125_000, 8]).region.slice(gpus=slice(2, 4))
    assert list(runs(region)) == [
        Run(rank=2, count=125_000, stride=8, index=0, index_stride=2),
        Run(rank=3, count=125_000, stride=8, index=1, index_stride=2),
    ]


def test_one_member_and_none() -> None:
    assert list(runs(Extent([], []).region)) == [Run(rank=0, count=1)]
    assert list(runs(Extent(["a"], [4]).region.slice(a=3))) == [Run(rank=3, count=1)]
    assert list(runs(Extent(["a", "b"], [0, 3]).region)) == []


@given(st.integers(1, 4), st.sets(st.integers(0, 11), min_size=1))
def test_picked_ranks_are_as_few_runs_as_they_have_even_stretches(hosts: int, gpus: set[int]) -> None:
    region = Extent(["hosts", "gpus"], [hosts, 12]).region.pick(gpus=sorted(gpus))
    assert expanded(runs(region)) == list(enumerate(region.ranks()))
    assert len(runs(region)) <= len(region)


def test_neighbours_that_were_picked_travel_as_one_run() -> None:
    region = Extent(["gpus"], [8]).region.pick(gpus=[0, 2, 3, 4])
    assert [(run.rank, run.count) for run in runs(region)] == [(0, 2), (3, 2)]
