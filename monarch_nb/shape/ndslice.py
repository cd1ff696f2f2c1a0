"""Strided n-dimensional selections of ranks, stored as a few integers however many ranks they contain, and the errors
for ranks and names that do not exist.

Each error is both that of Python's own containers and that of torchmonarch in the same place: programs catch either.
"""

import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NoReturn, SupportsIndex, overload

from monarch_nb._deferred import difflib


class OutOfRangeError(IndexError, ValueError):
    """An index, rank or coordinate is out of range."""


class NegativeError(OutOfRangeError, OverflowError):
    """A negative number where none is valid."""


class DimensionError(TypeError, ValueError):
    """A selection names an unknown dimension, as an unknown keyword would be."""


class UnknownLabelError(KeyError, ValueError):
    """A label that is looked up does not exist."""

    def __str__(self) -> str:  # KeyError would quote it
        return str(self.args[0]) if self.args else ""


def out_of_range(text: str, *numbers: int) -> OutOfRangeError:
    """Returns the error for these numbers: NegativeError if one of them is negative."""
    return NegativeError(text) if any(number < 0 for number in numbers) else OutOfRangeError(text)


def known_dims(labels: Sequence[str], meant: str = "") -> str:
    """Returns the end of an error text about an unknown dimension: the known ones, and the one closest to it."""
    if not labels:
        return "it has no dimensions"
    close = difflib.get_close_matches(meant, labels, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"its dimensions are {', '.join(map(repr, labels))}{hint}"


def check_sizes(sizes: Mapping[str, int], prefix: str = "") -> None:
    """Raises ValueError for a size that is no whole number of at least 1; `prefix` begins its text."""
    for label, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{prefix}{label}={size!r} must be a whole number of at least 1")


class Frozen:
    """Refuses assignment to and deletion of attributes; subclasses fill their slots with `_fill`."""

    __slots__ = ()

    def _fill(self, **slots: object) -> None:
        for name, value in slots.items():
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"{type(self).__name__} cannot be changed (tried to set {name!r}); make a new one instead")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{type(self).__name__} cannot be changed (tried to delete {name!r})")


