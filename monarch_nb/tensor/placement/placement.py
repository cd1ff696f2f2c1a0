"""Placement of a tensor: its sharding by mesh dimensions, its blocks, their ranks and sizes."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import msgspec

from monarch_nb.shape import Extent, spans
from monarch_nb.wire import size_text

Span = tuple[int, int]  # from, to: half open
Spans = tuple[Span, ...]  # ascending and disjoint; empty for a rank without a part


def length(spans: Iterable[Span]) -> int:
    """Returns the total length of the spans."""
    return sum(stop - start for start, stop in spans)


def cut(spans: Spans, pieces: int, index: int, factor: int = 1) -> Spans:
    """Returns piece `index` of `pieces`, by the rule of PyTorch's Shard; with a `factor`, of its _StridedShard."""
    if factor == 1:
        return _chunk(spans, pieces, index)
    result: list[Span] = []
    for part in range(factor):
        result += _chunk(_chunk(spans, factor, part), pieces, index)
    return _merge(result)


def _chunk(spans: Spans, pieces: int, index: int) -> Spans:
    total = length(spans)
    size = -(-total // pieces)
    return _slice(spans, index * size, min((index + 1) * size, total))


def _slice(spans: Spans, first: int, last: int) -> Spans:
    """Returns the sub-spans from index `first` to `last` in the concatenated spans."""
    result: list[Span] = []
    before = 0
    for start, stop in spans:
        begin, end = max(first - before, 0), min(last - before, stop - start)
        if begin < end:
            result.append((start + begin, start + end))
        before += stop - start
    return tuple(result)


def _merge(spans: Iterable[Span]) -> Spans:
    result: list[Span] = []
    for start, stop in sorted(spans):
        if result and result[-1][1] == start:
            result[-1] = (result[-1][0], stop)
        else:
            result.append((start, stop))
    return tuple(result)


class Shard(msgspec.Struct, frozen=True, tag="shard"):
    """Splits dimension `dim` of the tensor as torch.chunk does: the last pieces may be smaller, or empty.

    With `factor` > 1 the dimension has that many equal parts, each is split, and a rank has one piece of each.
    """

    dim: int
    factor: int = 1

    def __str__(self) -> str:
        return f"Shard({self.dim})" if self.factor == 1 else f"Shard({self.dim}, in {self.factor} parts)"


class Replicate(msgspec.Struct, frozen=True, tag="replicate"):
    """Replicates the tensor on every rank."""

    def __str__(self) -> str:
        return "Replicate()"


class OwnValues(Replicate, frozen=True, tag="own"):
    """Every rank has a value of its own, of the shape of the tensor."""

    def __str__(self) -> str:
        return "own value on each rank"


class Partial(msgspec.Struct, frozen=True, tag="partial"):
    """Every rank has a partial value of each element; the reduction with `op` is the tensor."""

    op: str = "sum"

    def __str__(self) -> str:
        return f"Partial({self.op})"


Kind = Shard | Replicate | OwnValues | Partial
K = TypeVar("K", Shard, Replicate, OwnValues, Partial)


def kind_of(placement: object) -> Kind:
    """Converts a placement of PyTorch or of this module. Raises TypeError for anything else."""
    if isinstance(placement, Kind):
        return placement
    if hasattr(placement, "reduce_op"):
        return Partial(str(placement.reduce_op))
    if hasattr(placement, "dim"):
        return Shard(int(placement.dim), int(getattr(placement, "split_factor", 1)))
    if getattr(placement, "is_own", False):
        return OwnValues()
    if getattr(placement, "is_replicate", bool)():
        return Replicate()
    raise TypeError(f"{placement!r} is no placement: use Shard(dim), Replicate() or Partial(op)")


def shape_text(shape: Sequence[int]) -> str:
    """Returns the sizes of a tensor: 1024×64; "scalar" without any."""
    return "×".join(map(str, shape)) or "scalar"


class Block(msgspec.Struct, frozen=True):
    """A part of the tensor that some ranks hold: spans along each dimension, usually one."""

    spans: tuple[Spans, ...]
    ranks: tuple[int, ...]  # ascending; never empty
    nbytes: int  # on each of them

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the block."""
        return tuple(map(length, self.spans))

    def index(self, shape: Sequence[int]) -> str:
        """Index of the block into the whole tensor, such as `[0:256, :]`."""
        texts = [
            ":" if ranges == ((0, size),) else "+".join(f"{start}:{stop}" for start, stop in ranges)
            for ranges, size in zip(self.spans, shape, strict=True)
        ]
        return f"[{', '.join(texts)}]" if texts else "[()]"


class Placement(msgspec.Struct, frozen=True):
    """Placement of a tensor. Ranks are row-major in the mesh with these labels and sizes."""

    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    labels: tuple[str, ...]
    sizes: tuple[int, ...]
    kinds: tuple[Kind, ...]  # one for each dimension of the mesh
    blocks: tuple[Block, ...]  # in row-major order of their starts
    block_of: tuple[int, ...]  # the number of each rank's block; -1 for none

    @property
    def extent(self) -> Extent:
        """The mesh's names and sizes."""
        return Extent(self.labels, self.sizes)

    @property
    def nbytes(self) -> int:
        """The size of the logical tensor."""
        return math.prod(self.shape) * self.itemsize

    @property
    def held(self) -> int:
        """Bytes on all ranks together."""
        return sum(block.nbytes * len(block.ranks) for block in self.blocks)

    @property
    def largest(self) -> int:
        """Bytes on the rank with the most."""
        return max((block.nbytes for block in self.blocks), default=0)

    @property
    def even(self) -> bool:
        """True if every rank has the same number of bytes."""
        return -1 not in self.block_of and len({block.nbytes for block in self.blocks}) <= 1

    @property
    def empty(self) -> tuple[int, ...]:
        """The ranks without a part of it."""
        return tuple(rank for rank, block in enumerate(self.block_of) if block < 0)

    def bytes_on(self, rank: int) -> int:
        """Returns the bytes on one rank."""
        block = self.block_of[rank]
        return self.blocks[block].nbytes if block >= 0 else 0

    def dims(self, kind: type[K]) -> Iterator[tuple[str, int, K]]:
        """Yields label, size and kind of the mesh dimensions of this kind, without those of size 1."""
        for label, size, entry in zip(self.labels, self.sizes, self.kinds, strict=True):
            if size > 1 and isinstance(entry, kind):
                yield label, size, entry

    @property
    def copies(self) -> int:
        """Number of replicas."""
        return math.prod(size for _, size, _ in self.dims(Replicate))

    @property
    def parts(self) -> int:
        """Number of partial values for each element."""
        return math.prod(size for _, size, _ in self.dims(Partial))

    def point(self, rank: int) -> tuple[int, ...]:
        """Returns the coordinates of a rank."""
        return _point(self.sizes, rank)

    def colour_point(self, block: int) -> tuple[tuple[int, int], ...]:
        """Returns coordinates that determine the colour of a block: (index, size) for each sharding dimension."""
        point = self.point(self.blocks[block].ranks[0])
        return tuple(
            (point[dim], size)
            for dim, (size, kind) in enumerate(zip(self.sizes, self.kinds, strict=True))
            if size > 1 and isinstance(kind, Shard)
        )

    def describe(self, block: int, name: str = "") -> str:
        """Returns a text about a block: index, size and ranks."""
        part = self.blocks[block]
        is_plural = len(part.ranks) > 1
        ranks = f"rank{'s' if is_plural else ''} {spans(part.ranks)}"
        return f"{name}{part.index(self.shape)} · {shape_text(part.shape)} · {size_text(part.nbytes)} · {ranks}"


def place(
    shape: Sequence[int],
    dtype: str,
    itemsize: int,
    labels: Sequence[str],
    sizes: Sequence[int],
    placements: Sequence[object],
) -> Placement:
    """Computes the placement of a tensor of a global shape, with one placement for each mesh dimension.

    Placements are PyTorch's or those of this package. They apply from left to right as in PyTorch: a dimension that is
    sharded twice is sharded within its pieces. Raises ValueError if they do not fit the mesh or the tensor.
    """
    kinds = tuple(map(kind_of, placements))
    if not len(labels) == len(sizes) == len(kinds):
        raise ValueError(f"a mesh with dimensions {list(labels)} needs {len(labels)} placements, not {len(kinds)}")
    tables = [_cuts_of(size, dim, sizes, _normalize(kinds, len(shape))) for dim, size in enumerate(shape)]
    ranks: dict[tuple[Spans, ...], list[int]] = {}
    empty = 0 not in shape  # every rank has all of a tensor without elements
    for rank in range(math.prod(sizes)):
        point = _point(sizes, rank)
        key = tuple(table[tuple(point[mesh_dim] for mesh_dim in cutting)] for cutting, table in tables)
        if all(key) or not empty:
            ranks.setdefault(key, []).append(rank)
    block_of = [-1] * math.prod(sizes)
    blocks = []
    for number, key in enumerate(sorted(ranks)):
        values = math.prod(map(length, key))
        blocks.append(Block(key, tuple(ranks[key]), values * itemsize))
        for rank in ranks[key]:
            block_of[rank] = number
    return Placement(tuple(shape), dtype, itemsize, tuple(labels), tuple(sizes), kinds, tuple(blocks), tuple(block_of))


def _normalize(kinds: Sequence[Kind], ndim: int) -> list[Kind]:
    """Returns the kinds with non-negative dimensions."""
    normal: list[Kind] = []
    for kind in kinds:
        if isinstance(kind, Shard):
            if not -ndim <= kind.dim < ndim:
                raise ValueError(f"{kind} does not fit a tensor of {ndim} dimensions")
            kind = Shard(kind.dim % ndim, kind.factor)
        normal.append(kind)
    return normal


def _cuts_of(
    size: int, dim: int, sizes: Sequence[int], kinds: Sequence[Kind]
) -> tuple[list[int], dict[tuple[int, ...], Spans]]:
    """Returns the mesh dimensions that shard one of the tensor's, and the spans at each of their coordinates."""
    cutting = [mesh_dim for mesh_dim, kind in enumerate(kinds) if isinstance(kind, Shard) and kind.dim == dim]
    full: Spans = ((0, size),) if size else ()
    table: dict[tuple[int, ...], Spans] = {(): full}
    for mesh_dim in cutting:
        kind = kinds[mesh_dim]
        assert isinstance(kind, Shard)
        table = {
            (*key, piece): cut(before, sizes[mesh_dim], piece, kind.factor)
            for key, before in table.items()
            for piece in range(sizes[mesh_dim])
        }
    return cutting, table


def _point(sizes: Sequence[int], rank: int) -> tuple[int, ...]:
    point = []
    for size in reversed(sizes):
        rank, index = divmod(rank, size)
        point.append(index)
    return tuple(reversed(point))
