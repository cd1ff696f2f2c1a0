"""PyTorch's own samples of every operation, and how results are compared.

Their sizes are even (they divide by the ranks) or uneven.
"""

import contextlib
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ROUNDING = 1e-5  # of a gradient, of the largest number in it
SIZES = {"even": {"S": 4, "M": 6, "L": 8, "XS": 2}, "uneven": {"S": 5, "M": 7, "L": 9, "XS": 3}}


class Draws(TorchDispatchMode):
    """Records whether random numbers are drawn, since values cannot be compared then."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def operations() -> list[Any]:
    """All operations, in PyTorch's order."""
    from torch.testing._internal.common_methods_invocations import op_db

    return list(op_db)


def name_of(op: Any) -> str:
    return op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")


@contextlib.contextmanager
def sizes(kind: str) -> Iterator[None]:
    """Samples have dimensions of these sizes inside this context."""
    changed: list[tuple[types.ModuleType, str, int]] = []
    for module in [m for n, m in sys.modules.items() if n.startswith("torch.testing._internal") and m is not None]:
        for name, size in SIZES[kind].items():
            if type(vars(module).get(name)) is int:
                changed.append((module, name, vars(module)[name]))
                setattr(module, name, size)
    try:
        yield
    finally:
        for module, name, size in changed:
            setattr(module, name, size)


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """The tensors among the leaves."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def largest(tensors: Iterable[torch.Tensor | None]) -> float:
    """The largest finite absolute value among them; 0 if there is none."""
    dense = (t.detach().to_dense() if t.layout != torch.strided else t.detach() for t in tensors if t is not None)
    values = (t.abs().double().nan_to_num(0, 0, 0) for t in dense if t.numel())
    return max((value.max().item() for value in values), default=0.0)


def gradients_of(args: Any, kwargs: Any, result: Any) -> tuple[Any, ...]:
    """Gradients of the inputs: None for an input that the result does not depend on."""
    outputs = [t for t in tensors_of(result) if t.requires_grad]
    inputs = [t for t in tensors_of((args, kwargs)) if t.requires_grad and t.is_leaf]
    if not outputs or not inputs:
        return ()
    losses = [t.abs().sum() if t.is_complex() else (t * t).sum() for t in outputs]
    return torch.autograd.grad(losses, inputs, allow_unused=True)


def difference(expected: torch.Tensor, actual: torch.Tensor, drawn: bool, scale: float = 0.0) -> str:
    """The difference in words; of random tensors, only shapes and types are compared.

    Values are equal within rounding of numbers as large as `scale`, since cancelled terms leave no digits.
    """
    if expected.shape != actual.shape:
        return f"shape {tuple(actual.shape)} instead of {tuple(expected.shape)}"
    if expected.layout != actual.layout:
        return f"{actual.layout} instead of {expected.layout}"
    if expected.layout != torch.strided:
        expected, actual = expected.to_dense(), actual.to_dense()
    if expected.dtype != actual.dtype:
        return f"{actual.dtype} instead of {expected.dtype}"
    if drawn:
        return ""
    wide = torch.complex128 if expected.is_complex() else torch.float64
    first, second = expected.detach().to(wide), actual.detach().to(wide)
    if torch.allclose(first, second, 1e-3, max(1e-4, ROUNDING * scale), equal_nan=True):
        return ""
    return f"off by {(first - second).abs().max().item():.3g}"
