import functools
import itertools
import math
import pickle
from typing import Any, Self

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from monarch_nb.shape import Extent, MeshTrait, NDSlice, Region, Shape

pytestmark = pytest.mark.timeout(60)

LABELS = ["a", "b", "c", "d"]


class Mesh(MeshTrait):
    def __init__(self, region: Region) -> None:
        self.region = region

    @property
    def _region(self) -> Region:
        return self.region

    def _new_with_region(self, region: Region) -> Self:
        return type(self)(region)

    @classmethod
    def of(cls, **sizes: int) -> Self:
        return cls(Extent(list(sizes), list(sizes.values())).region)


@st.composite
def whole_regions(draw: st.DrawFn) -> Region:
    sizes = draw(st.lists(st.integers(1, 5), max_size=4))
    return Extent(LABELS[: len(sizes)], sizes).region


def picks_any(size: int, chosen: slice) -> bool:
    return len(range(size)[chosen]) > 0


@st.composite
def selectors(draw: st.DrawFn, region: Region) -> dict[str, Any]:
    dims: dict[str, Any] = {}
    for name, size in region.sizes.items():
        steps = st.none() | st.integers(1, 3)
        bound = st.none() | st.integers(-size - 1, size + 1)
        chosen = draw(
            st.none()
            | st.integers(0, size - 1)
            | st.builds(slice, bound, bound, steps).filter(functools.partial(picks_any, size))
        )
        if chosen is not None:
            dims[name] = chosen
    return dims


@given(st.data())
def test_slicing_picks_what_slicing_nested_lists_would(data: st.DataObject) -> None:
    region = data.draw(whole_regions())
    for _ in range(2):  # slices of slices too
        dims = data.draw(selectors(region))
        indices = []
        for name, size in region.sizes.items():
            chosen = dims.get(name, slice(None))
            indices.append(list(range(size)[chosen]) if isinstance(chosen, slice) else [chosen])
        expected = [region.ndslice.nditem(point) for point in itertools.product(*indices)]
        labels = [name for name in region.labels if isinstance(dims.get(name, slice(None)), slice)]
        sliced = region.sliced(**dims)
        assert sliced.ranks() == expected
        assert sliced.labels == labels
        assert len(sliced) == len(expected)
        region = sliced


@given(st.data())
def test_points_of_base_ranks_count_in_the_slice(data: st.DataObject) -> None:
    base = data.draw(whole_regions())
    region = base.sliced(**data.draw(selectors(base)))
    ranks = region.ranks()
    for index, rank in enumerate(ranks):
        assert region.point_of_base_rank(rank) == region.extent.point(index)
    for rank in range(len(base) + 1):
        assert region.contains(rank) == (rank in region) == (rank in ranks) == region.overlaps_ranks({rank, 10**9})
    assert not region.overlaps_ranks(set())


