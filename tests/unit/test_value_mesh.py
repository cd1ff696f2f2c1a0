import copy
import functools
import pickle
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_kernel.display.values import value_mesh_html
from monarch_nb.mesh.value import Lazy, ValueMesh
from monarch_nb.shape import Extent, NDSlice, Shape, region_of_ranks

pytestmark = pytest.mark.timeout(30)


def mesh_of(values: Any, **sizes: int) -> ValueMesh[Any]:
    return ValueMesh(Extent(list(sizes), list(sizes.values())), values)


@given(st.integers(1, 4), st.integers(1, 4), st.data())
def test_a_slice_holds_the_values_of_its_places(rows: int, columns: int, data: st.DataObject) -> None:
    mesh = mesh_of(range(rows * columns), rows=rows, columns=columns)
    row = data.draw(st.integers(0, rows - 1))
    start = data.draw(st.integers(0, columns - 1))
    part = mesh.slice(rows=row, columns=slice(start, None))
    assert part.values() == [row * columns + column for column in range(start, columns)]
    for point, value in part.items():
        assert part.item(columns=point["columns"]) == value == mesh.item(rows=row, columns=start + point["columns"])
        assert part.get(point.rank) == value
    strided = part.slice(columns=slice(None, None, 2))
    assert strided.values() == part.values()[::2]


@given(st.lists(st.integers() | st.text(max_size=3) | st.none() | st.floats(), max_size=40))
def test_the_text_is_never_long(values: list[Any]) -> None:
    lines = repr(mesh_of(values, gpus=len(values))).splitlines()
    header = f"ValueMesh({{gpus: {len(values)}}}):"
    if values and all(value is None for value in values):
        assert lines == [f"{header} None on {'its rank' if len(values) == 1 else f'all {len(values)} ranks'}"]
    else:
        assert lines[0] == header
        assert 2 <= len(lines) <= 12


def test_iterating_gives_points_and_values_in_rank_order() -> None:
    mesh = mesh_of("abcd", hosts=2, gpus=2)
    assert [(dict(point), value) for point, value in mesh] == [
        ({"hosts": 0, "gpus": 0}, "a"),
        ({"hosts": 0, "gpus": 1}, "b"),
        ({"hosts": 1, "gpus": 0}, "c"),
        ({"hosts": 1, "gpus": 1}, "d"),
    ]
    assert list(mesh.items()) == list(mesh)
    assert next(mesh.items())[1] == "a"
    assert (len(mesh), mesh.sizes, mesh.extent.labels) == (4, {"hosts": 2, "gpus": 2}, ["hosts", "gpus"])


def test_a_mesh_of_no_dimensions_holds_one_value() -> None:
    mesh = mesh_of(["x"])
    assert (mesh.item(), mesh.values(), len(mesh)) == ("x", ["x"], 1)
    assert mesh_of("abcd", hosts=2, gpus=2).slice(hosts=1, gpus=0).item() == "c"


def test_a_value_mesh_is_made_from_shapes_and_regions() -> None:
    shape = Shape(["gpus"], NDSlice(offset=8, sizes=[3], strides=[2]))
    assert ValueMesh(shape, "abc") == ValueMesh(shape.region, "abc") == ValueMesh(shape.extent, "abc")
    assert ValueMesh(shape, "abc").item(gpus=2) == "c"


def test_the_number_of_values_must_fit() -> None:
    with pytest.raises(ValueError, match=r"each of the 4 places of \{hosts: 2, gpus: 2\}, got 3"):
        mesh_of("abc", hosts=2, gpus=2)


def test_item_wants_exactly_the_dimensions_there_are() -> None:
    mesh = mesh_of("abcd", hosts=2, gpus=2)
    with pytest.raises(KeyError, match=r"missing: \['gpus'\]; for example item\(hosts=0, gpus=0\)"):
        mesh.item(hosts=0)
    with pytest.raises(KeyError, match=r"item has extra dimensions: \['rows'\]"):
        mesh.item(hosts=0, gpus=0, rows=0)
    for index in (-1, 2):
        with pytest.raises(IndexError, match="index out of range"):
            mesh.item(hosts=0, gpus=index)
    for rank in (-1, 4):
        with pytest.raises(IndexError, match="index out of range"):
            mesh.get(rank)


def test_reshaping_keeps_the_values() -> None:
    mesh = mesh_of(range(8), gpus=8)
    assert mesh.split(gpus=("dp", "tp"), tp=2).item(dp=3, tp=1) == 7
    assert mesh.rename(gpus="x").item(x=5) == 5
    assert mesh.split(gpus=("dp", "tp"), tp=2).flatten("all") == mesh.rename(gpus="all")


def test_equal_means_equal_sizes_and_values() -> None:
    mesh = mesh_of([1, 2], gpus=2)
    assert mesh == mesh_of([1, 2], gpus=2)
    assert mesh != mesh_of([1, 3], gpus=2)
    assert mesh != mesh_of([1, 2], hosts=2)
    assert mesh != [1, 2]
    with pytest.raises(TypeError, match="unhashable"):
        hash(mesh)


