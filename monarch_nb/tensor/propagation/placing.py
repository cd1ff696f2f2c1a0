"""Redistribution of a shard on its rank."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeGuard, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._redistribute import redistribute_local_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from .meta import Meta, carrier, dense, dtensor

G = TypeVar("G")
R = TypeVar("R")
_collective = torch.ops._c10d_functional
Mover = Callable[[torch.Tensor], torch.Tensor]
Exchanged = Callable[[list[torch.Tensor]], list[torch.Tensor]]
GATHER, SCATTER = "gather", "scatter"


class Exchange(NamedTuple):
    """A collective that several tensors can share."""

    dim: int  # of the mesh
    how: str  # GATHER, SCATTER, or an all-reduce's operation
    axis: int  # the tensor dimension along which pieces are cut


class Measured(Protocol):
    """Wraps functions, so that they are measured as communication along these mesh dimensions."""

    def __call__(self, dims: tuple[int, ...], call: Callable[[G], R]) -> Callable[[G], R]:
        """Returns the wrapped function."""


def unmeasured(dims: tuple[int, ...], call: Callable[[G], R]) -> Callable[[G], R]:
    """Returns the function itself."""
    return call


def mover(now: DTensorSpec, meta: Meta, spec: DTensorSpec) -> Mover:
    """Returns `placed` as a function of the shard.

    Moves by at most one collective are planned once; PyTorch's own redistribution takes a quarter of a millisecond for
    that each time.
    """
    return _simple_mover(now, meta, spec) or (lambda local: placed(local, now, meta, spec))


def _simple_mover(now: DTensorSpec, meta: Meta, spec: DTensorSpec) -> Mover | None:
    """Does the same as `mover` for tensors whose placement changes along one mesh dimension only; None for others."""
    mesh, stride = spec.mesh, meta.stride
    shared = exchanged_along(now.placements, meta)
    if shared is not None:
        dim, how, axis = shared
        if mesh.size(dim) == 1:
            return lambda local: laid_out(local.clone(), stride)
        exchange = exchanging(mesh, dim, how, (axis,), (stride,))
        return lambda local: exchange([local])[0]
    changed = _changed(now.placements, meta.placements)
    if len(changed) != 1 or carrier(meta.dtype) is not None:
        return None
    dim = changed[0]
    old, new = now.placements[dim], meta.placements[dim]
    cut = old if old.is_shard() else new
    if not _is_cut_once(cut, dim, now.placements):
        return None
    size, axis = mesh.size(dim), cut.dim
    if old.is_replicate():
        pieces = -(-meta.shape[axis] // size)
        first = min(pieces * mesh.get_local_rank(dim), meta.shape[axis])
        length = min(pieces, meta.shape[axis] - first)
        return lambda local: laid_out(local.narrow(axis, first, length).clone(), stride)
    if meta.shape[axis] % size or not new.is_replicate():
        return None
    group = mesh.get_group(dim).group_name

    def gathered(local: torch.Tensor) -> torch.Tensor:
        buffer = _wait(_collective.all_gather_into_tensor.default(local.contiguous(), size, group))
        return laid_out(torch.cat(buffer.chunk(size), axis), stride)

    return gathered


def exchanged_along(now: Sequence[Placement], meta: Meta) -> Exchange | None:
    """Returns the shareable collective that redistributes to a meta; None if it takes another kind."""
    changed = _changed(now, meta.placements)
    if len(changed) != 1:
        return None
    dim = changed[0]
    old, new = now[dim], meta.placements[dim]
    if isinstance(old, Partial) and new.is_replicate() and is_plain_reduction(old, meta.dtype):
        return Exchange(dim, old.reduce_op, 0)
    cut = old if old.is_shard() else new
    if carrier(meta.dtype) is not None or not _is_cut_once(cut, dim, now):
        return None
    if meta.shape[cut.dim] % meta.layout.shape[dim]:
        return None
    if new.is_replicate():
        return Exchange(dim, GATHER, 0) if cut.dim == 0 else None
    if old.is_partial("sum") and is_plain_reduction(old, meta.dtype):
        return Exchange(dim, SCATTER, cut.dim)
    return None


def _is_cut_once(cut: Placement, dim: int, placements: Sequence[Placement]) -> TypeGuard[Shard]:
    """Returns whether pieces are plainly cut along a mesh dimension, and are not cut again along others."""
    rest = [placement for index, placement in enumerate(placements) if index != dim and not placement.is_replicate()]
    return type(cut) is Shard and all(type(placement) is Shard and placement.dim != cut.dim for placement in rest)


def exchanging(
    mesh: DeviceMesh, dim: int, how: str, axes: Sequence[int], strides: Sequence[Sequence[int]] | None
) -> Exchanged:
    """Returns a function that redistributes tensors of one dtype along a mesh dimension, by one collective.

    `axes` are the tensor dimensions along which each is cut. With `strides`, of the wholes, it waits, and lays the
    results out in their order; without, the results are pending.
    """
    group, size = mesh.get_group(dim).group_name, mesh.size(dim)

    def begun(shards: list[torch.Tensor]) -> list[torch.Tensor]:
        results: list[torch.Tensor]
        if how == SCATTER:
            results = _scattered(shards, axes, size, group)
        elif how == GATHER:
            results = _gathered([local.contiguous() for local in shards], size, group)
        elif len(shards) == 1:
            results = [_collective.all_reduce.default(shards[0], how, group)]
        else:
            results = _collective.all_reduce_coalesced.default(shards, how, group)
        return results

    if strides is None:
        return begun
    finishers = [finisher(stride) for stride in strides]
    return lambda shards: [finish(pending) for finish, pending in zip(finishers, begun(shards), strict=True)]


def _gathered(shards: list[torch.Tensor], size: int, group: str) -> list[torch.Tensor]:
    if len(shards) == 1:
        return [_collective.all_gather_into_tensor.default(shards[0], size, group)]
    results: list[torch.Tensor] = _collective.all_gather_into_tensor_coalesced.default(shards, size, group)
    return results


def _scattered(shards: Sequence[torch.Tensor], axes: Sequence[int], size: int, group: str) -> list[torch.Tensor]:
    """Begins to sum tensors into pieces, in one buffer: gloo needs a collective for each tensor otherwise."""
    parts = [_cut(local, size, axis) for local, axis in zip(shards, axes, strict=True)]
    rows = [part.view(size, -1) for part in parts]
    flat = torch.cat(rows, 1) if len(rows) > 1 else rows[0]
    summed = _collective.reduce_scatter_tensor.default(flat.view(-1), "sum", size, group)
    pieces = summed.split([row.shape[1] for row in rows])
    return [piece.view(part.shape[1:]) for piece, part in zip(pieces, parts, strict=True)]


def _cut(local: torch.Tensor, size: int, axis: int) -> torch.Tensor:
    """Returns the pieces along a dimension, contiguous in memory, along a new first dimension."""
    if axis:
        return torch.stack(local.chunk(size, axis))
    return local.contiguous().view(size, local.shape[0] // size, *local.shape[1:])


def moving(now: Sequence[Placement], target: Sequence[Placement]) -> tuple[int, ...]:
    """Returns the mesh dimensions along which ranks communicate; cutting a replicated tensor needs none."""
    return tuple(dim for dim in _changed(now, target) if not now[dim].is_replicate())


def _changed(now: Sequence[Placement], target: Sequence[Placement]) -> list[int]:
    """Returns the mesh dimensions along which the placement changes."""
    pairs = enumerate(zip(now, target, strict=True))
    return [dim for dim, (old, new) in pairs if old is not new and old != new]


def finisher(stride: Sequence[int]) -> Mover:
    """Returns a function that waits for a collective.

    The result is laid out in the order of the whole's strides, in new memory.
    """

    def finish(pending: torch.Tensor) -> torch.Tensor:
        result = laid_out(_wait(pending), stride)
        return result.clone() if result.untyped_storage().nbytes() > result.nbytes else result

    return finish


def _wait(pending: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = _collective.wait_tensor.default(pending)
    return result


def placed(local: torch.Tensor, now: DTensorSpec, meta: Meta, spec: DTensorSpec) -> torch.Tensor:
    """Returns this rank's shard after a redistribution, laid out in memory in the order of the meta's strides.

    Never shares memory with `local`.
    """
    result = laid_out(_moved(local, now, spec), meta.stride)
    return result.clone() if result.untyped_storage()._cdata == local.untyped_storage()._cdata else result


def whole(tensor: DTensor) -> torch.Tensor:
    """Returns the whole tensor, on each rank."""
    spec = tensor._spec
    everywhere = (Replicate(),) * len(spec.placements)
    local = tensor._local_tensor
    return local if spec.placements == everywhere else _moved(local, spec, _with(spec, everywhere))


def one_piece_each(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    """Returns like placements with one piece of the whole on each rank: not several pieces, nor parts of a sum."""
    return tuple(
        p if type(p) in (Shard, Replicate) else Shard(p.dim) if isinstance(p, _StridedShard) else Replicate()
        for p in placements
    )


def placed_otherwise(tensor: DTensor, placements: Sequence[Placement]) -> DTensor:
    """Returns a sharded tensor with the same values and other placements; each rank of its mesh calls this."""
    spec = _with(tensor._spec, placements)
    return dtensor(_moved(tensor._local_tensor, tensor._spec, spec), spec, requires_grad=False)


def is_plain_reduction(placement: Placement, dtype: torch.dtype) -> bool:
    """Returns whether a plain all-reduce of the local values reduces the placement."""
    if type(placement) is not Partial or placement.is_partial("avg") or carrier(dtype) is not None:
        return False
    if dtype == torch.bool:
        return placement.is_partial("product")
    return not (dtype.is_floating_point and _is_extreme(placement))


def laid_out(local: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """Returns the shard, with its elements in memory in the order of the strides of the whole tensor.

    The strides of dimensions of size 1 are as for a dense tensor too: PyTorch refuses writes to a tensor that read its
    memory by other strides. Returns the same memory if only these differ.
    """
    strides = dense(stride, local.shape)
    if local.stride() != strides:
        if is_in_order(local, stride):
            return local.as_strided(local.shape, strides)
        copy = torch.empty_strided(local.shape, strides, dtype=local.dtype, device=local.device)
        local = copy.copy_(local)
    return local


def is_in_order(local: torch.Tensor, stride: Sequence[int]) -> bool:
    """Returns whether a shard already has this memory order; strides of dimensions of size 1 do not count."""
    strides = zip(local.shape, local.stride(), dense(stride, local.shape), strict=True)
    return all(size <= 1 or step == expected for size, step, expected in strides)


def _moved(local: torch.Tensor, now: DTensorSpec, spec: DTensorSpec) -> torch.Tensor:
    """Redistributes a shard, including to partial placements."""
    dims = [
        dim
        for dim, (old, new) in enumerate(zip(now.placements, spec.placements, strict=True))
        if type(new) is Partial and old != new
    ]
    if not dims:
        return _exchanged(local, now, spec)
    intermediate = [Replicate() if dim in dims else p for dim, p in enumerate(spec.placements)]
    local = _exchanged(local, now, _with(spec, intermediate))
    return _part(local, [p for dim, p in enumerate(spec.placements) if dim in dims and spec.mesh.get_local_rank(dim)])


def _part(local: torch.Tensor, placements: Sequence[Placement]) -> torch.Tensor:
    """Returns the values on the first rank, and neutral values on others, so that a reduction is exact.

    `placements` are those along which this rank is not the first.
    """
    for placement in placements:
        if placement.is_partial("sum") or placement.is_partial("bor") or placement.is_partial("bxor"):
            return torch.zeros_like(local)
        if placement.is_partial("product"):
            return torch.ones_like(local)
        if placement.is_partial("band"):
            return torch.full_like(local, True if local.dtype == torch.bool else -1)
    return local  # maximum, minimum and average of equal values


def _exchanged(local: torch.Tensor, now: DTensorSpec, spec: DTensorSpec) -> torch.Tensor:
    dtype = local.dtype
    carried = carrier(dtype)
    if dtype == torch.bool and any(p.is_partial("sum") for p in now.placements):
        carried = torch.int32  # two trues would add up to two
    if carried is not None:
        local = local.to(carried)
    extreme = next((p for p in now.placements if _is_extreme(p)), None)
    if extreme is not None and local.dtype.is_floating_point:
        local = _extremes(local, now, spec, extreme.is_partial("max"))
    else:
        local = redistribute_local_tensor(local, now, spec)
    return local if carried is None else local.to(dtype)


def _extremes(local: torch.Tensor, now: DTensorSpec, spec: DTensorSpec, largest: bool) -> torch.Tensor:
    """Returns the largest or smallest values of all ranks; NaN if a rank has NaN, which process groups ignore."""
    missing = local.isnan()
    least, sign = (-torch.inf, 1.0) if largest else (torch.inf, -1.0)
    extremes = redistribute_local_tensor(local.masked_fill(missing, least), now, spec)
    marks = redistribute_local_tensor(missing.to(local.dtype) * sign, now, spec)
    return extremes.masked_fill(marks != 0, torch.nan)


def _with(spec: DTensorSpec, placements: Sequence[Placement]) -> DTensorSpec:
    strided = any(isinstance(p, _StridedShard) for p in placements)
    return DTensorSpec(
        spec.mesh,
        tuple(placements),
        tensor_meta=spec.tensor_meta,
        use_strided_shard_as_shard_order=False if strided else None,
    )


def _is_extreme(placement: Placement) -> bool:
    return placement.is_partial("max") or placement.is_partial("min")
