"""The way that is always right: the operation runs on whole tensors, alike on every rank."""

import torch

from .draft import Draft
from .meta import Meta, replicated
from .operation import Operation
from .plan import Slot
from .world import World

__all__ = ["gathered"]

Leaves = list[tuple[torch.Tensor, tuple[int, ...]] | None]


def gathered(operation: Operation, leaves: Leaves, world: World) -> tuple[Draft, list[int | None]]:
    """A draft that gathers the tensors, runs the operation, and writes back what changes in place.

    Costs an all-gather of each sharded tensor, and nothing where all are whole already.
    """
    draft = Draft(world, operation.metas)
    moved = {at: draft.gather(at) for at in range(len(operation.metas))}

    def placed(given: object) -> object:
        if isinstance(given, Slot):
            return Slot(moved[given.register])
        if isinstance(given, list | tuple):
            return type(given)(map(placed, given))
        return given

    metas = [None if leaf is None else _meta(operation, moved, leaf, world) for leaf in leaves]
    kwargs = {name: placed(a) for name, a in operation.kwargs.items()}
    registers = draft.local(operation.name, [placed(a) for a in operation.args], kwargs, metas)
    for register in dict.fromkeys(operation.writes):
        if moved[register] != register:
            draft.write(register, moved[register])
    return draft, registers


def _meta(
    operation: Operation, moved: dict[int, int], leaf: tuple[torch.Tensor, tuple[int, ...]], world: World
) -> Meta:
    plain, bases = leaf
    return Meta.of(
        world.layout,
        tuple(plain.shape),
        plain.dtype,
        replicated(world.layout),
        stride=plain.stride(),
        copied=any(moved[base] != base or operation.metas[base].copied for base in bases),
    )
