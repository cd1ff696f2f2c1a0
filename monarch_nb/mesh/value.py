"""Meshes of plain values, the answers of a call on every member of a mesh; shown in few lines, equal values once."""

import operator
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, Self, SupportsIndex, TypeVar, cast

from monarch_nb._package import imported
from monarch_nb.shape import Extent, MeshTrait, Point, Region, Shape, UnknownLabelError, out_of_range, places_of, spans
from monarch_nb.shape.ndslice import PickedSlice
from monarch_nb.wire import error_line, repr_of

T = TypeVar("T")
LINES = 11  # at most, without the heading
WIDTH = 120  # characters of one value
PLACES = 40  # characters of the places that have that value
COSTLY = 256  # values other than plain scalars whose repr is computed, at most
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]{6,}")
SCALARS = frozenset({int, bool, str, bytes, type(None)})  # cheap to compare, and equal ones read the same
FEW = 8  # the most elements that are shown themselves
HASHED = 16 * 2**20  # bytes; larger arrays are equal only to themselves


class Lazy(Generic[T]):
    """Calls `thunk` once, on the first `get`, and keeps its result. Safe to share between threads.

    If the thunk raises, so does `get`, and the next `get` tries again: a missing module can be imported meanwhile.
    """

    __slots__ = ("_lock", "_thunk", "_value")

    def __init__(self, thunk: Callable[[], T]) -> None:
        self._thunk: Callable[[], T] | None = thunk
        self._lock = threading.RLock()  # re-entrant: decoding a value may read its own mesh
        self._value: T

    @property
    def decoded(self) -> bool:
        """True once the value is decoded."""
        return self._thunk is None

    def get(self) -> T:
        """Returns the value. Blocks while another thread is making it; raises the thunk's error."""
        if self._thunk is None:
            return self._value
        with self._lock:
            if self._thunk is not None:
                self._value = self._thunk()
                self._thunk = None  # after the value: readers without the lock check this first
            return self._value

    def __repr__(self) -> str:
        return f"Lazy({self._value!r})" if self.decoded else "Lazy(not decoded yet)"


class ValueMesh(MeshTrait, Generic[T]):
    """One value for each place of an extent, in row-major order; iteration yields (point, value).

    Received values are decoded at their first use. Raises ValueError unless there is a value for every place.
    """

    _values: Sequence[T | Lazy[T]]
    _base: Region | None = None

    def __init__(self, shape: Shape | Region | Extent, values: Iterable[T]) -> None:
        self._fill(_region_of(shape), tuple(values))

    @classmethod
    def from_indexed(cls, shape: Shape | Region | Extent, pairs: Iterable[tuple[SupportsIndex, T]]) -> Self:
        """Makes a mesh of values that are given with their ranks, in any order; the last one of a rank counts.

        Raises ValueError when a rank has no value, or a value no rank.
        """
        region = _region_of(shape)
        by_rank = {operator.index(rank): value for rank, value in pairs}
        for rank in by_rank:
            if not 0 <= rank < len(region):
                raise out_of_range(f"a value for rank {rank}, but {region.extent!r} has {len(region)} places", rank)
        missing = [rank for rank in range(len(region)) if rank not in by_rank]
        if missing:
            raise ValueError(f"no value for {len(missing)} of the {len(region)} places of {region.extent!r}: "
                             f"ranks {spans(missing)}")  # fmt: skip
        return cls(region, [by_rank[rank] for rank in range(len(region))])

    @classmethod
    def _of_lazy(cls, shape: Shape | Region | Extent, values: Iterable[T | Lazy[T]]) -> Self:
        """Makes a mesh some of whose values are still to be decoded."""
        mesh = cls.__new__(cls)
        mesh._fill(_region_of(shape), tuple(values))
        return mesh

    @classmethod
    def _of_thunks(
        cls, shape: Shape | Region | Extent, thunks: Iterable[Callable[[], T]], base: Region | None = None
    ) -> Self:
        """Makes a mesh whose values these callables make, each called at most once with success.

        `base` is the whole mesh that `shape` is a part of: values are shown with their places there.
        """
        mesh = cls._of_lazy(shape, map(Lazy, thunks))
        mesh._base = None if base is None else _base_of(base, mesh._region)
        return mesh

    def _fill(self, region: Region, values: Sequence[T | Lazy[T]]) -> None:
        if len(values) != len(region):
            expected = f"{len(region)} places of {region.extent!r}"
            raise ValueError(f"need one value for each of the {expected}, got {len(values)}")
        self.__region = region
        self._values = values

    @property
    def _region(self) -> Region:
        return self.__region

    def _new_with_region(self, region: Region) -> Self:
        index = self._ndslice.index
        part = self._of_lazy(region, [self._values[index(rank)] for rank in region.ndslice])
        part._base = _base_of(self._base or self._region, region)
        return part

    def _locate(self, indices: Sequence[int]) -> str:
        """Returns the places of some of its values, as `gpus=2-3`, in the mesh that this is a part of."""
        ranks = self._ndslice
        return places_of(self._base or self._region, [ranks.get(index) for index in indices])

    def get(self, rank: SupportsIndex) -> T:
        """Returns the value at a row-major index in this mesh. Raises IndexError outside 0 … len - 1."""
        index = operator.index(rank)
        if not 0 <= index < len(self._values):
            raise out_of_range(f"index out of range: rank {index} in a ValueMesh of {len(self._values)} values", index)
        value = self._values[index]
        return value.get() if isinstance(value, Lazy) else value

    def item(self, /, **coordinates: SupportsIndex) -> T:
        """Returns the value at the index given for every dimension; no arguments for a mesh of no dimensions.

        Raises KeyError when a dimension is missing or unknown, IndexError when an index is out of range.
        """
        labels = self._labels
        missing = [label for label in labels if label not in coordinates]
        if missing:
            example = ", ".join(f"{label}=0" for label in labels)
            raise UnknownLabelError(
                f"item needs an index for every dimension, missing: {missing}; for example item({example})"
            )
        extra = [name for name in coordinates if name not in labels]
        if extra:
            raise UnknownLabelError(f"item has extra dimensions: {extra}; the mesh has {list(labels)}")
        return self.get(self._ndslice.index(self._ndslice.nditem([coordinates[label] for label in labels])))

    def values(self) -> list[T]:
        """Returns all values, in rank order."""
        return [self.get(rank) for rank in range(len(self))]

    def items(self) -> Iterator[tuple[Point, T]]:
        """Returns an iterator of all (point, value) pairs, in rank order."""
        return iter(self)

    def __iter__(self) -> Iterator[tuple[Point, T]]:
        extent = self.extent
        return ((Point(rank, extent), self.get(rank)) for rank in range(len(self)))

    def __eq__(self, other: object) -> bool:
        """Compares names, sizes and values; arrays are equal when all their elements are."""
        if not isinstance(other, ValueMesh):
            return NotImplemented
        return self.extent == other.extent and all(map(_equal, self.values(), other.values()))

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self._region, self.values())

    def __repr__(self) -> str:
        full = len(self) == len(self._base or self._region)
        return f"ValueMesh({self.extent!r}):" + describe(len(self), self.get, self._locate, full=full)


