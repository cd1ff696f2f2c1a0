"""Operations that return a Python value: it is worked out on the workers, and fetched."""

from collections.abc import Callable

import torch

from .operation import Operation
from .plan import Slot
from .writing import Writer

__all__ = ["VALUES"]

aten = torch.ops.aten


def _item(operation: Operation, write: Writer) -> Slot:
    given = operation.args[0]
    assert isinstance(given, Slot)
    return write.whole(given)


def _equal(operation: Operation, write: Writer) -> Slot | bool:
    one, other = operation.args
    assert isinstance(one, Slot)
    assert isinstance(other, Slot)
    if write.shape(one) != write.shape(other):
        return False
    return write.whole(write(aten.all.default, write(aten.eq.Tensor, one, other)))


def _allclose(operation: Operation, write: Writer) -> Slot:
    return write.whole(write(aten.all.default, write(aten.isclose.default, *operation.args, **operation.kwargs)))


# The slot of a tensor with one element, whole on every rank, or the value where shapes tell.
VALUES: dict[str, Callable[[Operation, Writer], Slot | bool]] = {
    "_local_scalar_dense": _item,
    "equal": _equal,
    "allclose": _allclose,
}
