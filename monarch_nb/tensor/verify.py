"""Does a mesh give what one process gives? A function is run on both, and what it returns and changes is compared."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from monarch_nb.tensor.handle import MeshTensor
from monarch_nb.tensor.twin import tensors_in, twin
from monarch_nb.wire import counted

__all__ = ["Verification", "compared", "verify"]


@dataclass(frozen=True)
class Verification:
    """What a comparison found. It is true where nothing differs.

    `tensors` were compared; `differences` say which differ and by how much. `random` says that random numbers were
    drawn, which are others on a mesh.
    """

    tensors: int
    differences: tuple[str, ...]
    random: bool = False

    def __bool__(self) -> bool:
        return not self.differences

    def __repr__(self) -> str:
        if not self.differences:
            return f"equal to what one process computes: {counted(self.tensors, 'tensor')}"
        lines = [f"{len(self.differences)} of {counted(self.tensors, 'tensor')} differ from what one process computes:"]
        lines += [f"  {text}" for text in self.differences]
        if self.random:
            lines.append("  random numbers were drawn: those of a mesh are others than those of one process")
        return "\n".join(lines)


class _Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def verify(
    function: Callable[..., Any], *args: Any, rtol: float = 1e-3, atol: float = 1e-5, **kwargs: Any
) -> Verification:
    """Runs the function on the mesh, and once more in this process on whole local copies of all that it refers to.

    What it returns, and every tensor that its arguments and variables refer to afterwards (parameters, gradients, the
    state of optimizers), is compared. The copy is of the state before; only the run on the mesh leaves its effects.
    Blocks until both have ended, and needs the memory of the whole tensors here. Raises what the function raises on the
    mesh; an error on the copies is a difference. Raises TypeError for what cannot be copied.
    """
    lone, lone_args, lone_kwargs = twin((function, args, kwargs))
    result = function(*args, **kwargs)
    draws = _Draws()  # type: ignore[no-untyped-call]
    try:
        with draws:
            lone_result = lone(*lone_args, **lone_kwargs)
    except Exception as error:
        text = f"one process raises {type(error).__name__}: {error}, the mesh does not"
        return Verification(0, (text,), draws.seen)
    found = tensors_in((function, args, kwargs, result))
    expected = tensors_in((lone, lone_args, lone_kwargs, lone_result))
    return compared(expected, found, rtol, atol, random=draws.seen)


def compared(
    expected: list[tuple[str, torch.Tensor]],
    found: list[tuple[str, torch.Tensor]],
    rtol: float,
    atol: float,
    *,
    random: bool = False,
) -> Verification:
    """The comparison of two lists of tensors, each with its name, and of their gradients."""
    differences = []
    if len(expected) != len(found):
        differences.append(f"{counted(len(found), 'tensor')}, where one process has {len(expected)}")
    for at, ((name, one), (_, other)) in enumerate(zip(expected, found, strict=False)):
        title = name or f"tensor {at}"
        pairs = [(title, one, other)]
        if one.is_leaf and other.is_leaf and (one.grad is not None or other.grad is not None):
            pairs.append((f"gradient of {title}", one.grad, other.grad))  # type: ignore[arg-type]
        for label, wanted, given in pairs:
            if text := _difference(wanted, given, rtol, atol):
                differences.append(f"{label} {text}")
    return Verification(len(found), tuple(differences), random)


def _difference(expected: torch.Tensor | None, found: torch.Tensor | None, rtol: float, atol: float) -> str:
    if expected is None or found is None:
        return "is missing in one of them" if expected is not found else ""
    placed = f" [{', '.join(map(str, found.placements))}]" if isinstance(found, MeshTensor) else ""
    whole = found.full_tensor() if isinstance(found, MeshTensor) else found
    if whole.shape != expected.shape:
        return f"{tuple(whole.shape)}{placed} has another shape: {tuple(expected.shape)} in one process"
    if whole.dtype != expected.dtype:
        return f"{tuple(whole.shape)}{placed} has another type: {expected.dtype} in one process"
    wide = torch.complex128 if expected.is_complex() else torch.float64
    one, other = expected.detach().as_subclass(torch.Tensor).to(wide), whole.detach().to(wide)
    if torch.allclose(one, other, rtol, atol, equal_nan=True):
        return ""
    worst = int((one - other).abs().nan_to_num(torch.inf).argmax())
    where = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), one.shape)) if one.dim() else ()
    at = f" at [{', '.join(map(str, where))}]" if where else ""
    return f"{tuple(whole.shape)}{placed} is {other[where].item():.6g}{at}, not {one[where].item():.6g}"