def places_in(values: ValueMesh[object], indices: Sequence[int]) -> str:
    """Returns the places of some values, as `gpus=2-3`, in the mesh that this is a part of."""
    return values._locate(indices)


def _base_of(base: Region, part: Region) -> Region | None:
    """Returns `base` if `part` is a slice of it, so that places have the same names; None after a split or rename."""
    if isinstance(base.ndslice, PickedSlice) or isinstance(part.ndslice, PickedSlice):
        return base  # ranks that were picked one by one have no coordinates of their own
    dims = {label: (size, stride) for label, size, stride in _dimensions(base)}
    for label, size, stride in _dimensions(part):
        length, step = dims.get(label, (0, 1))
        if size > length or stride % step:
            return None
    return base


def _dimensions(region: Region) -> Iterator[tuple[str, int, int]]:
    return zip(region.labels, region.ndslice.sizes, region.ndslice.strides, strict=True)


def _region_of(shape: Shape | Region | Extent) -> Region:
    return shape if isinstance(shape, Region) else shape.region


def _equal(left: object, right: object) -> bool:
    if left is right:
        return True
    if getattr(left, "shape", None) != getattr(right, "shape", None):
        return False  # arrays would broadcast
    same = left == right
    try:
        return bool(same)
    except (ValueError, RuntimeError, TypeError):  # more than one element: ask the array for all of them
        return bool(cast(Any, same).all())


def describe(count: int, get: Callable[[int], object], locate: Callable[[list[int]], str], *, full: bool = True) -> str:
    """Returns the text after a value mesh's heading: further lines, or the rest of its line if no values are shown.

    `locate` names places, `full` says that there are no others in the mesh. Never raises errors of a value or of its
    decoding.
    """
    if not count:
        return "\n  (no values)"
    if nothing_in(count, get):
        return f" None on {_all_ranks(count) if full else locate(list(range(count)))}"
    groups, unseen = grouped(count, get)
    shown = groups if len(groups) + bool(unseen) <= LINES else groups[: LINES - 1]
    lines = [f"  {_prefix(ranks, count, locate, full)}{text}" for ranks, text in shown]
    hidden = sum(len(ranks) for ranks, _ in groups[len(shown) :]) + unseen
    if hidden:
        lines.append(f"  … and {hidden} more rank{'s' if hidden > 1 else ''}; see .items() or .get(rank)")
    return "".join(f"\n{line}" for line in lines)


