"""What a sharded operation comes down to on one rank: often one operation on its own shards, which then need not ask.

PyTorch's sharded tensors work out for each call, again, that nothing has to move. Here the first call of a step is
watched; where it ran one operation on the shards as they are, later calls do so themselves. That costs a third.
"""

from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.utils._python_dispatch import TorchDispatchMode

from .plan import Call, Scalar, Slot

__all__ = ["Watch", "ran_directly"]


class Watch(TorchDispatchMode):
    """Notes the operations on plain tensors that run while it is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[tuple[object, tuple[object, ...], dict[str, object]]] = []

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: tuple[type, ...],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Let sharded tensors take themselves apart; note what comes of it."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        self.seen.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def ran_directly(
    step: Call, watch: Watch, registers: Sequence[object], result: object
) -> tuple[tuple[object, ...], dict[str, object], tuple[DTensorSpec | None, ...]] | None:
    """The arguments of the one operation on shards that a step came down to, with the step's own slots in them, and
    the specs of its results; None where it took more than that.
    """
    if len(watch.seen) != 1:
        return None
    func, args, kwargs = watch.seen[0]
    if str(func) != step.operation:
        return None
    try:
        found_args = _matched(step.args, args, registers)
        found_kwargs = {name: _matched(step.kwargs.get(name), value, registers) for name, value in kwargs.items()}
    except _OtherError:
        return None
    if not isinstance(found_args, tuple) or len(args) < len(step.args) or step.kwargs.keys() - kwargs.keys():
        return None
    specs = []
    for value, register in zip(_results(result), step.out, strict=True):
        if register is not None and not isinstance(value, DTensor):
            return None
        specs.append(value._spec if register is not None and isinstance(value, DTensor) else None)
    return found_args, found_kwargs, tuple(specs)


class _OtherError(Exception):
    """The operation on shards takes something that the step does not have."""


def _matched(given: object, ran: object, registers: Sequence[object]) -> object:
    """What ran, with slots for shards."""
    if isinstance(given, Slot):
        whole = registers[given.register]
        if not isinstance(whole, DTensor) or ran is not whole._local_tensor:
            raise _OtherError
        return given
    if isinstance(given, Scalar):
        return given
    if isinstance(ran, torch.Tensor):
        raise _OtherError
    if isinstance(ran, list | tuple):
        held = given if isinstance(given, list | tuple) else ()
        if any(isinstance(one, Slot | Scalar) for one in held) and len(held) != len(ran):
            raise _OtherError
        each = [_matched(held[at] if at < len(held) else None, one, registers) for at, one in enumerate(ran)]
        return tuple(each) if isinstance(ran, tuple) else each
    if _has_slot(given):
        raise _OtherError
    return ran


def _has_slot(given: object) -> bool:
    return isinstance(given, Slot | Scalar) or (isinstance(given, list | tuple) and any(map(_has_slot, given)))


def _results(result: object) -> list[object]:
    if isinstance(result, list | tuple):
        return [leaf for each in result for leaf in _results(each)]
    return [result]