def test_arrays_are_equal_when_all_their_elements_are() -> None:
    numpy = pytest.importorskip("numpy")
    mesh = mesh_of([numpy.arange(3), numpy.ones(2)], gpus=2)
    assert mesh == mesh_of([numpy.arange(3), numpy.ones(2)], gpus=2)
    assert mesh != mesh_of([numpy.arange(3), numpy.zeros(2)], gpus=2)
    assert mesh != mesh_of([numpy.arange(3), numpy.ones(1)], gpus=2)


def test_a_value_mesh_survives_pickling_and_copying() -> None:
    mesh = mesh_of([[1], [2], [3], [4]], hosts=2, gpus=2).slice(hosts=1)
    assert pickle.loads(pickle.dumps(mesh)) == mesh == copy.deepcopy(mesh)
    lazy: ValueMesh[int] = ValueMesh._of_thunks(Extent(["gpus"], [2]), [lambda: 1, lambda: 2])
    assert pickle.loads(pickle.dumps(lazy)).values() == [1, 2]


def test_lazy_values_are_decoded_when_looked_at_and_once() -> None:
    decoded: list[int] = []

    def decode(rank: int) -> int:
        decoded.append(rank)
        return rank * 10

    thunks = [functools.partial(decode, rank) for rank in range(4)]
    mesh: ValueMesh[int] = ValueMesh._of_thunks(Extent(["gpus"], [4]), thunks)
    part = mesh.slice(gpus=slice(2, None))
    assert decoded == []
    assert part.item(gpus=0) == 20
    assert mesh.get(2) == 20
    assert decoded == [2]
    assert mesh.values() == [0, 10, 20, 30]
    assert decoded == [2, 0, 1, 3]
    assert ValueMesh._of_lazy(Extent(["gpus"], [2]), [5, Lazy(lambda: 6)]).values() == [5, 6]


def test_an_undecodable_value_fails_alone_and_may_be_retried() -> None:
    ready = False

    def thunk() -> str:
        if not ready:
            raise ModuleNotFoundError("no module named trainer")
        return "late"

    mesh: ValueMesh[str] = ValueMesh._of_thunks(Extent(["gpus"], [2]), [lambda: "fine", thunk])
    assert mesh.get(0) == "fine"
    with pytest.raises(ModuleNotFoundError):
        mesh.get(1)
    assert "gpus=0: 'fine'" in repr(mesh)
    assert "<cannot be decoded: ModuleNotFoundError: no module named trainer>" in repr(mesh)
    ready = True
    assert mesh.get(1) == "late"


