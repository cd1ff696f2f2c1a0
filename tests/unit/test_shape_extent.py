import copy
import pickle
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_nb.shape import Extent, Point

pytestmark = pytest.mark.timeout(30)

extents = st.dictionaries(st.text(min_size=1, max_size=5), st.integers(0, 4), max_size=4).map(
    lambda sizes: Extent(list(sizes), list(sizes.values()))
)


@given(extents)
def test_points_agree_with_the_region_of_the_extent(extent: Extent) -> None:
    ranks = extent.region.ndslice
    assert list(ranks) == list(range(extent.nelements))
    for rank in ranks:
        point = extent.point(rank)
        assert list(point.values()) == ranks.coordinates(rank)
        assert list(point) == extent.labels == point.labels
        assert (point.rank, point.extent) == (rank, extent)


@given(extents)
def test_extents_and_points_survive_pickling_and_copying(extent: Extent) -> None:
    values: list[Extent | Point] = [extent, *(extent.point(rank) for rank in range(min(3, extent.nelements)))]
    for value in values:
        same = pickle.loads(pickle.dumps(value))
        assert same == value == copy.deepcopy(value)
        assert hash(same) == hash(value)
        assert repr(same) == repr(value)


def test_an_extent_is_a_mapping_from_label_to_size() -> None:
    extent = Extent(["hosts", "gpus"], [2, 8])
    assert isinstance(extent, Mapping)
    assert dict(extent) == {"hosts": 2, "gpus": 8} == extent
    assert (extent.labels, extent.sizes, extent.nelements) == (["hosts", "gpus"], [2, 8], 16)
    assert extent.get("rows") is None
    assert repr(extent) == str(extent) == "{hosts: 2, gpus: 8}"
    assert repr(Extent(["a b"], [1])) == '{"a b": 1}'


def test_no_dimensions_mean_one_element() -> None:
    extent = Extent([], [])
    assert (extent.nelements, repr(extent), len(extent)) == (1, "{}", 0)
    assert repr(Point(0, extent)) == "{}"


def test_order_of_dimensions_matters_between_extents() -> None:
    assert Extent(["a", "b"], [1, 2]) != Extent(["b", "a"], [2, 1])
    assert len({Extent(["a"], [1]), Extent(("a",), (1,)), Extent(["a"], [2])}) == 2


def test_a_point_is_a_mapping_that_also_knows_sizes() -> None:
    point = Point(1, Extent(["hosts", "gpus"], [1, 2]))
    assert str(point) == repr(point) == "{'hosts': 0/1, 'gpus': 1/2}"
    assert dict(point) == {"hosts": 0, "gpus": 1} == point
    assert (point["gpus"], point.size("gpus"), point.rank) == (1, 2, 1)
    assert point != Point(0, point.extent)


def test_unknown_dimensions_are_key_errors_that_name_the_known() -> None:
    extent = Extent(["hosts", "gpus"], [2, 8])
    for ask in (extent.__getitem__, extent.point(0).__getitem__, extent.point(0).size):
        with pytest.raises(KeyError, match=r"no dimension 'rows'.*'hosts', 'gpus'"):
            ask("rows")


@pytest.mark.parametrize(
    ("labels", "sizes", "text"),
    [
        (["a", "a"], [1, 1], "Duplicate dimension name 'a'"),
        ([""], [1], "non-empty strings"),
        ([3], [1], "non-empty strings"),
        ("ab", [1, 1], "expected a sequence of labels"),
        (["a"], [1, 2], "one size for each label"),
        (["a"], [-1], "'a' cannot have size -1"),
    ],
)
def test_bad_extents_are_refused(labels: list[str], sizes: list[int], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Extent(labels, sizes)


def test_sizes_are_integers() -> None:
    with pytest.raises(TypeError):
        Extent(["a"], [1.5])  # type: ignore[list-item]


def test_ranks_outside_the_extent_are_refused() -> None:
    with pytest.raises(IndexError, match="rank 2 is out of range"):
        Point(2, Extent(["a"], [2]))
    with pytest.raises(IndexError, match="rank -1 is out of range"):
        Point(-1, Extent(["a"], [2]))


def test_extents_and_points_never_change() -> None:
    extent = Extent(["a"], [2])
    extent.labels.append("b")
    assert extent.labels == ["a"]
    with pytest.raises(AttributeError, match="cannot be changed"):
        extent.sizes = [3]  # type: ignore[misc]
    with pytest.raises(AttributeError, match="cannot be changed"):
        del extent.point(0).rank
