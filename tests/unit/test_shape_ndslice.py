import copy
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_nb.shape import NDSlice, Slice

pytestmark = pytest.mark.timeout(30)


@st.composite
def nested_slices(draw: st.DrawFn, min_size: int = 1) -> NDSlice:
    """Any slice that slicing, splitting and transposing a whole mesh can give: no two coordinates share a rank."""
    sizes = draw(st.lists(st.integers(min_size, 5), max_size=4))
    order = draw(st.permutations(range(len(sizes))))
    strides = [0] * len(sizes)
    reach = 1
    for dim in order:
        strides[dim] = reach * draw(st.integers(1, 3))
        reach = strides[dim] * max(sizes[dim], 1)
        if sizes[dim] == 1:
            strides[dim] = draw(st.integers(0, 9))
    return NDSlice(draw(st.integers(0, 7)), sizes, strides)


@given(nested_slices(min_size=0))
def test_getting_by_index_agrees_with_iterating(ranks: NDSlice) -> None:
    assert [ranks.get(index) for index in range(len(ranks))] == list(ranks)


@given(nested_slices())
def test_index_and_coordinates_undo_get_and_nditem(ranks: NDSlice) -> None:
    for index, rank in enumerate(ranks):
        assert ranks.index(rank) == index
        assert ranks.nditem(ranks.coordinates(rank)) == rank


@given(nested_slices(min_size=0))
def test_contains_exactly_the_ranks_it_iterates_over(ranks: NDSlice) -> None:
    assert {rank for rank in range(700) if rank in ranks} == {rank for rank in ranks if rank < 700}


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6)), max_size=3), st.integers(0, 4))
def test_finds_ranks_even_when_strides_interleave_or_stand_still(dims: list[tuple[int, int]], offset: int) -> None:
    ranks = NDSlice(offset, [size for size, _ in dims], [stride for _, stride in dims])
    members = set(ranks)
    assert {rank for rank in range(90) if rank in ranks} == members
    for rank in members:
        assert ranks.nditem(ranks.coordinates(rank)) == rank


@given(nested_slices(min_size=0))
def test_dense_means_contiguous_and_in_order(ranks: NDSlice) -> None:
    assert ranks.dense == (list(ranks) == list(range(ranks.offset, ranks.offset + len(ranks))) or not len(ranks))


@given(nested_slices())
def test_survives_pickling_and_copying(ranks: NDSlice) -> None:
    assert pickle.loads(pickle.dumps(ranks)) == ranks == copy.deepcopy(ranks)
    assert hash(pickle.loads(pickle.dumps(ranks))) == hash(ranks)


def test_strides_of_dimensions_of_size_one_do_not_count_in_comparisons() -> None:
    assert NDSlice(3, [1, 4], [99, 1]) == NDSlice(3, [1, 4], [4, 1])
    assert NDSlice(3, [2, 4], [99, 1]) != NDSlice(3, [2, 4], [4, 1])


def test_no_dimensions_hold_the_offset_alone() -> None:
    ranks = NDSlice(5, [], [])
    assert (len(ranks), list(ranks), ranks.get(0), ranks.coordinates(5)) == (1, [5], 5, [])
    assert 0 not in ranks


def test_looking_up_a_rank_of_a_huge_slice_is_immediate() -> None:
    ranks = NDSlice(7, [10**6, 10**6], [2 * 10**6, 2])
    assert ranks.index(ranks.get(123_456_789_012)) == 123_456_789_012
    assert 8 not in ranks


def test_indexing_takes_ints_and_slices() -> None:
    ranks = NDSlice(offset=1, sizes=[2, 3], strides=[10, 2])
    assert ranks[4] == 13
    assert ranks[1:5:2] == (3, 11)
    assert ranks == Slice.new_row_major([2, 3]) or isinstance(ranks, Slice)


def test_properties_are_lists_that_do_not_reach_inside() -> None:
    ranks = NDSlice(1, (2, 3), (3, 1))
    ranks.sizes.append(4)
    assert (ranks.sizes, ranks.strides, ranks.offset, ranks.ndim) == ([2, 3], [3, 1], 1, 2)
    with pytest.raises(AttributeError, match="cannot be changed"):
        ranks.offset = 2  # type: ignore[misc]


def test_a_missing_dimension_is_named() -> None:
    ranks = NDSlice(0, [2, 3], [3, 1])
    with pytest.raises(ValueError, match="rank 6 is not in NDSlice"):
        ranks.index(6)
    with pytest.raises(IndexError, match="index out of range"):
        ranks.get(-1)
    with pytest.raises(IndexError, match="index out of range"):
        ranks.nditem([0, 3])
    with pytest.raises(IndexError, match="need 2 coordinates, got 1"):
        ranks.nditem([0])
    with pytest.raises(ValueError, match="one stride for each size"):
        NDSlice(0, [2], [])
    with pytest.raises(ValueError, match="must not be negative"):
        NDSlice(0, [2], [-1])