def _all_ranks(count: int) -> str:
    return "its rank" if count == 1 else f"all {count} ranks"


def nothing_in(count: int, get: Callable[[int], object]) -> bool:
    """Returns whether all these values are None, as of calls that return nothing. Never raises errors of decoding."""
    try:
        return all(get(rank) is None for rank in range(count))
    except Exception:  # a value that cannot be decoded is not None
        return False


def grouped(count: int, get: Callable[[int], object]) -> tuple[list[tuple[list[int], str]], int]:
    """Returns ranks with equal values and their text, in order of first rank; and how many ranks were left out.

    Arrays of more than a few elements are summarized. Never raises errors of a value or of its decoding.
    """
    groups: dict[object, tuple[list[int], str]] = {}
    # Texts and keys by identity; holds the value so that its identity stays its own.
    cache: dict[int, tuple[object, str, object]] = {}
    for rank in range(count):
        try:
            value = get(rank)
        except (Exception, SystemExit) as error:  # a class that is missing here must not hide the other values
            value = _Unreadable(f"<cannot be decoded: {error_line(error)}>")
        key: object
        if type(value) in SCALARS:
            key = type(value), value
        elif issubclass(type(value), (float, _Unreadable)):
            key = type(value), repr_of(value)  # nan and -0.0 differ from how they compare
        elif id(value) in cache or len(cache) < COSTLY:
            entry = cache.get(id(value))
            if entry is None:
                text = _repr(value)
                entry = cache[id(value)] = value, text, (text, _content(value))
            key = entry[2]
        else:  # thousands of tensors take seconds to print
            return list(groups.values()), count - rank
        if key not in groups:
            groups[key] = [], _line(cache[id(value)][1] if id(value) in cache else _repr(value))
        groups[key][0].append(rank)
    return list(groups.values()), 0


class _Unreadable:
    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _repr(value: object) -> str:
    try:
        summary = _array_text(value)
    except Exception:  # an array without numbers
        summary = None
    if summary is not None:
        return summary
    # Only the start of a long text will be shown, and its repr can take seconds.
    if isinstance(value, str | bytes) and type(value) in (str, bytes):
        return repr(value[: 2 * WIDTH])
    return _ADDRESS.sub("", repr_of(value))  # the address of a copy means nothing


def _line(text: str) -> str:
    joined = " ".join(text.split()) if "\n" in text else text
    return joined if len(joined) <= WIDTH else joined[: WIDTH - 1] + "…"


def _prefix(ranks: list[int], count: int, locate: Callable[[list[int]], str], full: bool) -> str:
    if full and len(ranks) == count > 1:
        return f"all {count} ranks: "
    location = locate(ranks)
    if len(location) > PLACES:
        location = f"{location[:PLACES].rpartition(',')[0]},… ({len(ranks)} ranks)"
    return f"{location}: " if location else ""


def _kind(value: object) -> str:
    torch, numpy = imported("torch"), imported("numpy")
    if torch is not None and isinstance(value, torch.Tensor):
        return "tensor"
    return "array" if numpy is not None and isinstance(value, numpy.ndarray) else ""


def _array_text(value: Any) -> str | None:
    """Returns a summary of a tensor or array of more than a few elements; None for anything else."""
    kind = _kind(value)
    if not kind:
        return None
    count = value.numel() if kind == "tensor" else value.size
    if count <= FEW:
        return None
    device = getattr(value, "device", None) if kind == "tensor" else None
    suffix = f" {device}" if device is not None and device.type != "cpu" else ""
    heading = f"{kind} {tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}{suffix}"
    try:
        facts = _range(value, kind)
    except Exception:  # no numbers in it, or none that can be computed here
        facts = ""
    return f"{heading}: {facts}" if facts else heading


def _range(value: Any, kind: str) -> str:
    if kind == "tensor":
        data = value.detach().double()
        nonfinite = int((~data.isfinite()).sum())
        data = data[data.isfinite()] if nonfinite else data
        size = data.numel()
    else:
        data = value.astype(float)
        finite = (data - data) == 0
        nonfinite = int((~finite).sum())
        data = data[finite] if nonfinite else data
        size = data.size
    parts = []
    if size:
        parts = [f"min {float(data.min()):.4g}", f"max {float(data.max()):.4g}", f"mean {float(data.mean()):.4g}"]
    if nonfinite:
        parts.append(f"{nonfinite} not finite")
    return ", ".join(parts)


def _content(value: Any) -> object:
    """Returns a key that is equal for arrays with equal elements; None for other values."""
    kind = _kind(value)
    if not kind:
        return None
    try:
        plain = (
            value.detach().cpu().contiguous().view(sys.modules["torch"].uint8).numpy() if kind == "tensor" else value
        )
        return hash(plain.tobytes()) if plain.nbytes <= HASHED else id(value)
    except Exception:
        return id(value)
