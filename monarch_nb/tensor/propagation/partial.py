"""Operations that can run on partial inputs; others need reduced inputs."""

import torch
from torch.distributed.tensor import Partial, Replicate

from .meta import Meta, Placements
from .operation import Operation
from .plan import Slot

__all__ = ["carries_parts", "has_parts", "summed"]

# They move elements, or copy them: what each rank has stays its part, of whatever kind.
_MOVES = frozenset(
    ["clone", "contiguous", "_unsafe_view", "_reshape_alias", "cat", "stack", "expand_copy", "view_copy", "t_copy"]
)
# Sums of parts are parts of the sum.
_SUMS = frozenset(["add", "sub", "add_", "sub_", "_foreach_add", "_foreach_add_", "_foreach_sub", "_foreach_sub_"])
# So are multiples.
_MULTIPLES = frozenset(["mul", "mul_", "div", "div_", "_foreach_mul", "_foreach_mul_", "_foreach_div", "_foreach_div_"])
_LINEAR = frozenset(["neg", "neg_", "sum", "zero_", "_foreach_neg", "_foreach_neg_", "_foreach_zero_"])


def has_parts(meta: Meta) -> bool:
    """Returns whether any placement is partial."""
    return any(placement.is_partial() for placement in meta.placements)


def summed(placements: Placements) -> Placements:
    """The placements after a reduction."""
    return tuple(Replicate() if placement.is_partial() else placement for placement in placements)


def carries_parts(operation: Operation) -> bool:
    """The operation, run on each rank's parts, gives parts of its result.

    PyTorch's rules say so of more than it is true of: `fill_` writes the value on each rank, `1 - x` counts the one
    once for each.
    """
    metas, packet = operation.metas, operation.packet
    alike = all(meta.placements == metas[0].placements for meta in metas)
    if operation.func.is_view or packet in _MOVES:
        return alike and operation.func is not torch.ops.aten.view.dtype  # which looks at bits
    if not all(map(_adds_up, metas)):
        return False
    dtype = operation.argument("dtype")
    if dtype is not None and not (dtype.is_floating_point and metas[0].dtype.is_floating_point):  # type: ignore[attr-defined]
        return False  # each part would be rounded
    if packet == "_to_copy":
        return True
    if packet in _SUMS:
        numbers = any(isinstance(given, int | float | complex) for given in operation.args)
        return alike and not numbers and "Scalar" not in operation.name and "Tensor_mode" not in operation.name
    if packet in _MULTIPLES:
        first = operation.args[0]
        own = {
            slot.register for slot in (first if isinstance(first, list | tuple) else [first]) if isinstance(slot, Slot)
        }
        others = [meta for at, meta in enumerate(metas) if at not in own]
        return not any(map(has_parts, others)) and operation.kwargs.get("rounding_mode") is None
    return packet in _LINEAR


def _adds_up(meta: Meta) -> bool:
    """Returns whether all partial placements are sums of numbers, not of bools."""
    parts = [placement for placement in meta.placements if placement.is_partial()]
    return all(type(part) is Partial and part.is_partial("sum") for part in parts) and not (
        parts and meta.dtype == torch.bool
    )
