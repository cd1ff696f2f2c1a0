"""What `monarch._src.actor.shape` has beside the shapes themselves."""

from collections.abc import Iterator
from typing import TypeAlias

from monarch_nb.shape import NDSlice, Selector, Shape

Slices: TypeAlias = NDSlice | list[NDSlice]


def iter_ranks(ranks: Slices) -> Iterator[int]:
    """The base ranks of one slice, or of several, each rank once."""
    parts = ranks if isinstance(ranks, list) else [ranks]
    return iter(dict.fromkeys(rank for part in parts for rank in part))


class ShapeExt:
    """Selection along several dimensions of a shape at once."""

    @staticmethod
    def slice(shape: Shape, /, **dims: Selector) -> Shape:
        """The part of `shape` at an index (no dimension then) or slice (it stays); errors as `Region.sliced`."""
        return Shape.of(shape.region.sliced(**dims))
