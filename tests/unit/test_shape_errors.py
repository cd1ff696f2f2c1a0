"""What is out of range or unknown raises what programs catch: Python's own error and torchmonarch's, in one."""

import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_nb.mesh.value import ValueMesh
from monarch_nb.shape import Extent, NDSlice, Point, Shape

pytestmark = pytest.mark.timeout(60)

EXTENT = Extent(["hosts", "gpus"], [2, 4])
SHAPE = Shape(["hosts", "gpus"], NDSlice.new_row_major([2, 4]))
VALUES = ValueMesh(SHAPE, "abcdefgh")
SLICE = NDSlice(offset=10, sizes=[2, 3], strides=[6, 2])


@pytest.mark.parametrize(
    ("use", "kinds"),
    [
        (lambda: VALUES.get(8), (IndexError, ValueError)),
        (lambda: VALUES.get(-1), (IndexError, OverflowError)),
        (lambda: VALUES.item(hosts=1, gpus=4), (IndexError,)),
        (lambda: VALUES.item(hosts=1, gpus=-1), (IndexError, OverflowError)),
        (lambda: VALUES.item(hosts=1), (KeyError,)),
        (lambda: VALUES.item(hosts=1, gpus=1, x=1), (KeyError,)),
        (lambda: VALUES.slice(x=0), (TypeError,)),
        (lambda: VALUES.slice(hosts=2), (IndexError,)),
        (lambda: VALUES.slice(hosts=-1), (IndexError,)),
        (lambda: VALUES.slice(gpus=slice(None, None, -1)), (ValueError,)),
        (lambda: VALUES.size("x"), (KeyError,)),
        (lambda: SHAPE.at("x", 0), (ValueError,)),
        (lambda: SHAPE.at("gpus", 4), (ValueError, IndexError)),
        (lambda: SHAPE.at("gpus", -1), (OverflowError, IndexError)),
        (lambda: SHAPE.select("x", slice(0, 1)), (ValueError,)),
        (lambda: SHAPE.coordinates(99), (ValueError,)),
        (lambda: EXTENT["x"], (KeyError, ValueError)),
        (lambda: Point(5, EXTENT)["x"], (KeyError, ValueError)),
        (lambda: Point(8, EXTENT), (IndexError, ValueError)),
        (lambda: Point(-1, EXTENT), (IndexError, OverflowError)),
        (lambda: Extent(["a"], [-1]), (ValueError, OverflowError)),
        (lambda: SLICE[6], (IndexError,)),
        (lambda: SLICE.get(6), (IndexError, ValueError)),
        (lambda: SLICE.get(-1), (IndexError, OverflowError)),
        (lambda: SLICE.nditem([1, 3]), (IndexError,)),
        (lambda: SLICE.nditem([1]), (IndexError,)),
        (lambda: SLICE.coordinates(11), (ValueError,)),
        (lambda: SLICE.coordinates(-1), (ValueError, OverflowError)),
        (lambda: NDSlice(offset=3, sizes=[2], strides=[-1]), (ValueError, OverflowError)),
    ],
)
def test_an_error_is_both_what_python_and_what_torchmonarch_raise(
    use: Callable[[], Any], kinds: tuple[type[Exception], ...]
) -> None:
    for kind in kinds:
        with pytest.raises(kind) as caught:
            use()
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (type(copy), str(copy)) == (type(caught.value), str(caught.value))


def test_a_region_is_a_shape_too() -> None:
    assert SHAPE.region.as_shape() == SHAPE
    assert VALUES.slice(hosts=1)._region.as_shape().ranks() == [4, 5, 6, 7]


def test_a_missing_dimension_is_not_quoted_like_a_key() -> None:
    with pytest.raises(KeyError) as caught:
        EXTENT["x"]
    assert str(caught.value) == "no dimension 'x'; its dimensions are 'hosts', 'gpus'"
    assert EXTENT.get("x", 3) == 3


@given(st.lists(st.integers(0, 40), max_size=25))
def test_a_list_of_ranks_becomes_few_slices(ranks: list[int]) -> None:
    slices = NDSlice.from_list(ranks)
    assert [rank for part in slices for rank in part] == sorted(ranks)
    for part, next_part in itertools.pairwise(slices):
        current, following = list(part), list(next_part)
        step = current[1] - current[0] if len(current) > 1 else following[0] - current[-1]
        assert not step or following[0] - current[-1] != step, "the first could be longer"


@pytest.mark.parametrize(
    ("ranks", "slices"),
    [
        ([], []),
        ([5], [(5, [1], [1])]),
        ([3, 2, 1], [(1, [3], [1])]),
        ([0, 4, 8, 12], [(0, [4], [4])]),
        ([0, 1, 3], [(0, [2], [1]), (3, [1], [1])]),
        ([0, 0], [(0, [1], [1]), (0, [1], [1])]),
        ([22, 1, 29, 10], [(1, [2], [9]), (22, [2], [7])]),
    ],
)
def test_slices_of_a_list_are_as_programs_expect(ranks: list[int], slices: list[Any]) -> None:
    assert [(part.offset, part.sizes, part.strides) for part in NDSlice.from_list(ranks)] == slices


@given(st.integers(0, 9), st.integers(0, 5), st.integers(1, 4), st.data())
def test_any_python_slice_of_a_slice_is_that_of_its_ranks(
    offset: int, size: int, stride: int, data: st.DataObject
) -> None:
    ranks = NDSlice(offset, [size, 2], [2 * stride, stride])
    end = st.none() | st.integers(-15, 15)
    step = st.none() | st.integers(-4, 4).filter(bool)
    picked = slice(data.draw(end), data.draw(end), data.draw(step))
    assert ranks[picked] == tuple(ranks)[picked]


def test_values_may_come_with_their_ranks_in_any_order() -> None:
    pairs = [(rank, rank * 10) for rank in (3, 1, 0, 2, 7, 6, 5, 4)]
    assert ValueMesh.from_indexed(SHAPE, pairs).values() == [rank * 10 for rank in range(8)]
    assert ValueMesh.from_indexed(EXTENT, (pair for pair in pairs)).item(hosts=1, gpus=2) == 60
    assert ValueMesh.from_indexed(SHAPE.region, [*pairs, (0, "later")]).get(0) == "later"
    with pytest.raises(ValueError, match=r"no value for 2 of the 8 places of \{hosts: 2, gpus: 4\}: ranks 5-6"):
        ValueMesh.from_indexed(SHAPE, [pair for pair in pairs if pair[0] not in (5, 6)])
    for rank in (8, -1):
        with pytest.raises(ValueError, match=f"a value for rank {rank}, but"):
            ValueMesh.from_indexed(SHAPE, [*pairs, (rank, 0)])