def test_threads_that_look_at_once_decode_once() -> None:
    calls: list[int] = []
    entered, go = threading.Event(), threading.Event()

    def thunk() -> object:
        calls.append(1)
        entered.set()
        assert go.wait(10)
        return object()

    lazy = Lazy(thunk)
    results: list[object] = []
    threads = [threading.Thread(target=lambda: results.append(lazy.get())) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert entered.wait(10)
    go.set()
    for thread in threads:
        thread.join(10)
    assert (len(results), len(set(map(id, results))), len(calls)) == (4, 1, 1)


def test_few_different_values_are_shown_each_with_its_place() -> None:
    assert repr(mesh_of("ab", hosts=1, gpus=2)) == ("ValueMesh({hosts: 1, gpus: 2}):\n  gpus=0: 'a'\n  gpus=1: 'b'")
    assert repr(mesh_of("abcd", hosts=2, gpus=2)).splitlines()[1:3] == [
        "  hosts=0 gpus=0: 'a'",
        "  hosts=0 gpus=1: 'b'",
    ]


def test_values_of_a_slice_are_shown_with_full_mesh_positions() -> None:
    mesh = mesh_of("aabb", gpus=4)
    assert repr(mesh.slice(gpus=slice(2, 4))) == "ValueMesh({gpus: 2}):\n  gpus=2-3: 'b'"
    assert repr(mesh.slice(gpus=2)) == "ValueMesh({}):\n  gpus=2: 'b'"
    base = Extent(["hosts", "gpus"], [2, 3]).region
    part: ValueMesh[int] = ValueMesh._of_thunks(base.pick(gpus=[0, 2]), [lambda: 1] * 4, base)
    assert repr(part).splitlines()[1:] == ["  hosts=0-1 gpus=0,2: 1"]
    assert repr(part.slice(hosts=1)).splitlines()[1:] == ["  hosts=1 gpus=0,2: 1"]
    assert [point for point, _ in part] == [Extent(["hosts", "gpus"], [2, 2]).point(rank) for rank in range(4)]


def test_reshaped_values_are_shown_at_the_places_that_item_takes() -> None:
    mesh = mesh_of("abcd", hosts=2, gpus=2)
    assert (
        repr(mesh.flatten("rank").slice(rank=slice(2, None))) == "ValueMesh({rank: 2}):\n  rank=2: 'c'\n  rank=3: 'd'"
    )
    assert repr(mesh.slice(hosts=1).rename(gpus="tp")) == "ValueMesh({tp: 2}):\n  tp=0: 'c'\n  tp=1: 'd'"
    assert "gpus=0 hosts=1: 'b'" in repr(mesh.rename(hosts="gpus", gpus="hosts"))
    base = Extent(["hosts", "gpus"], [2, 2]).region
    answers = ValueMesh._of_thunks(base.flatten("rank"), [lambda: 1, lambda: 2, lambda: 2, lambda: 1], base)
    assert repr(answers).splitlines()[1:] == ["  rank=0,3: 1", "  rank=1-2: 2"]


def test_values_of_ranks_that_were_picked_one_by_one_are_shown() -> None:
    base = Extent(["hosts", "gpus"], [2, 3]).region
    region = region_of_ranks(["rank"], [3], [0, 1, 5])
    answers = ValueMesh._of_thunks(region, [lambda: 1] * 3, base)
    assert repr(answers).splitlines()[1:] == ["  hosts=0 gpus=0-1; hosts=1 gpus=2: 1"]


def test_equal_values_are_shown_once_with_their_ranks() -> None:
    assert repr(mesh_of([None] * 8, gpus=8)) == "ValueMesh({gpus: 8}): None on all 8 ranks"
    assert repr(mesh_of([None, 1], gpus=2)).count("\n") == 2
    assert repr(mesh_of(["ok"] * 10_000, gpus=10_000)) == "ValueMesh({gpus: 10000}):\n  all 10000 ranks: 'ok'"
    text = repr(mesh_of([0, 0, 0, 1, 0, 1, True], gpus=7))
    assert text.splitlines()[1:] == ["  gpus=0-2,4: 0", "  gpus=3,5: 1", "  gpus=6: True"]
    every_other = repr(mesh_of([rank % 2 for rank in range(1000)], gpus=1000)).splitlines()
    assert every_other[1] == "  gpus=0,2,4,6,8,10,12,14,16,18,20,22,24,… (500 ranks): 0"


def test_many_different_values_end_in_a_count() -> None:
    lines = repr(mesh_of(range(1000), gpus=1000)).splitlines()
    assert len(lines) == 12
    assert lines[-1] == "  … and 990 more ranks; see .items() or .get(rank)"
    assert len(repr(mesh_of(range(11), gpus=11)).splitlines()) == 12
    assert "more" not in repr(mesh_of(range(11), gpus=11))


def test_long_and_many_lined_values_take_one_short_line() -> None:
    class Tall:
        def __repr__(self) -> str:
            return "tensor([[1,\n        2]])"

    text = repr(mesh_of(["x" * 10**6, Tall(), Tall()], gpus=3))
    assert max(map(len, text.splitlines())) < 160
    assert text.splitlines()[2] == "  gpus=1-2: tensor([[1, 2]])"


def test_a_value_whose_repr_raises_does_not_hide_the_others() -> None:
    class Broken:
        def __repr__(self) -> str:
            raise RuntimeError("no")

    text = repr(mesh_of([Broken(), 1], gpus=2))
    assert "<Broken: its repr raised RuntimeError: no>" in text
    assert ": 1" in text


def test_only_so_many_costly_values_are_printed() -> None:
    printed: list[int] = []

    class Costly:
        def __repr__(self) -> str:
            printed.append(1)
            return "Costly"

    lines = repr(mesh_of([Costly() for _ in range(5000)], gpus=5000)).splitlines()
    assert len(printed) <= 256
    assert lines[-1] == "  … and 4744 more ranks; see .items() or .get(rank)"
    assert lines[1] == "  gpus=0-255: Costly"


def test_the_table_of_many_different_values_can_be_unfolded() -> None:
    html = value_mesh_html(mesh_of([f"value {n}" for n in range(64)], gpus=64))
    shown, _, folded = html.partition("<details>")
    assert ">gpus=19<" in shown
    assert ">gpus=20<" not in shown
    assert "<summary>44 more rows</summary>" in folded
    assert all(f">gpus={n}<" in folded for n in range(20, 64))


class Table:
    def __init__(self, text: str) -> None:
        self.text = text

    def _repr_html_(self) -> str:
        return f"<b>{self.text}</b>"


def test_the_grid_of_many_different_tables_can_be_unfolded() -> None:
    html = value_mesh_html(mesh_of([Table(f"rank {n}") for n in range(66)], gpus=66))
    shown, _, folded = html.partition("<details>")
    assert "<figcaption>gpus=15</figcaption><b>rank 15</b>" in shown
    assert "<b>rank 16</b>" not in shown
    assert "<summary>48 more values</summary>" in folded
    assert "<figcaption>gpus=63</figcaption><b>rank 63</b>" in folded
    assert "2 more; see .items() or .get(rank)" in folded


def test_figures_of_ranks_have_a_text_that_can_be_read() -> None:
    class Figure:
        def _repr_png_(self) -> bytes:
            return b"\x89PNG"

    html = value_mesh_html(mesh_of([Figure()] * 4, gpus=4))
    assert html.count("<img") == 1
    assert 'alt="figure of gpus=0-3"' in html
