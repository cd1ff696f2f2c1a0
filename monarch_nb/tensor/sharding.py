"""The conversion of sharding specs to placements, and of local shards to the meta of the whole tensor."""

import math
from collections.abc import Iterable, Sequence

import torch
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from monarch_nb.mesh import ValueMesh
from monarch_nb.shape import spans
from monarch_nb.tensor.placement import place
from monarch_nb.tensor.propagation import MeshLayout, Meta
from monarch_nb.wire import counted

# One entry for each dimension of a tensor: the mesh dimension that shards it, several of them, or None. Or one of
# PyTorch's placements for each dimension of the mesh.
ShardingSpec = Sequence[str | tuple[str, ...] | Placement | None] | Placement | None
LocalTensors = torch.Tensor | Sequence[torch.Tensor] | ValueMesh[torch.Tensor]


def placements_of(spec: object, layout: MeshLayout, ndim: int) -> tuple[Placement, ...]:
    """Returns the placements, one for each mesh dimension, of a tensor of `ndim` dimensions with a sharding spec.

    A spec has one entry for each dimension of the tensor: the name of the mesh dimension that shards it, a tuple of
    several such names, or None. PyTorch's own placements (`[Shard(0), Replicate()]`, one for each mesh dimension) are
    used directly; None alone replicates. Raises ValueError for a spec that does not fit, TypeError for other types.
    """
    if spec is None:
        return (Replicate(),) * len(layout.shape)
    if isinstance(spec, (str, Placement)):
        spec = (spec,)
    if not isinstance(spec, Iterable):
        raise TypeError(f"sharding_spec: {spec!r} is no list of mesh dimensions or placements")
    entries = tuple(spec)
    placements = [entry for entry in entries if isinstance(entry, Placement)]
    if entries and len(placements) == len(entries):
        return _check(placements, layout, ndim)
    if len(entries) != ndim:
        raise ValueError(
            f"sharding_spec has {counted(len(entries), 'entry')}, but the tensor has {ndim} dimensions: give one for "
            "each, None where it is not sharded"
        )
    placements = [Replicate()] * len(layout.shape)
    for dim, entry in enumerate(entries):
        last = -1
        for name in _names(entry):
            mesh_dim = _dimension(layout, name)
            if not placements[mesh_dim].is_replicate():
                raise ValueError(f"sharding_spec: mesh dimension {name!r} shards two dimensions of the tensor")
            if mesh_dim < last:
                raise ValueError(
                    f"sharding_spec: {entry!r} names mesh dimensions in another order than the mesh, "
                    f"{layout.names!r}: the outer one is cut first"
                )
            placements[mesh_dim] = Shard(dim)
            last = mesh_dim
    return tuple(placements)


def _dimension(layout: MeshLayout, name: str) -> int:
    try:
        return layout.names.index(name)
    except ValueError:
        raise ValueError(f"the mesh has no dimension {name!r}; it has {', '.join(map(repr, layout.names))}") from None


def _names(entry: object) -> tuple[str, ...]:
    if entry is None:
        return ()
    if isinstance(entry, str):
        return (entry,)
    if isinstance(entry, (tuple, list)) and all(isinstance(name, str) for name in entry):
        return tuple(entry)
    raise TypeError(f"sharding_spec: {entry!r} is neither a mesh dimension, a tuple of them, None, nor a Placement")


def _check(entries: Sequence[Placement], layout: MeshLayout, ndim: int) -> tuple[Placement, ...]:
    if len(entries) != len(layout.shape):
        sizes = ", ".join(f"{name}={size}" for name, size in zip(layout.names, layout.shape, strict=True))
        raise ValueError(
            f"{len(entries)} placements for a mesh of {len(layout.shape)} dimensions ({sizes}): give one for each"
        )
    placements = []
    for entry in entries:
        dim = getattr(entry, "dim", None)
        if dim is not None and not -ndim <= dim < ndim:
            raise ValueError(f"{entry!r} shards dimension {dim} of a tensor that has {ndim}")
        placements.append(Shard(dim % ndim) if type(entry) is Shard and dim is not None and dim < 0 else entry)
    return tuple(placements)