def row_major_strides(sizes: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides of a gapless row-major layout: the last dimension steps by one."""
    strides = itertools.accumulate(reversed(sizes), operator.mul, initial=1)
    return tuple(strides)[: len(sizes)][::-1]


class NDSlice(Frozen):
    """The base ranks `offset + sum(coordinate[d] * strides[d])`, in row-major order of their coordinates.

    No operation takes time in proportion to the number of ranks except iteration.
    """

    __slots__ = ("_hash", "_key", "_len", "_offset", "_sizes", "_steps", "_strides")

    _offset: int
    _sizes: tuple[int, ...]
    _strides: tuple[int, ...]
    _len: int
    _steps: tuple[tuple[int, int, int, int], ...]
    _key: tuple[object, ...]
    _hash: int  # cached, since every call on a slice needs it

    def __init__(self, offset: SupportsIndex, sizes: Sequence[SupportsIndex], strides: Sequence[SupportsIndex]) -> None:
        first = operator.index(offset)
        lengths = tuple(map(operator.index, sizes))
        jumps = tuple(map(operator.index, strides))
        if len(lengths) != len(jumps):
            raise ValueError(f"need one stride for each size, got sizes {list(lengths)} and strides {list(jumps)}")
        if first < 0 or min(lengths, default=0) < 0 or min(jumps, default=0) < 0:
            raise NegativeError(
                f"offset, sizes and strides must not be negative, got {first}, {list(lengths)} and {list(jumps)}"
            )
        self._fill(_offset=first, _sizes=lengths, _strides=jumps)
        # The stride of a dimension of size 1 has no meaning: it is not part of the slice.
        key = (first, lengths, tuple([jump if length > 1 else 0 for length, jump in zip(lengths, jumps, strict=True)]))
        self._fill(_len=math.prod(lengths), _steps=_steps(lengths, jumps), _key=key, _hash=hash(key))

    @classmethod
    def new_row_major(cls, sizes: Sequence[SupportsIndex]) -> "NDSlice":
        """Returns all ranks of a gapless array of these sizes, from rank 0."""
        lengths = tuple(map(operator.index, sizes))
        return cls(0, lengths, row_major_strides(lengths))

    @classmethod
    def from_list(cls, ranks: Iterable[SupportsIndex]) -> "list[NDSlice]":
        """Returns one-dimensional slices that contain these ranks, in ascending order, each as long as possible."""
        remaining = sorted(map(operator.index, ranks))
        slices = []
        while remaining:
            step = remaining[1] - remaining[0] if len(remaining) > 1 else 0
            size = 1
            while step and size < len(remaining) and remaining[size] - remaining[size - 1] == step:
                size += 1
            slices.append(NDSlice(remaining[0], [size], [step if size > 1 else 1]))
            remaining = remaining[size:]
        return slices

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self._sizes)

    @property
    def offset(self) -> int:
        """The base rank at coordinates 0, 0, …"""
        return self._offset

    @property
    def sizes(self) -> list[int]:
        """Length of each dimension."""
        return list(self._sizes)

    @property
    def strides(self) -> list[int]:
        """The distance in base ranks between neighbours along each dimension."""
        return list(self._strides)

    @property
    def dense(self) -> bool:
        """True if the ranks are contiguous and in order; dimensions of size 1 cannot break that."""
        if self._len == 0:
            return True
        dims = zip(self._sizes, self._strides, row_major_strides(self._sizes), strict=True)
        return all(size == 1 or stride == dense for size, stride, dense in dims)

    def nditem(self, coordinates: Sequence[SupportsIndex]) -> int:
        """Returns the base rank at some coordinates. IndexError when they are outside or too few or many."""
        indices = tuple(map(operator.index, coordinates))
        if len(indices) != len(self._sizes):
            raise OutOfRangeError(f"need {len(self._sizes)} coordinates, got {len(indices)}: {list(indices)}")
        if not all(0 <= coordinate < size for coordinate, size in zip(indices, self._sizes, strict=True)):
            raise out_of_range(f"index out of range: coordinates {list(indices)} in sizes {self.sizes}", *indices)
        return self._offset + sum(
            coordinate * stride for coordinate, stride in zip(indices, self._strides, strict=True)
        )

    def get(self, index: SupportsIndex) -> int:
        """Returns the base rank at a row-major index; the inverse of `index`. IndexError outside 0 … len - 1."""
        position = operator.index(index)
        if not 0 <= position < self._len:
            raise out_of_range(f"index out of range: {position} in a slice of {self._len} ranks", position)
        rank = self._offset
        for size, stride in zip(reversed(self._sizes), reversed(self._strides), strict=True):
            position, coordinate = divmod(position, size)
            rank += coordinate * stride
        return rank

    def coordinates(self, rank: SupportsIndex) -> list[int]:
        """Returns the coordinates of a base rank. Raises ValueError when it is not in this slice."""
        base = operator.index(rank)
        found = self._locate(base)
        if found is None:
            raise out_of_range(f"rank {base} is not in {self!r}", base)
        return found

    def index(self, rank: SupportsIndex) -> int:
        """Returns the row-major index of a base rank. ValueError when it is not in this slice."""
        index = 0
        for coordinate, size in zip(self.coordinates(rank), self._sizes, strict=True):
            index = index * size + coordinate
        return index

    def _locate(self, rank: int) -> list[int] | None:
        if self._len == 0:
            return None
        coordinates = [0] * len(self._sizes)
        return coordinates if _descend(self._steps, 0, rank - self._offset, coordinates) else None

    def __contains__(self, rank: object) -> bool:
        return isinstance(rank, SupportsIndex) and self._locate(operator.index(rank)) is not None

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[int]:
        if not self._sizes:
            yield self._offset
            return
        *outer, (size, stride) = zip(self._sizes, self._strides, strict=True)
        for offsets in itertools.product(*(_offsets(length, jump) for length, jump in outer)):
            start = self._offset + sum(offsets)
            yield from (start + step for step in _offsets(size, stride))

    @overload
    def __getitem__(self, index: SupportsIndex) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...
    def __getitem__(self, index: SupportsIndex | slice) -> int | tuple[int, ...]:
        if isinstance(index, slice):
            return tuple(self.get(position) for position in range(*index.indices(self._len)))
        return self.get(index)

    def __eq__(self, other: object) -> bool:
        return self._key == other._key if isinstance(other, NDSlice) else NotImplemented

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[object, ...]:
        return NDSlice, (self._offset, self._sizes, self._strides)

    def __repr__(self) -> str:
        return f"NDSlice(offset={self._offset}, sizes={self.sizes}, strides={self.strides})"


def _offsets(size: int, stride: int) -> Sequence[int]:
    return range(0, size * stride, stride) if stride else (0,) * size


def _steps(sizes: tuple[int, ...], strides: tuple[int, ...]) -> tuple[tuple[int, int, int, int], ...]:
    """Returns (dimension, size, stride, reach of all later ones), widest stride first; omits those that never move."""
    moving = [(stride, dim) for dim, stride in enumerate(strides) if stride and sizes[dim] > 1]
    steps: list[tuple[int, int, int, int]] = []
    reach = 0
    for stride, dim in sorted(moving):
        steps.append((dim, sizes[dim], stride, reach))
        reach += (sizes[dim] - 1) * stride
    return tuple(reversed(steps))


def _descend(steps: tuple[tuple[int, int, int, int], ...], level: int, rest: int, coordinates: list[int]) -> bool:
    """Finds coordinates that sum up to `rest`; tries one candidate per level, or several for interleaving strides."""
    if level == len(steps):
        return rest == 0
    dim, size, stride, reach = steps[level]
    for coordinate in range(max(0, -((reach - rest) // stride)), min(size - 1, rest // stride) + 1):
        coordinates[dim] = coordinate
        if _descend(steps, level + 1, rest - coordinate * stride, coordinates):
            return True
    return False


Slice = NDSlice


class PickedSlice(NDSlice):
    """Base ranks in row-major order of their coordinates, each stored by itself: memory grows with their number.

    It has no strides; reading them raises ValueError.
    """

    __slots__ = ("_places", "_ranks")

    _ranks: tuple[int, ...]
    _places: dict[int, int]

    def __init__(self, sizes: Sequence[SupportsIndex], ranks: Sequence[int]) -> None:
        lengths = tuple(map(operator.index, sizes))
        super().__init__(ranks[0], lengths, row_major_strides(lengths))
        if len(ranks) != self._len:
            raise ValueError(f"need one rank for each place of sizes {list(lengths)}, got {len(ranks)}")
        key = (lengths, tuple(ranks))
        self._fill(_ranks=tuple(ranks), _places={rank: position for position, rank in enumerate(ranks)})
        self._fill(_key=key, _hash=hash(key))

    @classmethod
    def of(cls, ranks: NDSlice, chosen: Mapping[int, "int | Sequence[int]"]) -> "PickedSlice":
        """Returns those of some ranks at an index (drops the dimension) or at some indices of the dimensions given."""
        dims = [chosen.get(dim, range(size)) for dim, size in enumerate(ranks.sizes)]
        indices = [(picked,) if isinstance(picked, int) else picked for picked in dims]
        sizes = [len(picked) for picked in dims if not isinstance(picked, int)]
        return cls(sizes, [ranks.nditem(coordinates) for coordinates in itertools.product(*indices)])

    @property
    def strides(self) -> list[int]:
        """Raises ValueError: these ranks are not evenly spaced."""
        raise ValueError(f"ranks {list(self._ranks)} were picked one by one and have no strides")

    @property
    def dense(self) -> bool:
        """True if the ranks are contiguous and in order."""
        return all(after - before == 1 for before, after in itertools.pairwise(self._ranks))

    def nditem(self, coordinates: Sequence[SupportsIndex]) -> int:
        """Returns the base rank at some coordinates. IndexError when they are outside or too few or many."""
        return self._ranks[super().nditem(coordinates) - self._offset]

    def get(self, index: SupportsIndex) -> int:
        """Returns the base rank at a row-major index. IndexError outside 0 … len - 1."""
        return self._ranks[super().get(index) - self._offset]

    def _locate(self, rank: int) -> list[int] | None:
        position = self._places.get(rank)
        if position is None:
            return None
        coordinates = []
        for stride in row_major_strides(self._sizes):
            coordinate, position = divmod(position, stride)
            coordinates.append(coordinate)
        return coordinates

    def __iter__(self) -> Iterator[int]:
        return iter(self._ranks)

    def __reduce__(self) -> tuple[object, ...]:
        return PickedSlice, (self._sizes, self._ranks)

    def __repr__(self) -> str:
        return f"PickedSlice(sizes={self.sizes}, ranks={list(self._ranks)})"
