"""PyTorch's own samples of every operation, forward and backward: sharded results against local ones.

A case is one operation, one kind of sizes (even: they divide by the ranks; uneven: they do not) and one placement.
"""

import contextlib
import itertools
import random
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

PLACEMENTS = {"whole": Replicate(), "rows": Shard(0), "columns": Shard(1), "parts": Partial()}
SIZES = {"even": {"S": 4, "M": 6, "L": 8, "XS": 2}, "uneven": {"S": 5, "M": 7, "L": 9, "XS": 3}}
SAMPLES = 12  # of which the first of the highest rank is taken


class Draws(TorchDispatchMode):
    """Notes whether random numbers are drawn: values cannot be compared then."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Engine:
    """How tensors get to the ranks and back."""

    place: Callable[[torch.Tensor, Any], torch.Tensor]
    whole: Callable[[torch.Tensor], torch.Tensor]


def operations() -> list[Any]:
    """All of them, in PyTorch's order."""
    from torch.testing._internal.common_methods_invocations import op_db

    return list(op_db)


def name_of(op: Any) -> str:
    return op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")


@contextlib.contextmanager
def sizes(kind: str) -> Iterator[None]:
    """Samples have dimensions of these sizes while this is entered."""
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


def samples_of(op: Any, kind: str, count: int = 1) -> list[Any]:
    """Samples: the first with the most dimensions (up to three), and then others, the first first.

    Where there are none of these sizes, they are of PyTorch's own.
    """
    dtype = torch.float32
    if not op.supports_dtype(dtype, "cpu"):
        dtype = sorted(op.supported_dtypes("cpu"), key=lambda d: (d is not torch.int64, str(d)))[0]
    gradients = op.supports_autograd and dtype.is_floating_point

    def dims(sample: Any) -> int:
        return min(next((t.dim() for t in tree_leaves(sample.input) if isinstance(t, torch.Tensor)), 0), 3)

    def drawn() -> list[Any]:
        torch.manual_seed(0)
        random.seed(0)
        return list(itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=gradients), max(SAMPLES, count)))

    found: list[Any] = []
    with sizes(kind), contextlib.suppress(Exception):
        found = drawn()
    found = found or drawn()
    most = max(map(dims, found), default=0)  # a list that is being sorted is empty
    found.sort(key=lambda sample: dims(sample) != most)
    return found[:count]


def outcome(op: Any, sample: Any, placement: Any, engine: Engine) -> str:
    """ "ok", "WRONG …" for a result that differs from the local one, or "refused …" with the error."""
    stage = "forward"
    draws = Draws()

    def local(value: Any) -> Any:
        return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value

    def sharded(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if placement.is_shard():
            fits = value.dim() > placement.dim and value.shape[placement.dim] > 1
        else:
            fits = placement.is_replicate() or (value.dtype.is_floating_point and value.dtype.itemsize > 1)
        placed = engine.place(value.detach(), placement if fits else Replicate())
        return placed.requires_grad_(value.requires_grad)

    def run(convert: Callable[[Any], Any]) -> tuple[Any, Any, Any]:
        args = tree_map(convert, (sample.input, *sample.args))
        kwargs = tree_map(convert, sample.kwargs)
        torch.manual_seed(1)
        return args, kwargs, op(*args, **kwargs)

    try:
        with draws:
            expected_args, expected_kwargs, expected = run(local)
    except Exception as error:
        return f"no local result: {type(error).__name__}"
    drawn = draws.seen or "empty" in op.name
    try:
        args, kwargs, result = run(sharded)
        wanted, found = _tensors(expected), _tensors(result)
        if len(wanted) != len(found):
            return f"WRONG forward: {len(found)} tensors instead of {len(wanted)}"
        for one, other in zip(wanted, found, strict=True):
            if difference := _difference(one, engine.whole(other), drawn):
                return f"WRONG forward: {difference}"
        stage = "backward"
        gradients = _gradients(args, kwargs, result)
        for one, other in zip(_gradients(expected_args, expected_kwargs, expected), gradients, strict=True):
            if (one is None) != (other is None):
                return "WRONG backward: a gradient is missing"
            if one is not None and (difference := _difference(one, engine.whole(other), drawn)):
                return f"WRONG backward: {difference}"
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        return f"refused {stage}: {type(error).__name__}: {lines[0][:300]}"
    return "ok"


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _gradients(args: Any, kwargs: Any, result: Any) -> tuple[Any, ...]:
    outputs = [t for t in _tensors(result) if t.requires_grad]
    inputs = [t for t in _tensors((args, kwargs)) if t.requires_grad and t.is_leaf]
    if not outputs or not inputs:
        return ()
    losses = [t.abs().sum() if t.is_complex() else (t * t).sum() for t in outputs]
    return torch.autograd.grad(losses, inputs, allow_unused=True)


def _difference(expected: torch.Tensor, found: torch.Tensor, drawn: bool) -> str:
    if expected.shape != found.shape:
        return f"shape {tuple(found.shape)} instead of {tuple(expected.shape)}"
    if expected.layout != found.layout:
        return f"{found.layout} instead of {expected.layout}"
    if expected.layout != torch.strided:
        expected, found = expected.to_dense(), found.to_dense()
    if expected.dtype != found.dtype:
        return f"{found.dtype} instead of {expected.dtype}"
    if drawn:
        return ""
    wide = torch.complex128 if expected.is_complex() else torch.float64
    one, other = expected.detach().to(wide), found.detach().to(wide)
    if torch.allclose(one, other, 1e-3, 1e-4, equal_nan=True):
        return ""
    return f"off by {(one - other).abs().max().item():.3g}"
