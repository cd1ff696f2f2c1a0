"""What PyTorch's own sharding rules make of an operation, and whether that can be trusted."""

import torch
from torch.distributed.tensor import DTensor

from .accounting import Recorder
from .draft import Draft
from .meta import Meta
from .operation import Operation
from .plan import Collective
from .world import World

__all__ = ["Unfit", "by_rules"]

Leaves = list[tuple[torch.Tensor, tuple[int, ...]] | None]


class Unfit(Exception):
    """The rules have no answer, or one that would be wrong. The text says why."""


def by_rules(operation: Operation, leaves: Leaves, worlds: list[World]) -> tuple[Draft, list[int | None]]:
    """A draft that calls the operation on sharded tensors, and the registers of its leaves.

    Each world is another rank's view: what goes well on the first may fail on the last, which has a smaller shard.
    """
    metas, collectives = _seen(operation, leaves, worlds[0])
    for world in worlds[1:]:
        if _seen(operation, leaves, world)[0] != metas:
            raise Unfit("ranks disagree on the placement of its result")
    draft = Draft(worlds[0], operation.metas)
    registers = draft.call(operation, metas, collectives)
    return draft, [_reduced(draft, at) for at in registers]


def _seen(operation: Operation, leaves: Leaves, world: World) -> tuple[list[Meta | None], list[Collective]]:
    fresh = bool(operation.writes)
    tensors = [world.fake(meta, fresh=fresh) for meta in operation.metas]
    args, kwargs = operation.filled(tensors.__getitem__)
    recorder = Recorder(world.dims)
    try:
        with recorder:
            result = operation.func(*args, **kwargs)
    except Exception as error:
        raise Unfit(_reason(error)) from error
    for tensor, meta in zip(tensors, operation.metas, strict=True):
        if fresh and (tensor.placements != meta.placements or tuple(tensor.shape) != meta.shape):
            raise Unfit("it would change the placement of a tensor in place")
    found = _flat(result)
    if len(found) != len(leaves):
        raise Unfit("it returns another number of tensors")
    metas = [
        None if leaf is None else _checked(operation, tensors, leaf, tensor, world)
        for leaf, tensor in zip(leaves, found, strict=True)
    ]
    return metas, recorder.found


def _checked(
    operation: Operation,
    tensors: list[DTensor],
    leaf: tuple[torch.Tensor, tuple[int, ...]],
    tensor: object,
    world: World,
) -> Meta:
    plain, bases = leaf
    if not isinstance(tensor, DTensor):
        raise Unfit("its result is no sharded tensor")
    local = tensor._local_tensor
    if tensor.shape != plain.shape or tensor.dtype != plain.dtype:
        raise Unfit(f"its result would be {_facts(tensor)} instead of {_facts(plain)}")
    if tuple(local.shape) != world.local_shape(tensor._spec) or local.dtype != plain.dtype:
        raise Unfit(f"shards of its result would have the shape {tuple(local.shape)}, which does not fit together")
    if any(meta.is_uneven for meta in operation.metas) and any(p.is_partial("avg") for p in tensor.placements):
        raise Unfit("means of shards that differ in size are not the mean of all")
    if operation.random and any(p.is_partial() for p in tensor.placements):
        raise Unfit("random numbers of different ranks would be added")
    meta = world.meta(tensor)
    if bases and not any(_shares(local, tensors[base]) for base in bases):
        return Meta.of(meta.layout, meta.shape, meta.dtype, meta.placements, stride=meta.stride, copied=True)
    return meta


def _reduced(draft: Draft, register: int | None) -> int | None:
    """A sum over masked shards may be asked for once only: it is made a whole tensor right away."""
    if register is None:
        return None
    placements = draft.metas[register].placements
    if not any(type(p).__name__.endswith("MaskPartial") for p in placements):
        return register
    whole = draft.gather(register)
    return whole


def _shares(local: torch.Tensor, base: DTensor) -> bool:
    return bool(local.untyped_storage()._cdata == base._local_tensor.untyped_storage()._cdata)


def _facts(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}"


def _flat(result: object) -> list[object]:
    if isinstance(result, list | tuple):
        return [leaf for each in result for leaf in _flat(each)]
    return [result]


def _reason(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
