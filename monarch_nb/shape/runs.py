"""Regions as runs of ranks, the form in headers."""

import functools
import itertools
from collections.abc import Iterator, Sequence

from monarch_nb.wire.header import Run

from .ndslice import NDSlice, PickedSlice, row_major_strides
from .region import Region


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
