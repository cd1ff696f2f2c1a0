"""Metadata of sharded tensors (global shape, dtype, strides and placements) and their DTensorSpecs."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._ops._math_ops import _NormPartial
from torch.distributed.tensor.placement_types import Placement, _StridedShard

Placements = tuple[Placement, ...]
dtensor: Callable[..., DTensor] = DTensor  # its constructor has no types


class OwnValue(Placement):
    """The placement of values that each rank has alone: operations run on every rank, without exchange between them.

    A tensor has it along all dimensions of its mesh, or along none.
    """

    is_own = True

    def is_shard(self, dim: int | None = None) -> bool:
        """Always false: no dimension is cut."""
        return False

    def is_replicate(self) -> bool:
        """Always false: the values may differ."""
        return False

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """Always false: values are combined only if a program requests it."""
        return False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OwnValue)

    def __hash__(self) -> int:
        return hash(OwnValue)

    def __reduce__(self) -> tuple[object, ...]:
        return OwnValue, ()

    def __repr__(self) -> str:
        return "OwnValue()"


OWN_VALUE = OwnValue()


@dataclass(frozen=True, slots=True)
class MeshLayout:
    """The mesh of a tensor: sizes and names of dimensions, and the kind of device."""

    shape: tuple[int, ...]
    names: tuple[str, ...]
    device: str = "cpu"

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(self.shape)


def replicated(layout: MeshLayout) -> Placements:
    """Returns the placements of a whole copy on every rank."""
    return (Replicate(),) * len(layout.shape)


def own_values(layout: MeshLayout) -> Placements:
    """Returns the placements of a separate value on every rank."""
    return (OWN_VALUE,) * len(layout.shape)


class Meta:
    """All properties of a tensor except its values. Equal metas are the same object, so that they are cheap cache keys.

    `copied` marks a view in PyTorch that has its own memory on the workers, since it cuts a sharded dimension of its
    base.
    """

    __slots__ = ("copied", "dtype", "is_own", "layout", "placements", "shape", "stride")

    layout: MeshLayout
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    placements: Placements
    copied: bool
    is_own: bool  # each rank has its own value

    _interned: ClassVar[dict[tuple[object, ...], "Meta"]] = {}

    @classmethod
    def of(
        cls,
        layout: MeshLayout,
        shape: Sequence[int],
        dtype: torch.dtype,
        placements: Sequence[Placement],
        *,
        stride: Sequence[int] | None = None,
        copied: bool = False,
    ) -> "Meta":
        """Returns the interned object; contiguous unless a global stride in elements is given."""
        sizes = tuple(shape)
        strides = contiguous(sizes) if stride is None else tuple(stride)
        key = (layout, sizes, strides, dtype, tuple(placements), copied)
        meta = cls._interned.get(key)
        if meta is None:
            meta = object.__new__(cls)
            meta.layout, meta.shape, meta.stride, meta.dtype = layout, sizes, strides, dtype
            meta.placements, meta.copied = tuple(placements), copied
            meta.is_own = OWN_VALUE in meta.placements
            cls._interned[key] = meta
        return meta

    @property
    def meta(self) -> "Meta":
        """The meta itself, so that metas can be used as tensor arguments of operations."""
        return self

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor, once."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def is_replicated(self) -> bool:
        """True if every rank has a whole copy."""
        return all(placement.is_replicate() for placement in self.placements)

    @property
    def is_sharded(self) -> bool:
        """True if some mesh dimension cuts the tensor."""
        return any(not (p.is_replicate() or p.is_partial()) for p in self.placements) and not self.is_own

    @property
    def is_uneven(self) -> bool:
        """True if some dimension is not a multiple of the ranks that share it, so that shards differ in size."""
        ways: dict[int, int] = {}
        for size, placement in zip(self.layout.shape, self.placements, strict=True):
            dim = getattr(placement, "dim", None)
            if dim is not None:
                ways[dim] = ways.get(dim, 1) * size * getattr(placement, "split_factor", 1)
        return any(self.shape[dim] % parts for dim, parts in ways.items())

    @property
    def expanded(self) -> tuple[int, ...]:
        """Dimensions along which all elements are one in memory, without dimensions that are cut: shards are copies."""
        cut = {getattr(placement, "dim", None) for placement in self.placements}
        sized = enumerate(zip(self.shape, self.stride, strict=True))
        return tuple(dim for dim, (size, step) in sized if size > 1 and not step and dim not in cut)

    def placed(self, placements: Sequence[Placement]) -> "Meta":
        """Returns the meta with other placements."""
        return Meta.of(self.layout, self.shape, self.dtype, placements, stride=self.stride)

    def as_copy(self) -> "Meta":
        """Returns the meta of a copied view."""
        return Meta.of(self.layout, self.shape, self.dtype, self.placements, stride=self.stride, copied=True)

    def __repr__(self) -> str:
        placed = ", ".join(map(_word, self.placements))
        return f"Meta({tuple(self.shape)}, {str(self.dtype).removeprefix('torch.')}, [{placed}])"

    def __reduce__(self) -> tuple[object, ...]:
        placements = tuple(map(_picklable, self.placements))
        return _rebuilt, (self.layout, self.shape, self.dtype, placements, self.stride, self.copied)


def _rebuilt(
    layout: MeshLayout,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    placements: tuple[Placement | tuple[float], ...],
    stride: tuple[int, ...],
    copied: bool,
) -> Meta:
    converted = [_NormPartial(*placement) if isinstance(placement, tuple) else placement for placement in placements]
    return Meta.of(layout, shape, dtype, converted, stride=stride, copied=copied)


def _picklable(placement: Placement) -> Placement | tuple[float]:
    """Converts a placement for pickling, which would lose the order of partial norms."""
    return (placement.norm_type,) if isinstance(placement, _NormPartial) else placement


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides of a contiguous tensor, in elements."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def dense(stride: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides of a dense tensor of this shape, with its dimensions in the order of the given strides."""
    strides, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda d: (stride[d], -d)):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


def _word(placement: Placement) -> str:
    if isinstance(placement, Shard):
        return f"Shard({placement.dim})"
    if type(placement) is Partial:
        return f"Partial({placement.reduce_op})"
    if isinstance(placement, OwnValue):
        return "own value"
    return "Replicate" if placement.is_replicate() else str(placement)


# Process groups carry these as other dtypes, which represent the same numbers, or as many.
_CARRIERS = {
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.uint64: torch.int64,
    torch.complex32: torch.complex64,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e5m2: torch.float32,
    torch.float8_e4m3fnuz: torch.float32,
    torch.float8_e5m2fnuz: torch.float32,
    torch.float8_e8m0fnu: torch.float32,
}


def carrier(dtype: torch.dtype) -> torch.dtype | None:
    """Returns the other dtype in which collectives carry values of a dtype; None if they carry it directly."""
    return _CARRIERS.get(dtype)


def spec_of(meta: Meta, mesh: DeviceMesh) -> DTensorSpec:
    """Returns the spec of a tensor with this meta.

    Strided shards are results of views of shards, cut in the order of the mesh dimensions; not another order. PyTorch
    treats own values like replicas: as whole tensors without exchange.
    """
    facts = TensorMeta(torch.Size(meta.shape), meta.stride, meta.dtype)
    if meta.is_own:
        return DTensorSpec(mesh, replicated(meta.layout), tensor_meta=facts)
    strided = any(isinstance(p, _StridedShard) for p in meta.placements)
    return DTensorSpec(
        mesh, meta.placements, tensor_meta=facts, use_strided_shard_as_shard_order=False if strided else None
    )