def locals_of(local_tensors: LocalTensors, layout: MeshLayout) -> list[torch.Tensor]:
    """Returns a local tensor for each rank of a mesh; a single tensor is used on all ranks.

    Raises TypeError for other values than local tensors, ValueError for a wrong number of tensors or several dtypes.
    """
    if isinstance(local_tensors, torch.Tensor):
        local_tensors = [local_tensors] * layout.size
    tensors = list(local_tensors.values() if isinstance(local_tensors, ValueMesh) else local_tensors)
    if len(tensors) != layout.size:
        raise ValueError(
            f"{counted(len(tensors), 'local tensor')} for a mesh of {counted(layout.size, 'rank')}: give one for each"
        )
    for rank, tensor in enumerate(tensors):
        if not isinstance(tensor, torch.Tensor) or tensor.device.type not in ("cpu", "cuda"):
            kind = f"a tensor on {tensor.device}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise TypeError(f"what rank {rank} is to hold is a local tensor, not {kind}")
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise TypeError(
                f"what rank {rank} is to hold is a dense tensor: one.to_dense() or one.dequantize() makes it"
            )
        if tensor.dtype != tensors[0].dtype or tensor.dim() != tensors[0].dim():
            raise ValueError(
                f"ranks 0 and {rank} hold tensors of {tensors[0].dim()} and {tensor.dim()} dimensions, "
                f"{tensors[0].dtype} and {tensor.dtype}: all are parts of one tensor"
            )
    return tensors


def put_together(parts: Sequence[torch.Tensor], layout: MeshLayout, placements: tuple[Placement, ...]) -> Meta:
    """Returns the meta of the tensor with these shards by rank.

    Raises ValueError if their sizes differ from those of PyTorch's shards, or replicas differ.
    """
    shape = list(parts[0].shape)
    for dim in range(len(shape)):
        cutting = [mesh_dim for mesh_dim, kind in enumerate(placements) if isinstance(kind, Shard) and kind.dim == dim]
        shape[dim] = sum(parts[rank].shape[dim] for rank in _ranks_along(layout, cutting))
    placement = place(shape, str(parts[0].dtype), parts[0].element_size(), layout.names, layout.shape, placements)
    for rank, part in enumerate(parts):
        block = placement.block_of[rank]
        expected = placement.blocks[block].shape if block >= 0 else None
        fits = tuple(part.shape) == expected if expected is not None else not part.numel() or 0 in shape
        if not fits:
            raise ValueError(
                f"rank {rank} holds {tuple(part.shape)}. Of a tensor of shape {tuple(shape)}, placed "
                f"{list(placements)}, it holds {expected if expected is not None else 'nothing'}: parts are as "
                "torch.chunk cuts them, all of one size but the last"
            )
    _compare_replicas(parts, layout, placements)
    return Meta.of(layout, shape, parts[0].dtype, placements)


def _ranks_along(layout: MeshLayout, dims: Sequence[int]) -> list[int]:
    """Returns the ranks along some dimensions of a mesh, at index 0 of the others."""
    ranks = [0]
    for dim in dims:
        step = math.prod(layout.shape[dim + 1 :])
        ranks = [rank + index * step for rank in ranks for index in range(layout.shape[dim])]
    return ranks


def _compare_replicas(parts: Sequence[torch.Tensor], layout: MeshLayout, placements: tuple[Placement, ...]) -> None:
    replicated = [dim for dim, placement in enumerate(placements) if placement.is_replicate()]
    divided = [dim for dim in range(len(placements)) if dim not in replicated]
    for first in _ranks_along(layout, divided):
        ranks = [first + rank for rank in _ranks_along(layout, replicated)]
        for rank in ranks[1:]:
            if parts[rank] is not parts[first] and not torch.allclose(parts[rank], parts[first], 0, 0, equal_nan=True):
                names = " and ".join(repr(layout.names[dim]) for dim in replicated)
                raise ValueError(
                    f"ranks {spans((first, rank))} hold different values, and are to be replicas along {names}. "
                    "Shard(dim) says that they are pieces of the tensor, Partial() that it is their sum"
                )
