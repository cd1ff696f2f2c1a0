"""The way that is always right: the operation runs on whole tensors, alike on every rank."""

from collections.abc import Sequence

from .draft import Draft
from .meta import Meta, replicated
from .operation import Leaf, Operation
from .world import World

__all__ = ["gathered"]


def gathered(operation: Operation, leaves: Sequence[Leaf], world: World) -> tuple[Draft, list[int | None]]:
    """A draft that gathers the tensors, runs the operation, and writes back what changes in place.

    Costs an all-gather of each sharded tensor, and nothing where all are whole already.
    """
    draft = Draft(world, operation.metas)
    moved = [draft.gather(at) for at in range(len(operation.metas))]
    metas = [
        None
        if leaf is None
        else Meta.of(
            world.layout,
            tuple(leaf[0].shape),
            leaf[0].dtype,
            replicated(world.layout),
            stride=leaf[0].stride(),
            copied=any(moved[base] != base or operation.metas[base].copied for base in leaf[1]),
        )
        for leaf in leaves
    ]
    registers = draft.local(operation, moved, metas)
    for register in dict.fromkeys(operation.writes):
        if moved[register] != register:
            draft.write(register, moved[register])
    return draft, registers
