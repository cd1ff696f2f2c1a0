"""Extents, points, regions and n-dimensional slices: pure arithmetic without I/O and heavy imports."""

from .errors import DimensionError, NegativeError, OutOfRangeError, UnknownLabelError, out_of_range
from .ndslice import NDSlice, Slice
from .places import first_places_of, places, places_of, spans
from .region import Extent, Point, Region, RegionForm, Selector, Shape, region_of_ranks
from .runs import runs
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
    "first_places_of",
    "out_of_range",
    "places",
    "places_of",
    "region_of_ranks",
    "runs",
    "spans",
]
