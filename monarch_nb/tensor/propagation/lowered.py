"""Drafts operations that run on shards after redistributing the inputs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .draft import Draft
from .meta import Meta, Placements
from .operation import Leaf, Operation
from .shapes import REAL, imagined, on_real_tensors
from .world import World

__all__ = ["Lowering", "Unfit", "lowered"]


class Unfit(Exception):
    """Running the operation on shards would be wrong. The text says why."""


@dataclass(frozen=True)
class Lowering:
    """A way to run an operation: placements of inputs and results, and the operation on shards."""

    operation: Operation
    inputs: tuple[Placements, ...]
    outputs: tuple[Placements | None, ...]


def lowered(way: Lowering, leaves: Sequence[Leaf], worlds: Sequence[World]) -> tuple[Draft, list[int | None]]:
    """Drafts a way to run an operation; returns the registers of the leaves. Raises Unfit if shards do not fit.

    Each world is the view of another rank, since an operation may fail only on the last rank, whose shard is smaller.
    """
    operation, draft = way.operation, Draft(worlds[0], way.operation.metas)
    moved = [draft.redistribute(at, placements) for at, placements in enumerate(way.inputs)]
    for register in operation.writes:
        if moved[register] != register:
            raise Unfit("a tensor that changes in place would have to be placed otherwise")
    metas = [
        None if leaf is None else _meta(operation, leaf, placements, moved, worlds[0])
        for leaf, placements in zip(leaves, way.outputs, strict=True)
    ]
    differ = any(meta.is_uneven for meta in (*draft.metas, *filter(None, metas)))
    for world in worlds if differ else worlds[:1]:  # else all ranks have shards of one size
        _tried(operation, [draft.metas[at] for at in moved], leaves, metas, world)
    return draft, draft.local(operation, moved, metas)


def _meta(
    operation: Operation, leaf: tuple[torch.Tensor, tuple[int, ...]], placements: Placements | None, moved: list[int],
    world: World,
) -> Meta:  # fmt: skip
    plain, bases = leaf
    if placements is None:
        raise Unfit("it says nothing of the placement of a result")
    return Meta.of(
        world.layout,
        tuple(plain.shape),
        plain.dtype,
        placements,
        stride=plain.stride(),
        copied=any(moved[base] != base or operation.metas[base].copied for base in bases),
    )


def _tried(
    operation: Operation, given: list[Meta], leaves: Sequence[Leaf], metas: Sequence[Meta | None], world: World
) -> None:
    """Checks the operation on fake shards: it must succeed, with results of the expected local shapes."""
    fresh = bool(operation.writes)
    shards = [world.fake(meta, fresh=fresh)._local_tensor for meta in given]
    args, kwargs = operation.filled(shards.__getitem__)
    try:
        result = imagined(operation, args, kwargs)
    except Exception as error:
        raise Unfit(reason(error)) from error
    if any(not shard.numel() and math.prod(meta.shape) for shard, meta in zip(shards, given, strict=True)):
        _run_without(operation, shards)
    found = flat(result)
    if len(found) != len(leaves):
        raise Unfit("it returns another number of tensors on shards")
    for leaf, shard, meta in zip(leaves, found, metas, strict=True):
        if leaf is None or meta is None:
            continue
        if not isinstance(shard, torch.Tensor) or shard.dtype != meta.dtype:
            raise Unfit("it returns something else on shards")
        if tuple(shard.shape) != world.local_shape(meta):
            raise Unfit(f"a shard of its result would have the shape {tuple(shard.shape)}, which does not fit")
        if leaf[1] and not meta.copied and not any(_share(shard, shards[base]) for base in leaf[1]):
            raise Unfit("it copies on shards what is a view of the whole")


def _run_without(operation: Operation, shards: Sequence[torch.Tensor]) -> None:
    """Runs the operation on real tensors for a rank with an empty shard, which kernels reject more often than fakes.

    The minimum of no numbers, for example, has a shape but no value.
    """
    if sum(shard.numel() for shard in shards) > REAL:
        raise Unfit("a rank has nothing of it")
    try:
        on_real_tensors(operation, shards)
    except Exception as error:
        raise Unfit(f"a rank has nothing of it: {reason(error)}") from error


def _share(first: torch.Tensor, second: torch.Tensor) -> bool:
    return bool(first.untyped_storage()._cdata == second.untyped_storage()._cdata)


def flat(result: object) -> list[object]:
    """The leaves of what an operation returns."""
    if isinstance(result, list | tuple):
        return [leaf for item in result for leaf in flat(item)]
    return [result]


def reason(error: Exception) -> str:
    """An error in one line."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
