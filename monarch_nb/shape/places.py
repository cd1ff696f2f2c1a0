"""Ranks of a region in other forms: as text in the notation of users (`gpus=0-2,5`, `hosts=0 gpus=0-3; hosts=1 gpus=2`)
and as runs, for headers.
"""

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence

from monarch_nb.shape.ndslice import NDSlice, PickedSlice, row_major_strides
from monarch_nb.shape.region import Region
from monarch_nb.wire.header import Run


def spans(numbers: Iterable[int]) -> str:
    """Returns numbers as text, with runs merged: `0-2,5`."""
    pairs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if pairs and pairs[-1][1] == number - 1:
            pairs[-1][1] = number
        else:
            pairs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in pairs)


def places(labels: Sequence[str], points: Iterable[Sequence[int]], sizes: Sequence[int] = ()) -> str:
    """Returns some places of a mesh with these dimensions as text; "" for a mesh without any.

    With `sizes`, dimensions of size 1 are left out if another one stays: they distinguish no ranks.
    """
    shown_dims = _distinguishing(sizes) if sizes else range(len(labels))
    shown = {tuple(point[dim] for dim in shown_dims) for point in points}
    return "; ".join(_places(tuple(labels[dim] for dim in shown_dims), shown))


def places_of(region: Region, ranks: Iterable[int]) -> str:
    """Returns the places of some base ranks of a mesh as text; "" for a mesh without dimensions."""
    points = (region.ndslice.coordinates(rank) for rank in ranks)
    return places(region.labels, points, region.ndslice.sizes)


def first_places_of(region: Region, ranks: Iterable[int]) -> str:
    """As `places_of`, along the first dimension alone, such as that of hosts."""
    points = (region.ndslice.coordinates(rank)[:1] for rank in ranks)
    return places(region.labels[:1], points, region.ndslice.sizes[:1])


def _distinguishing(sizes: Sequence[int]) -> Sequence[int]:
    """Returns the dimensions that distinguish ranks; the last one of a mesh with a single rank."""
    return [dim for dim, size in enumerate(sizes) if size > 1] or range(len(sizes))[-1:]


def _places(labels: tuple[str, ...], points: set[tuple[int, ...]]) -> list[str]:
    if not labels:
        return [""]
    rests: dict[int, set[tuple[int, ...]]] = {}
    for first, *rest in sorted(points):
        rests.setdefault(first, set()).add(tuple(rest))
    groups: dict[frozenset[tuple[int, ...]], list[int]] = {}
    for first, rest_points in rests.items():
        groups.setdefault(frozenset(rest_points), []).append(first)
    return [
        f"{labels[0]}={spans(firsts)} {tail}".rstrip()
        for rest_set, firsts in groups.items()
        for tail in _places(labels[1:], set(rest_set))
    ]


def runs(region: Region) -> Sequence[Run]:
    """Returns the base ranks of a region and their indices in it, as few runs, each along the longest regular stretch.

    Time and number of runs are len(region) / that stretch: one for a whole mesh of any size. Runs are not in the
    order of their ranks, and may interleave.
    """
    cached = region._runs  # each call needs the runs of its slice twice
    if cached is None:
        cached = _runs(region.ndslice)
        region._fill(_runs=cached)
    return cached


@functools.lru_cache(maxsize=1024)
def _runs(ranks: NDSlice) -> tuple[Run, ...]:
    if not len(ranks):
        return ()
    if isinstance(ranks, PickedSlice):
        return tuple(_stretches(tuple(ranks)))
    axes = _axes(ranks.sizes, ranks.strides)
    if not axes:
        return (Run(rank=ranks.offset, count=1),)
    count, stride, index_stride = axes.pop(max(range(len(axes)), key=lambda axis: (axes[axis][0], axis)))
    result = []
    for coordinates in itertools.product(*(range(size) for size, _, _ in axes)):
        rank = ranks.offset + sum(coordinate * step for coordinate, (_, step, _) in zip(coordinates, axes, strict=True))
        index = sum(coordinate * step for coordinate, (_, _, step) in zip(coordinates, axes, strict=True))
        result.append(Run(rank=rank, count=count, stride=stride, index=index, index_stride=index_stride))
    return tuple(result)


def _stretches(ranks: Sequence[int]) -> Iterator[Run]:
    """Yields ranks without regular strides as evenly spaced stretches."""
    start = 0
    while start < len(ranks):
        end = start + 1
        stride = max(ranks[end] - ranks[start], 1) if end < len(ranks) else 1
        while end < len(ranks) and ranks[end] - ranks[end - 1] == stride:
            end += 1
        yield Run(rank=ranks[start], count=end - start, stride=stride, index=start, index_stride=1)
        start = end


def _axes(sizes: list[int], strides: list[int]) -> list[tuple[int, int, int]]:
    """Returns (size, stride, index stride) of each dimension longer than 1; neighbours that step as one are joined."""
    axes: list[tuple[int, int, int]] = []
    for size, stride, index_stride in zip(sizes, strides, row_major_strides(sizes), strict=True):
        if size == 1:
            continue
        if axes and axes[-1][1] == stride * size:
            size *= axes.pop()[0]
        axes.append((size, stride, index_stride))
    return axes
