"""What is left of a mesh when some of its ranks are gone: the largest slice that none of them is in."""

from collections.abc import Collection, Mapping, Sequence
from itertools import product
from math import prod

_MOST = 4096  # ways to leave the lost out that are compared; else all are left out along one dimension
_STRIDES = 8  # every second, …, every eighth


def largest_slice(sizes: Mapping[str, int], lost: Sequence[Mapping[str, int]]) -> dict[str, range]:
    """The indices that are kept along each dimension; `lost` are the coordinates of the lost ranks.

    Of equally large ones that which leaves out along the outermost dimension. Raises ValueError where nothing is left.
    """
    labels = list(sizes)
    ways: Collection[Sequence[str]] = [[label] * len(lost) for label in labels]
    if len(labels) ** len(lost) <= _MOST:
        ways = list(product(labels, repeat=len(lost)))
    found = [_kept(sizes, lost, along) for along in ways]
    best = max(found, key=lambda kept: prod(map(len, kept.values())), default={})
    if not best or not all(best.values()):
        raise ValueError("nothing is left of the mesh: all of it is lost")
    return best


def _kept(sizes: Mapping[str, int], lost: Sequence[Mapping[str, int]], along: Sequence[str]) -> dict[str, range]:
    """Each of the lost ones is left out along one dimension."""
    without: dict[str, set[int]] = {label: set() for label in sizes}
    for point, label in zip(lost, along, strict=True):
        without[label].add(point[label])
    return {label: _longest(size, without[label]) for label, size in sizes.items()}


def _longest(size: int, without: Collection[int]) -> range:
    """The longest run of indices, or of every n-th, that has none of these; the first of several."""
    best = range(0)
    for stride in range(1, min(size, _STRIDES) + 1):
        for start in range(size):
            stop = start
            while stop < size and stop not in without:
                stop += stride
            if len(found := range(start, stop, stride)) > len(best):
                best = found
        if not without:
            break
    return best
