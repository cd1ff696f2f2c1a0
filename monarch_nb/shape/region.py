"""Extents, points and regions: the shape of a mesh, apart from its members."""

import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Self, SupportsIndex, TypeAlias, overload

import msgspec

from monarch_nb.shape.ndslice import DimensionError, NegativeError, UnknownLabelError, known_dims, out_of_range

from .ndslice import Frozen, NDSlice, PickedSlice, row_major_strides

if TYPE_CHECKING:
    from monarch_nb.wire.header import Run


_set = object.__setattr__


def _shown(label: str) -> str:
    return label if label.replace("_", "a").isalnum() and label.isascii() else f'"{label}"'


class Extent(Frozen, Mapping[str, int]):
    """The named sizes of a mesh, outermost dimension first: a mapping from label to size.

    No dimensions at all is valid and means one element. A size of 0 means none. ValueError for bad labels or sizes.
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
        """Names and sizes, outermost first: the whole extent in serialised form."""
        return self._labels, self._sizes

    @property
    def nelements(self) -> int:
        """The number of points: the product of the sizes."""
        return self._nelements

    @property
    def region(self) -> "Region":
        """All ranks of this extent, as a region."""
        return Region(self._labels, NDSlice.new_row_major(self._sizes))

    def point(self, rank: SupportsIndex) -> "Point":
        """Returns the point with this row-major rank. IndexError when there is none."""
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
    """One point in an extent: a mapping from label to index. IndexError when the extent has no such rank."""

    __slots__ = ("_extent", "_rank")

    _rank: int
    _extent: Extent

    def __init__(self, rank: SupportsIndex, extent: Extent) -> None:
        index = rank if type(rank) is int else operator.index(rank)
        if not 0 <= index < extent._nelements:
            raise out_of_range(
                f"rank {index} is out of range for {extent!r}, which has {extent.nelements} places", index
            )
        _set(self, "_rank", index)
        _set(self, "_extent", extent)

    @property
    def rank(self) -> int:
        """The row-major index of this point in its extent."""
        return self._rank

    @property
    def extent(self) -> Extent:
        """The extent of the point."""
        return self._extent

    @property
    def labels(self) -> list[str]:
        """Names of the dimensions, outermost first."""
        return self._extent.labels

    def size(self, label: str) -> int:
        """Returns the length of one dimension. KeyError when there is none of that name."""
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
        return (
            "{" + ", ".join(f"{label!r}: {coordinate}/{self.size(label)}" for label, coordinate in self.items()) + "}"
        )


def _checked_labels(labels: Sequence[str]) -> tuple[str, ...]:
    if isinstance(labels, str):  # a string is a sequence of strings, and always a mistake here
        raise ValueError(f"expected a sequence of labels, got the string {labels!r}; write [{labels!r}]")
    names = tuple(labels)
    for name in names:
        if not isinstance(name, str) or not name:
            raise ValueError(f"dimension labels are non-empty strings, got {name!r}")
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"Duplicate dimension name {twice[0]!r} in {list(names)}; give each dimension its own name")
    return names


# A selection along one dimension: an integer drops the dimension, a slice keeps it.
Selector: TypeAlias = "SupportsIndex | slice"
BuiltinSlice = slice
# The dimensions that replace one dimension, outermost first: name and size.
Parts: TypeAlias = list[tuple[str, int]]


class Region(Frozen):
    """Named dimensions over a strided selection of base ranks: the ranks of the mesh that was spawned.

    Immutable and hashable. Every method that reshapes returns a new region over (some of) the same base ranks.
    """

    __slots__ = ("_extent", "_ndslice", "_runs")

    _extent: Extent
    _ndslice: NDSlice
    _runs: "tuple[Run, ...] | None"  # cached at first use

    def __init__(self, labels: Sequence[str], slice: NDSlice) -> None:
        self._fill(_extent=Extent(labels, slice.sizes), _ndslice=slice, _runs=None)

    @property
    def labels(self) -> list[str]:
        """Names of the dimensions, outermost first."""
        return self._extent.labels

    @property
    def ndslice(self) -> NDSlice:
        """The base ranks, without the names."""
        return self._ndslice

    @property
    def extent(self) -> Extent:
        """Names and sizes, without the base ranks."""
        return self._extent

    @property
    def sizes(self) -> dict[str, int]:
        """Size of each dimension by name."""
        return dict(self._extent)

    def size(self, dim: str | Sequence[str] | None = None) -> int:
        """Returns the size of one dimension, or the product of several or (by default) all. Raises KeyError."""
        if dim is None:
            return self._extent.nelements
        if isinstance(dim, str):
            return self._extent[dim]
        return math.prod(self._extent[name] for name in dim)

    @overload
    def slice(self, /) -> NDSlice: ...
    @overload
    def slice(self, /, **dims: Selector) -> "Region": ...
    def slice(self, /, **dims: Selector) -> "NDSlice | Region":
        """Returns the base ranks, as in torchmonarch; with dimensions, the result of `sliced`."""
        return self.sliced(**dims) if dims else self._ndslice

    def sliced(self, /, **dims: Selector) -> "Region":
        """Returns the part of this region at an index (drops the dimension) or slice (keeps it) of some dimensions.

        TypeError on an unknown dimension, IndexError on an index outside 0 … size - 1, ValueError on an empty slice.
        """
        self._check(dims)
        sizes = self._extent
        return self._chosen({name: _picked(name, sizes[name], selector) for name, selector in dims.items()})

    def pick(self, /, **dims: "Selector | Sequence[int]") -> "Region":
        """As `sliced`, and also at several indices of a dimension, in ascending order: `pick(gpus=[0, 2, 3])`.

        Raises what `sliced` raises, ValueError for no index at all.
        """
        self._check(dims)
        chosen: dict[str, int | Sequence[int]] = {}
        for name, selector in dims.items():
            size = self._extent[name]
            if not isinstance(selector, Sequence):
                chosen[name] = _picked(name, size, selector)
                continue
            indices = sorted({_index(name, size, index) for index in selector})
            if not indices:
                raise ValueError(f"no index of dimension {name!r} is picked; a mesh must keep at least one")
            step = indices[1] - indices[0] if len(indices) > 1 else 1
            even = range(indices[0], indices[-1] + 1, step)
            chosen[name] = even if list(even) == indices else indices
        return self._chosen(chosen)

    def _check(self, dims: Iterable[str]) -> None:
        unknown = [name for name in dims if name not in self._extent]
        if unknown:
            raise DimensionError(f"mesh has no dimension {unknown[0]!r}; {known_dims(self.labels, unknown[0])}")

    def _chosen(self, chosen: "Mapping[str, int | Sequence[int]]") -> "Region":
        ranks = self._ndslice
        labels = [name for name in self.labels if not isinstance(chosen.get(name), int)]
        if isinstance(ranks, PickedSlice) or not all(isinstance(indices, int | range) for indices in chosen.values()):
            by_place = {dim: chosen[name] for dim, name in enumerate(self.labels) if name in chosen}
            return Region(labels, PickedSlice.of(ranks, by_place))
        offset = ranks.offset
        sizes, strides = [], []
        for name, size, stride in zip(self.labels, ranks.sizes, ranks.strides, strict=True):
            picked = chosen.get(name, range(size))
            if isinstance(picked, int):
                offset += picked * stride
            elif isinstance(picked, range):
                offset += picked.start * stride
                sizes.append(len(picked))
                strides.append(stride * picked.step)
        return Region(labels, NDSlice(offset, sizes, strides))

    def union(self, other: "Region") -> "Region":
        """Returns the ranks of both, ascending, along one dimension "rank"; both of one mesh: `hosts=0; gpus=3`."""
        ranks = sorted({*self._ndslice, *other._ndslice})
        return Region(["rank"], PickedSlice([len(ranks)], ranks))

    def split(self, /, **splits: Sequence[str] | SupportsIndex) -> "Region":
        """Splits dimensions: `split(host=('dp', 'pp'), pp=16)`; one size per split may be omitted and is computed.

        ValueError when sizes do not fit, names clash, or a size is for no new dimension.
        """
        parts = _split_sizes(self._extent, splits)
        labels, sizes, strides = [], [], []
        for (name_sizes), stride in zip(parts, self._ndslice.strides, strict=True):
            inner = row_major_strides([size for _, size in name_sizes])
            for (name, size), steps in zip(name_sizes, inner, strict=True):
                labels.append(name)
                sizes.append(size)
                strides.append(stride * steps)
        return Region(labels, NDSlice(self._ndslice.offset, sizes, strides))

    def flatten(self, name: str) -> "Region":
        """Returns all dimensions as one. ValueError unless the base ranks are contiguous and in order."""
        ranks = self._ndslice
        if isinstance(ranks, PickedSlice):
            raise ValueError(f"cannot flatten {self!r}: its ranks were picked one by one; flatten first")
        if not ranks.dense:
            raise ValueError(
                f"cannot flatten sparse mesh: sizes {ranks.sizes} have strides {ranks.strides}, and only "
                f"{list(row_major_strides(ranks.sizes))} would be contiguous; flatten first and slice afterwards"
            )
        return Region([name], NDSlice(ranks.offset, [len(ranks)], [1]))

    def rename(self, /, **names: str) -> "Region":
        """Returns the region with some dimensions renamed: `rename(host='dp')`. ValueError on an unknown one."""
        for old, new in names.items():
            if old not in self._extent:
                raise ValueError(f"cannot rename {old!r}: mesh has no such dimension; {known_dims(self.labels)}")
            if not isinstance(new, str):
                raise ValueError(f"the new name of dimension {old!r} must be a string, got {new!r}")
        return Region([names.get(label, label) for label in self.labels], self._ndslice)

    def ranks(self) -> list[int]:
        """Returns the base ranks, in row-major order of their coordinates."""
        return list(self._ndslice)

    def contains(self, rank: SupportsIndex) -> bool:
        """Returns whether a base rank is in this region."""
        return rank in self._ndslice

    __contains__ = contains

    def overlaps_ranks(self, ranks: Iterable[int]) -> bool:
        """Returns whether any of these base ranks is in this region; takes time per given rank only."""
        return any(rank in self._ndslice for rank in ranks)

    def as_shape(self) -> "Shape":
        """Returns the region as a shape."""
        return Shape.of(self)

    def point_of_base_rank(self, rank: SupportsIndex) -> Point:
        """Returns the point of a base rank in this region. Raises ValueError for other ranks."""
        return Point(self._ndslice.index(rank), self._extent)

    def __len__(self) -> int:
        return len(self._ndslice)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Region):
            return NotImplemented
        return self._extent == other._extent and self._ndslice == other._ndslice

    def __hash__(self) -> int:
        return hash((self._extent, self._ndslice))

    def __reduce__(self) -> tuple[object, ...]:
        return Region, (self.labels, self._ndslice)

    def __repr__(self) -> str:
        ranks = self._ndslice
        if isinstance(ranks, PickedSlice):
            return f"Region({self._extent!r}, ranks={self.ranks()})"
        if ranks.dense:
            return f"Region({self._extent!r}, offset={ranks.offset})" if ranks.offset else f"Region({self._extent!r})"
        return f"Region({self._extent!r}, offset={ranks.offset}, strides={ranks.strides})"


def _picked(name: str, size: int, selector: Selector) -> "int | range":
    if isinstance(selector, BuiltinSlice):
        picked = range(*selector.indices(size))
        shown = _shown_slice(selector)
        if picked.step < 1:
            raise ValueError(f"cannot slice dimension {name!r} by {shown}: steps must be 1 or more")
        if not picked:
            raise ValueError(
                f"the slice {shown} of dimension {name!r}, which has size {size}, is empty; "
                "a mesh must keep at least one index of each dimension"
            )
        return picked
    return _index(name, size, selector)


def _index(name: str, size: int, selector: "SupportsIndex") -> int:
    try:
        index = operator.index(selector)
    except TypeError:
        raise TypeError(f"dimension {name!r} is sliced by an integer or a slice, got {selector!r}") from None
    if not 0 <= index < size:
        raise out_of_range(
            f"index out of range: {name}={index}, but dimension {name!r} has size {size}; indices start at 0 and "
            "negative ones do not count from the end",
            index,
        )
    return index


def _shown_slice(selector: "BuiltinSlice") -> str:
    ends = [selector.start, selector.stop] if selector.step is None else [selector.start, selector.stop, selector.step]
    return ":".join("" if end is None else str(end) for end in ends)


class RegionForm(msgspec.Struct, array_like=True, frozen=True):
    """The serialisable form of a region; `ranks` are its base ranks where they have no strides."""

    labels: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    offset: int = 0
    strides: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()

    @classmethod
    def of(cls, region: Region) -> Self:
        """Returns the serialisable form of a region."""
        ranks = region.ndslice
        labels, sizes = tuple(region.labels), tuple(ranks.sizes)
        if isinstance(ranks, PickedSlice):
            return cls(labels, sizes, ranks.offset, (), tuple(ranks))
        return cls(labels, sizes, ranks.offset, tuple(ranks.strides))

    @property
    def region(self) -> Region:
        """The region."""
        picked = PickedSlice(self.sizes, self.ranks) if self.ranks else None
        return Region(self.labels, picked or NDSlice(self.offset, self.sizes, self.strides))


def region_of_ranks(labels: Sequence[str], sizes: Sequence[int], ranks: Sequence[int]) -> Region:
    """Returns a region of these base ranks, in row-major order of their coordinates; strided where they are even."""
    strides = []
    inner = len(ranks)
    for size in sizes:
        inner //= size
        strides.append(ranks[inner] - ranks[0] if size > 1 else inner)
    if min(strides, default=0) >= 0:
        even = NDSlice(ranks[0], sizes, strides)
        if tuple(even) == tuple(ranks):
            return Region(labels, even)
    return Region(labels, PickedSlice(sizes, ranks))


def _split_sizes(extent: Mapping[str, int], splits: Mapping[str, Sequence[str] | SupportsIndex]) -> list[Parts]:
    """Returns the parts of each dimension of `extent`, from the keywords of `split`. ValueError if they do not fit."""
    names, sizes = _sorted_out(extent, splits)
    unused = set(sizes)
    used: set[str] = set()
    result = []
    for label, total in extent.items():
        parts = names.get(label, (label,))
        for part in parts:
            if part in used:
                raise ValueError(f"Duplicate dimension name {part!r}: a split must give every dimension its own name")
            used.add(part)
        unused -= set(parts)
        result.append(_parts(label, total, parts, sizes))
    if unused:
        raise ValueError(
            f"unused size constraints: {', '.join(map(repr, sorted(unused)))}; no split makes dimensions of these "
            f"names, write for example split(old=({sorted(unused)[0]!r}, 'rest'), ...), where old is a dimension: "
            f"{known_dims(tuple(extent))}"
        )
    return result


def _sorted_out(
    extent: Mapping[str, int], splits: Mapping[str, Sequence[str] | SupportsIndex]
) -> tuple[dict[str, tuple[str, ...]], dict[str, int]]:
    """Separates the keywords: an existing dimension is to be split, any other name is the size of a new one."""
    names: dict[str, tuple[str, ...]] = {}
    sizes: dict[str, int] = {}
    for key, value in splits.items():
        if key in extent:
            if isinstance(value, str) or not isinstance(value, Sequence):
                raise ValueError(
                    f"expected a sequence of dimension names to split {key!r} into, got {value!r}; "
                    f"write for example split({key}=('outer', 'inner'), inner=2)"
                )
            names[key] = tuple(value)
        elif isinstance(value, SupportsIndex):
            sizes[key] = operator.index(value)
            if sizes[key] < 1:
                raise ValueError(f"dimension {key!r} cannot have size {sizes[key]}; sizes in a split are 1 or more")
        else:
            raise ValueError(
                f"{key!r} is not an existing dimension, so its value must be the integer size of a new one, "
                f"got {value!r}; {known_dims(tuple(extent))}"
            )
    return names, sizes


def _parts(label: str, total: int, parts: tuple[str, ...], sizes: Mapping[str, int]) -> Parts:
    unknown = [part for part in parts if part not in sizes]
    if len(unknown) > 1:
        raise ValueError(
            f"Cannot infer size of {' and '.join(map(repr, unknown))}, into which {label!r} of size {total} is split: "
            f"only one may be left out; give the others as arguments, for example {unknown[-1]}=2"
        )
    product = math.prod(sizes[part] for part in parts if part in sizes)
    inferred, remainder = divmod(total, product)
    if remainder or (not unknown and inferred != 1):
        split = ", ".join(f"{part}={sizes.get(part, '?')}" for part in parts)
        raise ValueError(
            f"Dimension {label!r} of size {total} is not evenly divided by ({split}); "
            f"their sizes must multiply to {total}"
        )
    return [(part, sizes.get(part, inferred)) for part in parts]


class Shape(Frozen):
    """Labels over an NDSlice; a Region with other methods."""

    __slots__ = ("_region",)

    _region: Region

    def __init__(self, labels: Sequence[str], slice: NDSlice) -> None:
        self._fill(_region=Region(labels, slice))

    @classmethod
    def of(cls, region: Region) -> "Shape":
        """Returns the shape of a region."""
        return cls(region.labels, region.ndslice)

    @classmethod
    def unity(cls) -> "Shape":
        """Returns one rank without dimensions."""
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
        """The shape as a region."""
        return self._region

    def at(self, label: str, index: SupportsIndex) -> "Shape":
        """Returns the part at one index of a dimension, which is dropped. Errors as Region.sliced."""
        return Shape.of(self._region.sliced(**{label: index}))

    def index(self, /, **indices: SupportsIndex) -> "Shape":
        """Returns the part at one index in each of some dimensions, which are dropped. Errors as Region.sliced."""
        return Shape.of(self._region.sliced(**indices))

    def select(self, label: str, slice: slice) -> "Shape":
        """Returns the part at a slice of a dimension, which is kept. Errors as Region.sliced."""
        return Shape.of(self._region.sliced(**{label: slice}))

    def coordinates(self, rank: SupportsIndex) -> dict[str, int]:
        """Returns the coordinates of a base rank by label. Raises ValueError when it is not in this shape."""
        return dict(zip(self.labels, self.ndslice.coordinates(rank), strict=True))

    def ranks(self) -> list[int]:
        """Returns the base ranks, in row-major order of their coordinates."""
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

    def __str__(self) -> str:
        return "{" + ",".join(f"{label}={size}" for label, size in self.extent.items()) + "}"
