"""Redistribution of a shard on its rank."""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

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
Sums = Callable[[list[torch.Tensor]], list[torch.Tensor]]


class Measured(Protocol):
    """Returns a function that does the same, measured as communication along these mesh dimensions."""

    def __call__(self, dims: tuple[int, ...], call: Callable[[G], R]) -> Callable[[G], R]:
        """Returns the function."""


def unmeasured(dims: tuple[int, ...], call: Callable[[G], R]) -> Callable[[G], R]:
    """Returns the function itself."""
    return call


def mover(now: DTensorSpec, meta: Meta, spec: DTensorSpec) -> Mover:
    """Returns `placed` as a function of the shard.

    What one collective does, or none, is worked out once; PyTorch's own redistribution takes a quarter of a millisecond
    to find it out each time.
    """
    return _simple_mover(now, meta, spec) or (lambda local: placed(local, now, meta, spec))


def _simple_mover(now: DTensorSpec, meta: Meta, spec: DTensorSpec) -> Mover | None:
    """As `mover`, for tensors whose placement along one mesh dimension alone changes; None for others."""
    summed = summed_along(now.placements, meta)
    mesh, stride, finish = spec.mesh, meta.stride, finisher(meta.stride)
    if summed is not None:
        dim, how = summed
        if mesh.size(dim) == 1:
            return lambda local: laid_out(local.clone(), stride)
        group = mesh.get_group(dim).group_name
        return lambda local: finish(_collective.all_reduce.default(local, how, group))
    changed = _changed(now.placements, meta.placements)
    if len(changed) != 1 or carrier(meta.dtype) is not None:
        return None
    dim = changed[0]
    was, wanted = now.placements[dim], meta.placements[dim]
    cut = was if was.is_shard() else wanted
    others = [one for one in (*now.placements[:dim], *now.placements[dim + 1 :]) if not one.is_replicate()]
    if type(cut) is not Shard or any(type(one) is not Shard or one.dim == cut.dim for one in others):
        return None
    size, along = mesh.size(dim), cut.dim
    if was.is_replicate():
        pieces = -(-meta.shape[along] // size)
        first = min(pieces * mesh.get_local_rank(dim), meta.shape[along])
        length = min(pieces, meta.shape[along] - first)
        return lambda local: laid_out(local.narrow(along, first, length).clone(), stride)
    if meta.shape[along] % size:
        return None
    group = mesh.get_group(dim).group_name
    if wanted.is_replicate():

        def gathered(local: torch.Tensor) -> torch.Tensor:
            whole = _wait(_collective.all_gather_into_tensor.default(local.contiguous(), size, group))
            return laid_out(torch.cat(whole.chunk(size), along) if along else whole, stride)

        return gathered
    if not reduced_as_they_are(was, meta.dtype) or not was.is_partial("sum"):
        return None

    def scattered(local: torch.Tensor) -> torch.Tensor:
        parts = torch.cat(local.chunk(size, along)) if along else local.contiguous()
        return finish(_collective.reduce_scatter_tensor.default(parts, "sum", size, group))

    return scattered


def summed_along(now: Sequence[Placement], meta: Meta) -> tuple[int, str] | None:
    """The mesh dimension and operation of the all-reduce that redistributes to a meta; None if it takes more."""
    changed = _changed(now, meta.placements)
    if len(changed) != 1 or not meta.placements[changed[0]].is_replicate():
        return None
    was = now[changed[0]]
    if not isinstance(was, Partial) or not reduced_as_they_are(was, meta.dtype):
        return None
    return changed[0], was.reduce_op


def summing(mesh: DeviceMesh, dim: int, how: str, strides: Sequence[Sequence[int]] | None) -> Sums:
    """Returns a function that reduces tensors of one dtype along a mesh dimension, by one collective.

    With `strides`, of the wholes, it waits, and lays the results out in their order; without, they are pending.
    """
    group = mesh.get_group(dim).group_name

    def summed(given: list[torch.Tensor]) -> list[torch.Tensor]:
        made: list[torch.Tensor]
        if len(given) == 1:
            made = [_collective.all_reduce.default(given[0], how, group)]
        else:
            made = _collective.all_reduce_coalesced.default(given, how, group)
        if strides is None:
            return made
        return [laid_out(_wait(pending), stride) for pending, stride in zip(made, strides, strict=True)]

    return summed


def moving(now: Sequence[Placement], wanted: Sequence[Placement]) -> tuple[int, ...]:
    """The mesh dimensions along which ranks communicate, which cutting a replicated tensor does not need."""
    return tuple(dim for dim in _changed(now, wanted) if not now[dim].is_replicate())


def _changed(now: Sequence[Placement], wanted: Sequence[Placement]) -> list[int]:
    """The mesh dimensions along which the placement changes."""
    pairs = enumerate(zip(now, wanted, strict=True))
    return [dim for dim, (was, will) in pairs if was is not will and was != will]


def finisher(stride: Sequence[int]) -> Mover:
    """Returns a function that waits for a collective; the result is laid out in the order of the whole's strides."""
    return lambda pending: laid_out(_wait(pending), stride)


def _wait(pending: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = _collective.wait_tensor.default(pending)
    return made


def placed(local: torch.Tensor, now: DTensorSpec, meta: Meta, spec: DTensorSpec) -> torch.Tensor:
    """This rank's shard of a tensor that is placed otherwise, laid out in memory in the order of the meta's strides.

    Never the memory of the shard that was given.
    """
    found = laid_out(_moved(local, now, spec), meta.stride)
    return found.clone() if found.untyped_storage()._cdata == local.untyped_storage()._cdata else found


def whole(tensor: DTensor) -> torch.Tensor:
    """The whole tensor, on each rank."""
    spec = tensor._spec
    everywhere = (Replicate(),) * len(spec.placements)
    if spec.placements == everywhere:
        return tensor._local_tensor
    return _moved(tensor._local_tensor, spec, _with(spec, everywhere))


def one_piece_each(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    """Like these placements, but with one piece of the whole on each rank: no several pieces, no parts of a sum."""
    return tuple(
        one if type(one) in (Shard, Replicate) else Shard(one.dim) if isinstance(one, _StridedShard) else Replicate()
        for one in placements
    )


def placed_otherwise(tensor: DTensor, placements: Sequence[Placement]) -> DTensor:
    """A sharded tensor with the same values, placed so; each rank of its mesh calls it."""
    spec = _with(tensor._spec, placements)
    return dtensor(_moved(tensor._local_tensor, tensor._spec, spec), spec, requires_grad=False)


def reduced_as_they_are(placement: Placement, dtype: torch.dtype) -> bool:
    """Returns whether a plain all-reduce of the local values reduces the placement."""
    if type(placement) is not Partial or placement.is_partial("avg") or carrier(dtype) is not None:
        return False
    if dtype == torch.bool:
        return placement.is_partial("product")
    return not (dtype.is_floating_point and _is_extreme(placement))


def laid_out(local: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """The shard, with its elements in memory in the order of the strides of the whole tensor.

    The strides of dimensions of size 1 are as for a dense tensor, too: PyTorch refuses writes to a tensor that read its
    memory by other strides. Returns the same memory where that differs in nothing else.
    """
    wanted = dense(stride, local.shape)
    if local.stride() != wanted:
        if is_in_order(local, stride):
            return local.as_strided(local.shape, wanted)
        laid = torch.empty_strided(local.shape, wanted, dtype=local.dtype, device=local.device)
        local = laid.copy_(local)
    return local


def is_in_order(local: torch.Tensor, stride: Sequence[int]) -> bool:
    """Whether a shard's elements lie so already; the strides of dimensions of size 1 mean nothing."""
    strides = zip(local.shape, local.stride(), dense(stride, local.shape), strict=True)
    return all(size <= 1 or has == wanted for size, has, wanted in strides)


def _moved(local: torch.Tensor, now: DTensorSpec, spec: DTensorSpec) -> torch.Tensor:
    """Redistributes a shard, including to partial placements."""
    parted = [
        dim
        for dim, (was, wanted) in enumerate(zip(now.placements, spec.placements, strict=True))
        if type(wanted) is Partial and was != wanted
    ]
    if not parted:
        return _exchanged(local, now, spec)
    between = [Replicate() if dim in parted else one for dim, one in enumerate(spec.placements)]
    local = _exchanged(local, now, _with(spec, between))
    return _part(
        local, [one for dim, one in enumerate(spec.placements) if dim in parted and spec.mesh.get_local_rank(dim)]
    )


def _part(local: torch.Tensor, others: Sequence[Placement]) -> torch.Tensor:
    """The first rank has all of it, and others have what changes nothing when all are put together, which is exact.

    `others` are the placements along which this rank is not the first.
    """
    for one in others:
        if one.is_partial("sum") or one.is_partial("bor") or one.is_partial("bxor"):
            return torch.zeros_like(local)
        if one.is_partial("product"):
            return torch.ones_like(local)
        if one.is_partial("band"):
            return torch.full_like(local, True if local.dtype == torch.bool else -1)
    return local  # the largest, the smallest and the average of equal ones


def _exchanged(local: torch.Tensor, now: DTensorSpec, spec: DTensorSpec) -> torch.Tensor:
    dtype = local.dtype
    carried = carrier(dtype)
    if dtype == torch.bool and any(one.is_partial("sum") for one in now.placements):
        carried = torch.int32  # true and true would be two
    if carried is not None:
        local = local.to(carried)
    extreme = next((one for one in now.placements if _is_extreme(one)), None)
    if extreme is not None and local.dtype.is_floating_point:
        local = _extremes(local, now, spec, extreme.is_partial("max"))
    else:
        local = redistribute_local_tensor(local, now, spec)
    return local if carried is None else local.to(dtype)


def _extremes(local: torch.Tensor, now: DTensorSpec, spec: DTensorSpec, largest: bool) -> torch.Tensor:
    """The largest or smallest of all ranks; NaN where one has that, which process groups do not look for."""
    missing = local.isnan()
    least, sign = (-torch.inf, 1.0) if largest else (torch.inf, -1.0)
    found = redistribute_local_tensor(local.masked_fill(missing, least), now, spec)
    marks = redistribute_local_tensor(missing.to(local.dtype) * sign, now, spec)
    return found.masked_fill(marks != 0, torch.nan)


def _with(spec: DTensorSpec, placements: Sequence[Placement]) -> DTensorSpec:
    strided = any(isinstance(one, _StridedShard) for one in placements)
    return DTensorSpec(
        spec.mesh,
        tuple(placements),
        tensor_meta=spec.tensor_meta,
        use_strided_shard_as_shard_order=False if strided else None,
    )


def _is_extreme(placement: Placement) -> bool:
    return placement.is_partial("max") or placement.is_partial("min")