@given(st.data(), st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_splitting_keeps_the_ranks_and_their_order(data: st.DataObject, factors: list[int]) -> None:
    outer = data.draw(st.integers(1, 3))
    base = Extent(["x", "y"], [outer, math.prod(factors)]).region
    region = base.slice(x=slice(0, outer, data.draw(st.integers(1, 2))))
    names = [f"p{number}" for number in range(len(factors))]
    left_out = data.draw(st.sampled_from([None, *names]))
    sizes = {name: size for name, size in zip(names, factors, strict=True) if name != left_out}
    split = region.split(y=names, **sizes)
    assert split.labels == ["x", *names]
    assert list(split.sizes.values())[1:] == factors
    assert split.ranks() == region.ranks()


@given(st.data())
def test_flattening_works_exactly_on_contiguous_ranks(data: st.DataObject) -> None:
    base = data.draw(whole_regions())
    region = base.sliced(**data.draw(selectors(base)))
    ranks = region.ranks()
    if ranks == list(range(ranks[0], ranks[0] + len(ranks))):
        flat = region.flatten("all")
        assert (flat.ranks(), flat.sizes) == (ranks, {"all": len(ranks)})
    else:
        with pytest.raises(ValueError, match=r"cannot flatten sparse mesh: .* flatten first"):
            region.flatten("all")


@given(st.data())
def test_regions_survive_pickling(data: st.DataObject) -> None:
    base = data.draw(whole_regions())
    region = base.sliced(**data.draw(selectors(base)))
    assume(region.labels)
    same = pickle.loads(pickle.dumps(region))
    assert same == region
    assert hash(same) == hash(region)
    assert region.rename(**{region.labels[0]: "z"}) != region


def test_a_mesh_slices_by_index_and_by_slice() -> None:
    mesh = Mesh.of(hosts=4, gpus=8)
    assert mesh.slice(hosts=1).extent == {"gpus": 8}
    assert mesh.slice(hosts=slice(1, 3), gpus=0).sizes == {"hosts": 2}
    assert mesh.slice(hosts=3, gpus=7).region.ranks() == [31]
    assert len(mesh.slice(gpus=slice(None, None, 2))) == 16
    assert mesh.slice().region == mesh.region


def test_slicing_by_an_unknown_dimension_names_the_known_ones() -> None:
    with pytest.raises(TypeError, match=r"no dimension 'rows'; its dimensions are 'hosts', 'gpus'"):
        Mesh.of(hosts=2, gpus=2).slice(rows=0)
    with pytest.raises(TypeError, match="it has no dimensions"):
        Mesh.of().slice(rows=0)


@pytest.mark.parametrize("index", [-1, 4])
def test_an_index_outside_the_dimension_is_an_index_error(index: int) -> None:
    with pytest.raises(IndexError, match=rf"index out of range: hosts={index}, but dimension 'hosts' has size 4"):
        Mesh.of(hosts=4).slice(hosts=index)


def test_an_empty_slice_is_refused_with_dimension_size_and_slice() -> None:
    with pytest.raises(ValueError, match=r"the slice 4:9 of dimension 'hosts', which has size 4, is empty"):
        Mesh.of(hosts=4).slice(hosts=slice(4, 9))
    with pytest.raises(ValueError, match=r"cannot slice dimension 'hosts' by ::-1: steps must be 1 or more"):
        Mesh.of(hosts=4).slice(hosts=slice(None, None, -1))


def test_selectors_that_are_neither_integers_nor_slices_are_refused() -> None:
    with pytest.raises(TypeError, match="dimension 'hosts' is sliced by an integer or a slice, got 'all'"):
        Mesh.of(hosts=4).slice(hosts="all")  # type: ignore[arg-type]


def test_a_mesh_splits_several_dimensions_and_keeps_the_others() -> None:
    mesh = Mesh.of(host=32, gpu=8, other=2).split(host=("dp", "pp"), gpu=("tp", "cp"), pp=16, cp=2)
    assert list(mesh.sizes.items()) == [("dp", 2), ("pp", 16), ("tp", 4), ("cp", 2), ("other", 2)]
    assert mesh.region.ranks() == list(range(512))


def test_a_dimension_may_keep_its_name_for_a_part() -> None:
    assert Mesh.of(gpus=8).split(gpus=("node", "gpus"), node=2).sizes == {"node": 2, "gpus": 4}


@pytest.mark.parametrize(
    ("split", "text"),
    [
        ({"host": ("dp", "pp"), "pp": 5}, r"'host' of size 32 is not evenly divided by \(dp=\?, pp=5\)"),
        (
            {"host": ("dp", "pp"), "pp": 4, "dp": 4},
            r"not evenly divided by \(dp=4, pp=4\); their sizes must multiply to",
        ),
        ({"host": ("dp", "pp")}, "Cannot infer size of 'dp' and 'pp'.*for example pp=2"),
        ({"host": ("dp", "gpu"), "dp": 2}, "Duplicate dimension name 'gpu'"),
        ({"host": ("dp", "dp"), "dp": 2}, "Duplicate dimension name 'dp'"),
        ({"host": ("dp",), "pp": 2}, "unused size constraints: 'pp'"),
        ({"pp": 2}, "unused size constraints: 'pp'.*its dimensions are 'host', 'gpu'"),
        ({"hosts": ("dp", "pp"), "pp": 2}, "'hosts' is not an existing dimension.*its dimensions are 'host', 'gpu'"),
        ({"host": "dp"}, "expected a sequence of dimension names to split 'host' into, got 'dp'"),
        ({"host": 4}, "expected a sequence of dimension names"),
        ({"host": ("dp", "pp"), "pp": 0}, "'pp' cannot have size 0"),
    ],
)
def test_splits_that_do_not_fit_say_why(split: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Mesh.of(host=32, gpu=8).split(**split)


def test_flattening_ignores_the_strides_of_dimensions_of_size_one() -> None:
    assert Mesh.of(hosts=4, gpus=2).slice(hosts=slice(2, 3)).flatten("x").region.ranks() == [4, 5]
    assert Mesh.of().flatten("x").sizes == {"x": 1}
    with pytest.raises(ValueError, match="cannot flatten sparse mesh"):
        Region(["x"], NDSlice(0, [100], [2])).flatten("y")


def test_renaming_keeps_what_is_not_mentioned() -> None:
    mesh = Mesh.of(hosts=2, gpus=4)
    assert list(mesh.rename(hosts="dp").sizes.items()) == [("dp", 2), ("gpus", 4)]
    assert mesh.rename(hosts="gpus", gpus="hosts").sizes == {"gpus": 2, "hosts": 4}
    with pytest.raises(ValueError, match="Duplicate dimension name 'gpus'"):
        mesh.rename(hosts="gpus")
    with pytest.raises(ValueError, match=r"cannot rename 'rows'.*'hosts', 'gpus'"):
        mesh.rename(rows="x")
    with pytest.raises(ValueError, match="must be a string"):
        mesh.rename(hosts=3)  # type: ignore[arg-type]


def test_sizes_are_asked_for_by_name() -> None:
    mesh = Mesh.of(hosts=2, gpus=4)
    assert (mesh.size(), mesh.size("gpus"), mesh.size(["hosts", "gpus"]), mesh.size([]), len(mesh)) == (8, 4, 8, 1, 8)
    with pytest.raises(KeyError, match=r"Mesh does not have dimension 'rows'; its dimensions are 'hosts', 'gpus'"):
        mesh.size("rows")
    with pytest.raises(KeyError, match="'rows'"):
        mesh.size(["hosts", "rows"])


def test_a_region_says_what_it_is() -> None:
    region = Extent(["hosts", "gpus"], [2, 4]).region
    assert repr(region) == "Region({hosts: 2, gpus: 4})"
    assert repr(region.slice(hosts=1)) == "Region({gpus: 4}, offset=4)"
    assert repr(region.slice(gpus=1)) == "Region({hosts: 2}, offset=1, strides=[4])"


def test_a_rank_that_is_not_in_the_region_has_no_point() -> None:
    with pytest.raises(ValueError, match="rank 0 is not in"):
        Extent(["hosts", "gpus"], [2, 4]).region.slice(hosts=1).point_of_base_rank(0)


def test_a_shape_offers_the_same_with_other_verbs() -> None:
    shape = Shape(["hosts", "gpus"], NDSlice(offset=0, sizes=[2, 4], strides=[4, 1]))
    assert shape.at("hosts", 1).ranks() == [4, 5, 6, 7]
    assert shape.index(hosts=1, gpus=2).ranks() == [6]
    assert shape.select("gpus", slice(1, 4, 2)).ranks() == [1, 3, 5, 7]
    assert shape.coordinates(6) == {"hosts": 1, "gpus": 2}
    assert (str(shape), str(shape.index(gpus=2))) == ("{hosts=2,gpus=4}", "{hosts=2}")
    assert (shape.labels, dict(shape.extent), len(shape)) == (["hosts", "gpus"], {"hosts": 2, "gpus": 4}, 8)
    assert shape.region == shape.extent.region
    assert pickle.loads(pickle.dumps(shape)) == shape
    assert Shape.unity().ranks() == [0]


@given(st.data())
def test_picked_indices_give_the_ranks_at_those_indices(data: st.DataObject) -> None:
    base = data.draw(whole_regions().filter(lambda region: region.labels))
    dims: dict[str, Any] = {
        name: data.draw(st.integers(0, size - 1) | st.lists(st.integers(0, size - 1), min_size=1))
        for name, size in base.sizes.items()
        if data.draw(st.booleans())
    }
    part = base.pick(**dims)
    picks = [dims.get(name, range(size)) for name, size in base.sizes.items()]
    indices = [[pick] if isinstance(pick, int) else sorted(set(pick)) for pick in picks]
    assert part.ranks() == [base.ndslice.nditem(point) for point in itertools.product(*indices)]
    labels = [name for name, pick in zip(base.labels, picks, strict=True) if not isinstance(pick, int)]
    assert part.labels == labels
    assert [part.point_of_base_rank(rank).rank for rank in part.ranks()] == list(range(len(part)))
    assert pickle.loads(pickle.dumps(part)) == part
    assert all((rank in part) == (rank in part.ranks()) for rank in base.ranks())


def test_a_picked_region_can_be_sliced_like_any_other() -> None:
    base = Extent(["hosts", "gpus"], [2, 6]).region
    part = base.pick(gpus=[0, 2, 3])
    assert part.slice(hosts=1).ranks() == [6, 8, 9]
    assert part.slice(gpus=slice(1, 3)).ranks() == [2, 3, 8, 9]
    assert part.slice(hosts=1, gpus=2).ranks() == [9]
    assert repr(part) == "Region({hosts: 2, gpus: 3}, ranks=[0, 2, 3, 6, 8, 9])"
    with pytest.raises(ValueError, match="picked one by one"):
        part.flatten("rank")
    assert base.slice(hosts=0).union(base.slice(gpus=5)).ranks() == [0, 1, 2, 3, 4, 5, 11]


def test_evenly_spaced_picks_are_an_ordinary_slice() -> None:
    base = Extent(["gpus"], [8]).region
    assert base.pick(gpus=[6, 2, 4]) == base.slice(gpus=slice(2, 7, 2))
    assert base.pick(gpus=[3]) == base.slice(gpus=slice(3, 4))


def test_picks_outside_of_the_extent_or_in_unknown_dimensions_are_refused() -> None:
    base = Extent(["gpus"], [4]).region
    with pytest.raises(IndexError, match="gpus=4"):
        base.pick(gpus=[0, 4])
    with pytest.raises(ValueError, match="at least one"):
        base.pick(gpus=[])
    with pytest.raises(TypeError, match="did you mean 'gpus'"):
        base.pick(gpu=[0])
    with pytest.raises(TypeError, match="did you mean 'gpus'"):
        base.slice(gpu=0)
