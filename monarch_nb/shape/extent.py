"""Named sizes, and places in them."""

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, SupportsIndex

from .errors import NegativeError, UnknownLabelError, known_dims, out_of_range
from .frozen import Frozen

if TYPE_CHECKING:
    from .region import Region


_set = object.__setattr__


def _shown(label: str) -> str:
    return label if label.replace("_", "a").isalnum() and label.isascii() else f'"{label}"'


class Extent(Frozen, Mapping[str, int]):
    """The named sizes of a mesh, outermost dimension first: a mapping from label to size.

    No dimensions at all is legal and means one element. A size of 0 means none. ValueError for bad labels or sizes.
    """

    __slots__ = ("_labels", "_nelements", "_sizes")

    _labels: tuple[str, ...]
    _sizes: tuple[int, ...]
    _nelements: int

    def __init__(self, labels: Sequence[str], sizes: Sequence[SupportsIndex]) -> None:
        names = _checked_labels(labels)
        lengths = tuple(map(operator.index, sizes))
        if len(names) != len(lengths):
            raise ValueError(f"need one size for each label, got labels {list(names)} and sizes {list(lengths)}")
        for name, length in zip(names, lengths, strict=True):
            if length < 0:
                raise NegativeError(f"dimension {name!r} cannot have size {length}; sizes are 0 or more")
        self._fill(_labels=names, _sizes=lengths, _nelements=math.prod(lengths))

    @property
    def labels(self) -> list[str]:
        """Names of the dimensions, outermost first."""
        return list(self._labels)

    @property
    def sizes(self) -> list[int]:
        """Length of each dimension, outermost first."""
        return list(self._sizes)

    @property
    def key(self) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Names and sizes, outermost first: all there is to an extent, as it travels."""
        return self._labels, self._sizes

    @property
    def nelements(self) -> int:
        """How many places there are: the product of the sizes."""
        return self._nelements

    @property
    def region(self) -> "Region":
        """All ranks of this extent, as a region."""
        from .ndslice import NDSlice  # the region builds on extents, not the other way round
        from .region import Region

        return Region(self._labels, NDSlice.new_row_major(self._sizes))

    def point(self, rank: SupportsIndex) -> "Point":
        """The place with this row-major rank. IndexError when there is none."""
        return Point(rank, self)

    def __getitem__(self, label: str) -> int:
        try:
            return self._sizes[self._labels.index(label)]
        except ValueError:
            raise UnknownLabelError(f"no dimension {label!r}; {known_dims(self._labels)}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._labels)

    def __len__(self) -> int:
        return len(self._labels)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Extent):
            return self._labels == other._labels and self._sizes == other._sizes
        return dict(self) == other if isinstance(other, dict) else NotImplemented

    def __hash__(self) -> int:
        return hash((self._labels, self._sizes))

    def __reduce__(self) -> tuple[object, ...]:
        return Extent, (self._labels, self._sizes)

    def __repr__(self) -> str:
        return "{" + ", ".join(f"{_shown(label)}: {size}" for label, size in self.items()) + "}"


class Point(Frozen, Mapping[str, int]):
    """One place in an extent: a mapping from label to index. IndexError when the extent has no such rank."""

    __slots__ = ("_extent", "_rank")

    _rank: int
    _extent: Extent

    def __init__(self, rank: SupportsIndex, extent: Extent) -> None:
        at = rank if type(rank) is int else operator.index(rank)
        if not 0 <= at < extent._nelements:
            raise out_of_range(f"rank {at} is out of range for {extent!r}, which has {extent.nelements} places", at)
        _set(self, "_rank", at)
        _set(self, "_extent", extent)

    @property
    def rank(self) -> int:
        """Row-major index of this place in its extent."""
        return self._rank

    @property
    def extent(self) -> Extent:
        """What this is a place in."""
        return self._extent

    @property
    def labels(self) -> list[str]:
        """Names of the dimensions, outermost first."""
        return self._extent.labels

    def size(self, label: str) -> int:
        """Length of one dimension. KeyError when there is none of that name."""
        return self._extent[label]

    def __getitem__(self, label: str) -> int:
        size = self._extent[label]
        _, *after = self._extent._sizes[self._extent._labels.index(label) :]
        return self._rank // math.prod(after) % size

    def __iter__(self) -> Iterator[str]:
        return iter(self._extent)

    def __len__(self) -> int:
        return len(self._extent)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Point):
            return self._rank == other._rank and self._extent == other._extent
        return dict(self) == other if isinstance(other, dict) else NotImplemented

    def __hash__(self) -> int:
        return hash((self._rank, self._extent))

    def __reduce__(self) -> tuple[object, ...]:
        return Point, (self._rank, self._extent)

    def __repr__(self) -> str:
        return "{" + ", ".join(f"{label!r}: {at}/{self.size(label)}" for label, at in self.items()) + "}"


def _checked_labels(labels: Sequence[str]) -> tuple[str, ...]:
    if isinstance(labels, str):  # a string is a sequence of strings, and never what was meant
        raise ValueError(f"expected a sequence of labels, got the string {labels!r}; write [{labels!r}]")
    names = tuple(labels)
    for name in names:
        if not isinstance(name, str) or not name:
            raise ValueError(f"dimension labels are non-empty strings, got {name!r}")
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"Duplicate dimension name {twice[0]!r} in {list(names)}; give each dimension its own name")
    return names
