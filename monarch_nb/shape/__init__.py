"""Extents, points, regions and n-dimensional slices: pure arithmetic without I/O and heavy imports."""

from .ndslice import (
    DimensionError,
    NDSlice,
    NegativeError,
    OutOfRangeError,
    Slice,
    UnknownLabelError,
    check_sizes,
    out_of_range,
)
from .places import first_places_of, places, places_of, runs, spans
from .region import Extent, Point, Region, RegionForm, Selector, Shape, region_of_ranks
from .trait import MeshTrait

__all__ = [
    "DimensionError",
    "Extent",
    "MeshTrait",
    "NDSlice",
    "NegativeError",
    "OutOfRangeError",
    "Point",
    "Region",
    "RegionForm",
    "Selector",
    "Shape",
    "Slice",
    "UnknownLabelError",
    "check_sizes",
    "first_places_of",
    "out_of_range",
    "places",
    "places_of",
    "region_of_ranks",
    "runs",
    "spans",
]
