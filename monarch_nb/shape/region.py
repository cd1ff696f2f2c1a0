"""Regions: what a mesh is, apart from what its members are."""

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Self, SupportsIndex, TypeAlias, overload

import msgspec

from .errors import DimensionError, known_dims, out_of_range
from .extent import Extent, Point
from .frozen import Frozen
from .ndslice import NDSlice, row_major_strides
from .picked import PickedSlice

if TYPE_CHECKING:
    from monarch_nb.wire.header import Run

    from .shape import Shape

# What picks along one dimension: an integer takes the dimension away, a slice keeps it.
Selector: TypeAlias = "SupportsIndex | slice"
BuiltinSlice = slice
# The dimensions that one dimension becomes, outermost first: name and size.
Parts: TypeAlias = list[tuple[str, int]]


class Region(Frozen):
    """Named dimensions over a strided selection of base ranks: the ranks of the mesh that was spawned.

    Immutable and hashable. Every method that reshapes returns a new region over (some of) the same base ranks.
    """

    __slots__ = ("_extent", "_ndslice", "_runs")

    _extent: Extent
    _ndslice: NDSlice
    _runs: "tuple[Run, ...] | None"  # once they were asked for

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
        """Size of one dimension, or the product of several; of all by default. KeyError on an unknown one."""
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
        """The base ranks, as torchmonarch's programs ask for them; with dimensions, what `sliced` gives."""
        return self.sliced(**dims) if dims else self._ndslice

    def sliced(self, /, **dims: Selector) -> "Region":
        """The part of this region at an index (takes that dimension away) or slice (keeps it) of some dimensions.

        TypeError on an unknown dimension, IndexError on an index outside 0 … size - 1, ValueError on an empty slice.
        """
        self._check(dims)
        sizes = self._extent
        return self._chosen({name: _picked(name, sizes[name], selector) for name, selector in dims.items()})

    def pick(self, /, **dims: "Selector | Sequence[int]") -> "Region":
        """Like `sliced`, and also the part at some indices of a dimension, in rising order: `pick(gpus=[0, 2, 3])`.

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
        if isinstance(ranks, PickedSlice) or not all(isinstance(each, int | range) for each in chosen.values()):
            by_place = {place: chosen[name] for place, name in enumerate(self.labels) if name in chosen}
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
        """The ranks of both, in rising order, along one dimension "rank"; of the same mesh, as in `hosts=0; gpus=3`."""
        ranks = sorted({*self._ndslice, *other._ndslice})
        return Region(["rank"], PickedSlice([len(ranks)], ranks))

    def split(self, /, **splits: Sequence[str] | SupportsIndex) -> "Region":
        """Splits dimensions: `split(host=('dp', 'pp'), pp=16)`; one size per split may be left out and is worked out.

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
        """All dimensions as a single one. ValueError unless the base ranks are contiguous and in order."""
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
        """The same region with other names for some dimensions: `rename(host='dp')`. ValueError on an unknown one."""
        for old, new in names.items():
            if old not in self._extent:
                raise ValueError(f"cannot rename {old!r}: mesh has no such dimension; {known_dims(self.labels)}")
            if not isinstance(new, str):
                raise ValueError(f"the new name of dimension {old!r} must be a string, got {new!r}")
        return Region([names.get(label, label) for label in self.labels], self._ndslice)

    def ranks(self) -> list[int]:
        """The base ranks, in row-major order of their coordinates."""
        return list(self._ndslice)

    def contains(self, rank: SupportsIndex) -> bool:
        """Whether a base rank is in this region."""
        return rank in self._ndslice

    __contains__ = contains

    def overlaps_ranks(self, ranks: Iterable[int]) -> bool:
        """Whether any of these base ranks is in this region; costs time per rank given, not per rank held."""
        return any(rank in self._ndslice for rank in ranks)

    def as_shape(self) -> "Shape":
        """The same as a shape."""
        from .shape import Shape  # shapes build on regions, not the other way round

        return Shape.of(self)

    def point_of_base_rank(self, rank: SupportsIndex) -> Point:
        """Where in this region a base rank is. ValueError when it is not."""
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


def _index(name: str, size: int, selector: object) -> int:
    try:
        index = operator.index(selector)  # type: ignore[arg-type]  # that is what is tried
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
    """A region; `ranks` are its base ranks where no strides lead from one to the next."""

    labels: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    offset: int = 0
    strides: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()

    @classmethod
    def of(cls, region: Region) -> Self:
        """What travels of a region."""
        ranks = region.ndslice
        labels, sizes = tuple(region.labels), tuple(ranks.sizes)
        if isinstance(ranks, PickedSlice):
            return cls(labels, sizes, ranks.offset, (), tuple(ranks))
        return cls(labels, sizes, ranks.offset, tuple(ranks.strides))

    @property
    def region(self) -> Region:
        """The region itself."""
        picked = PickedSlice(self.sizes, self.ranks) if self.ranks else None
        return Region(self.labels, picked or NDSlice(self.offset, self.sizes, self.strides))


def region_of_ranks(labels: Sequence[str], sizes: Sequence[int], ranks: Sequence[int]) -> Region:
    """A region of these base ranks, in row-major order of their coordinates; by strides where they are even."""
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
    """The parts each dimension of `extent` becomes, from the keywords of `split`. ValueError if they do not fit."""
    names, sizes = _sorted_out(extent, splits)
    unused = set(sizes)
    taken: set[str] = set()
    result = []
    for label, total in extent.items():
        parts = names.get(label, (label,))
        for part in parts:
            if part in taken:
                raise ValueError(f"Duplicate dimension name {part!r}: a split must give every dimension its own name")
            taken.add(part)
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
    """Takes the keywords apart: an existing dimension is what to split, any other name is the size of a new one."""
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
    known = math.prod(sizes[part] for part in parts if part in sizes)
    inferred, left = divmod(total, known)
    if left or (not unknown and inferred != 1):
        wanted = ", ".join(f"{part}={sizes.get(part, '?')}" for part in parts)
        raise ValueError(
            f"Dimension {label!r} of size {total} is not evenly divided by ({wanted}); "
            f"their sizes must multiply to {total}"
        )
    return [(part, sizes.get(part, inferred)) for part in parts]
