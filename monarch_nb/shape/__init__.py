"""Extents, points, regions and n-dimensional slices: pure arithmetic, no I/O, nothing heavy to import."""

from .extent import Extent, Point
from .ndslice import NDSlice, Slice
from .places import places, places_of, spans
from .region import Region, Selector
from .runs import runs
from .shape import Shape
from .trait import MeshTrait

__all__ = [
    "Extent",
    "MeshTrait",
    "NDSlice",
    "Point",
    "Region",
    "Selector",
    "Shape",
    "Slice",
    "places",
    "places_of",
    "runs",
    "spans",
]
