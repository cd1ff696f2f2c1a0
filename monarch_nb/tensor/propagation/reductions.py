"""Drafts of reductions, gathers and scatters of the ranks' own values, by PyTorch's redistributions."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from .draft import Draft
from .meta import OWN_VALUE, Meta, dense, own_values
from .operation import Operation
from .plan import OperationPlan, ResultSlot, Slot, builder
from .world import World

aten = torch.ops.aten
REDUCTIONS = ("stack", "sum", "avg", "product", "min", "max", "band", "bor", "bxor")


@dataclass(frozen=True, slots=True)
class Reduction:
    """`kind` of `REDUCTIONS` along these dimensions of a mesh, by index.

    With `scatter` each rank along the only dimension has its part of the result. `target`: the result is written into
    the tensor itself ("self") or into a second one ("out"), or is a new tensor ("").
    """

    kind: str
    dims: tuple[int, ...]
    scatter: bool = False
    target: str = ""


def reduction(world: World, metas: Sequence[Meta], request: Reduction, number: int) -> OperationPlan:
    """Makes the plan of a reduction of a tensor; a second tensor is written to."""
    draft, meta, size = Draft(world, metas), metas[0], metas[0].layout.shape[request.dims[0]]

    def along(placement: Placement) -> tuple[Placement, ...]:
        return tuple(placement if dim in request.dims else Replicate() for dim in range(len(meta.layout.shape)))

    def viewed(source: int, func: torch._ops.OpOverload, args: tuple[object, ...], view: Meta) -> int:
        source_meta = draft.metas[source]
        (register,) = draft.local(Operation(func, (Slot(0), *args), {}, (source_meta,)), (source,), (view,))
        assert register is not None
        return register

    def placed(shape: Sequence[int], placements: Sequence[Placement]) -> Meta:
        return Meta.of(meta.layout, shape, meta.dtype, placements)

    if request.kind == "stack":
        parts = viewed(0, aten.unsqueeze.default, (0,), placed((size, *meta.shape), along(Shard(0))))
        if request.scatter:
            moved = draft.redistribute(parts, along(Shard(1)))
            result, shape = (
                viewed(moved, aten.squeeze.dim, (1,), placed(meta.shape, own_values(meta.layout))),
                meta.shape,
            )
        else:
            moved = draft.redistribute(parts, along(Replicate()))
            shape = (size, *meta.shape)
            result = viewed(moved, aten.alias.default, (), placed(shape, own_values(meta.layout)))
    else:
        parts = viewed(0, aten.clone.default, (), placed(meta.shape, along(Partial(request.kind))))
        if request.scatter:
            moved, shape = draft.redistribute(parts, along(Shard(0))), meta.shape[1:]
            result = viewed(moved, aten.squeeze.dim, (0,), placed(shape, own_values(meta.layout)))
        else:
            moved, shape = draft.redistribute(parts, along(Replicate())), meta.shape
            result = viewed(moved, aten.alias.default, (), placed(shape, own_values(meta.layout)))
    written = {"self": 0, "out": 1}.get(request.target)
    if written is not None:
        draft.write(written, result)
    return OperationPlan(
        number=number,
        operation="reduce_" if request.target == "self" else "reduce",
        program=draft.program(() if written is not None else (result,)),
        made=() if written is not None else (draft.metas[result],),
        build=builder(ResultSlot(0) if written is None else ResultSlot(written, given=True)),
        writes=() if written is None else (written,),
        collectives=tuple(draft.collectives),
        own=True,
        agrees=True,
    )


def retagged(
    world: World, meta: Meta, placements: Sequence[Placement], shape: Sequence[int], number: int
) -> OperationPlan:
    """Makes the plan that gives the values on the ranks other placements, in the same memory."""
    draft, own = Draft(world, (meta,)), OWN_VALUE in placements
    view = Meta.of(meta.layout, shape, meta.dtype, placements, stride=dense(meta.stride, shape))
    (register,) = draft.local(Operation(aten.alias.default, (Slot(0),), {}, (meta,)), (0,), (view,))
    assert register is not None
    return OperationPlan(
        number=number,
        operation="per_rank" if own else "as_sharded",
        program=draft.program((register,)),
        made=(view,),
        build=builder(ResultSlot(0)),
        views=((0, 0),),
        offsets=(0,),
        own=own,
        agrees=not own,
    )
