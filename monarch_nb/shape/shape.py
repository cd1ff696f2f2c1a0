"""Shapes: regions under the names that users of upstream's low-level API know."""

from collections.abc import Sequence
from typing import SupportsIndex

from .extent import Extent
from .frozen import Frozen
from .ndslice import NDSlice
from .region import Region


class Shape(Frozen):
    """Labels over an NDSlice; the same as a Region, with other verbs."""

    __slots__ = ("_region",)

    _region: Region

    def __init__(self, labels: Sequence[str], slice: NDSlice) -> None:
        self._fill(_region=Region(labels, slice))

    @classmethod
    def of(cls, region: Region) -> "Shape":
        """The shape of a region."""
        return cls(region.labels, region.ndslice)

    @classmethod
    def unity(cls) -> "Shape":
        """One rank, no dimensions."""
        return cls((), NDSlice(0, (), ()))

    @property
    def labels(self) -> list[str]:
        """Names of the dimensions, outermost first."""
        return self._region.labels

    @property
    def ndslice(self) -> NDSlice:
        """The base ranks, without the names."""
        return self._region.ndslice

    @property
    def extent(self) -> Extent:
        """Names and sizes, without the base ranks."""
        return self._region.extent

    @property
    def region(self) -> Region:
        """The same as a region."""
        return self._region

    def at(self, label: str, index: SupportsIndex) -> "Shape":
        """The part at one index of a dimension, which goes away. Errors as Region.sliced."""
        return Shape.of(self._region.sliced(**{label: index}))

    def index(self, /, **indices: SupportsIndex) -> "Shape":
        """The part at one index in each of some dimensions, which go away. Errors as Region.sliced."""
        return Shape.of(self._region.sliced(**indices))

    def select(self, label: str, slice: slice) -> "Shape":
        """The part at a slice of a dimension, which stays. Errors as Region.sliced."""
        return Shape.of(self._region.sliced(**{label: slice}))

    def coordinates(self, rank: SupportsIndex) -> dict[str, int]:
        """Where a base rank is, by label. ValueError when it is not in this shape."""
        return dict(zip(self.labels, self.ndslice.coordinates(rank), strict=True))

    def ranks(self) -> list[int]:
        """The base ranks, in row-major order of their coordinates."""
        return self._region.ranks()

    def __len__(self) -> int:
        return len(self._region)

    def __eq__(self, other: object) -> bool:
        return self._region == other._region if isinstance(other, Shape) else NotImplemented

    def __hash__(self) -> int:
        return hash((Shape, self._region))

    def __reduce__(self) -> tuple[object, ...]:
        return Shape, (self.labels, self.ndslice)

    def __repr__(self) -> str:
        return f"Shape({self.labels}, {self.ndslice!r})"
