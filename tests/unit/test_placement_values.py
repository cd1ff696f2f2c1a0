"""Values on display: the first elements of a tensor, assembled from the parts of its ranks."""

import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_nb.tensor.placement import EDGE, Partial, Placement, Replicate, Shard, place, values_document
from monarch_nb.tensor.verbs import Values

IDENTITY = {"sum": 0, "product": 1, "max": -1, "min": 10**6}


def answers(placement: Placement) -> list[Values | str]:
    """Answers of ranks for a tensor with the elements 0, 1, 2, …; of several parts the first has all."""
    shape = placement.shape
    replies: list[Values | str] = []
    for rank, block in enumerate(placement.block_of):
        spans = placement.blocks[block].spans if block >= 0 else tuple(() for _ in shape)
        along = [[index for span in dim_spans for index in range(*span)] for dim_spans in spans]
        if block < 0:
            along = [[] for _ in shape]
        parts = [
            (index, kind.op)
            for index, kind in zip(placement.point(rank), placement.kinds, strict=True)
            if isinstance(kind, Partial)
        ]
        fill = next((IDENTITY[op] for index, op in parts if index), None)
        firsts = [indices[: EDGE if dim >= len(shape) - 2 else 1] for dim, indices in enumerate(along)]
        corner = [
            sum(index * math.prod(shape[dim + 1 :]) for dim, index in enumerate(element)) if fill is None else fill
            for element in itertools.product(*firsts)
        ]
        sizes = tuple(map(len, firsts))
        replies.append(Values("there", "", False, sizes, tuple(corner), math.prod(map(len, along))))
    return replies


def expected(shape: tuple[int, ...]) -> list[list[str]]:
    shown = [min(size, EDGE if dim >= len(shape) - 2 else 1) for dim, size in enumerate(shape)]
    values = [
        str(sum(index * math.prod(shape[dim + 1 :]) for dim, index in enumerate(element)))
        for element in itertools.product(*map(range, shown))
    ]
    across = max(shown[-1], 1) if shown else 1
    return [values[index : index + across] for index in range(0, len(values), across)]


@given(st.data())
def test_the_first_elements_are_right_for_every_placement(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 19), max_size=4)))
    sizes = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    op = data.draw(st.sampled_from(sorted(IDENTITY)))
    kinds: list[Any] = [Replicate(), Partial(op), *(Shard(dim) for dim in range(len(shape)))]
    placements = [data.draw(st.sampled_from(kinds)) for _ in sizes]
    placement = place(shape, "int64", 8, tuple(f"d{number}" for number in range(len(sizes))), sizes, placements)
    document = values_document(placement, answers(placement))
    assert document["corner"] == expected(shape)
    assert (document["index"] == "") == all(
        size <= (EDGE if dim >= len(shape) - 2 else 1) for dim, size in enumerate(shape)
    )


def test_an_element_no_rank_reports_is_left_open_with_the_reason() -> None:
    placement = place((4,), "float32", 4, ("data", "copy"), (2, 2), [Shard(0), Replicate()])
    values = Values("there", "", False, (2,), (1.0, math.nan), 2, 1.0, 1.0, 1.0, 1, 0)
    ended = "its process has ended"
    document = values_document(placement, [ended, values, ended, Values("lost", "ValueError: no")])
    assert document["corner"] == [["1", "nan", "·", "·"]]  # the copy of the first rank is used
    assert document["rows"] == [["1", "2", "1", "1", "1", "1", "0"]]
    assert document["notes"] == [
        "ranks 0,2: its process has ended",
        "rank 3: the operation that makes it has failed: ValueError: no",
    ]
    document = values_document(placement, [values, Values("coming"), values])
    assert document["notes"] == [
        "rank 1: it has not come to the operation that makes it",
        "the first 3 of 4 ranks were asked",
    ]


@pytest.mark.parametrize(
    ("dtype", "corner", "text"),
    [
        ("complex64", (1.0, -2.0), "1-2j"),
        ("bool", (1,), "True"),
        ("float16", (1 / 3,), "0.33333"),
        ("int8", (-7,), "-7"),
    ],
)
def test_numbers_are_told_as_people_read_them(dtype: str, corner: tuple[float, ...], text: str) -> None:
    placement = place((), dtype, 1, ("data",), (1,), [Replicate()])
    assert values_document(placement, [Values("there", corner=corner)])["corner"] == [[text]]
