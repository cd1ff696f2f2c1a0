"""Composes programs of several operations, each planned as if issued alone."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch.distributed.tensor.placement_types import Placement

from .counting import counted_from_front
from .draft import Draft
from .meta import Placements
from .operation import Operation, slots
from .partial import summed
from .plan import Slot

__all__ = ["Writer"]


class Writer:
    """Adds operations to a draft; a call returns the slot of the first result."""

    def __init__(
        self, operation: Operation, draft: Draft, ask: Callable[[Operation], tuple[Draft, list[int | None]]]
    ) -> None:
        self._operation = operation
        self._draft = draft
        self._ask = ask

    def __call__(self, func: torch._ops.OpOverload, *args: object, **kwargs: object) -> Slot:
        """Adds an operation; returns the slot of the first result."""
        return self.all(func, *args, **kwargs)[0]

    def all(self, func: torch._ops.OpOverload, *args: object, **kwargs: object) -> list[Slot]:
        """Adds an operation; returns the slots of all results."""
        args, kwargs = counted_from_front(func, args, kwargs, self._shape) or (args, kwargs)
        registers = [*slots(list(args)), *slots(list(kwargs.values()))]
        numbers = iter(range(len(registers)))

        def renumbered(given: object) -> object:
            if isinstance(given, Slot):
                return Slot(next(numbers))
            return type(given)(map(renumbered, given)) if isinstance(given, list | tuple) else given

        inner, results = self._ask(
            replace(
                self._operation,
                func=func,
                args=tuple(renumbered(a) for a in args),
                kwargs={name: renumbered(a) for name, a in kwargs.items()},
                metas=tuple(self._draft.metas[at] for at in registers),
            )
        )
        at = self._draft.splice(inner, registers)
        return [Slot(at[register]) for register in results if register is not None]

    def whole(self, slot: Slot) -> Slot:
        """The tensor, replicated."""
        return Slot(self._draft.gather(slot.register))

    def summed(self, slot: Slot) -> Slot:
        """The tensor, reduced if it is partial."""
        placements = self._draft.metas[slot.register].placements
        return Slot(self._draft.redistribute(slot.register, summed(placements)))

    def cut(self, slot: Slot, placements: Sequence[Placement]) -> Slot:
        """The tensor with these placements."""
        return Slot(self._draft.redistribute(slot.register, tuple(placements)))

    def like(self, slot: Slot, other: Slot) -> Slot:
        """The tensor with the placements of another one."""
        return Slot(self._draft.redistribute(slot.register, self._draft.metas[other.register].placements))

    def placements(self, slot: Slot) -> Placements:
        """The placements of a slot."""
        return self._draft.metas[slot.register].placements

    def _shape(self, given: object) -> tuple[int, ...] | None:
        return self.shape(given) if isinstance(given, Slot) else None

    def shape(self, slot: Slot) -> tuple[int, ...]:
        """The global shape of a slot."""
        return self._draft.metas[slot.register].shape
