"""Gradients that are not finite, noticed before an optimizer's step without being asked: a rank says so once.

PyTorch runs a hook before each step of every optimizer. It reads a few numbers of two gradients: a NaN of the loss, or
of any layer, is in those of the layers before it. On GPUs, where reading would wait for what the GPU still does, and
in steps that are compiled, it does nothing; `watch` checks every operation.
"""

import math
import sys
import weakref
from collections.abc import Iterable
from itertools import islice
from typing import Any

from monarch_nb._imported import when_imported
from monarch_nb.code.file_names import line_name
from monarch_nb.runtime import current
from monarch_nb.wire import is_cell_file, users_frame

MOST = 4096  # numbers of a gradient that are read
NEAR = 8  # parameters at either end, of which that with the smallest gradient is read


def install() -> None:
    """Has optimizers be watched once the program imports them."""
    when_imported("torch.optim.optimizer", _watch)


def _watch(module: Any) -> None:
    register = getattr(module, "register_optimizer_step_pre_hook", None)
    if register is not None:  # since PyTorch 2.0
        register(_GradientCheck())


class _GradientCheck:
    """Counts the steps of each optimizer, and checks the gradients before them."""

    def __init__(self) -> None:
        self._torch: Any = sys.modules["torch"]
        self._steps: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._has_reported = False

    def __call__(self, optimizer: Any, args: object, kwargs: object) -> None:
        """Before a step. Never raises: the program is not to fail because of it."""
        torch = self._torch
        if self._has_reported or torch.compiler.is_compiling() or current.get() is None:
            return
        try:
            self._steps[optimizer] = step = self._steps.get(optimizer, 0) + 1
            if getattr(optimizer, "found_inf", None) is None:  # a scaler of gradients has not looked itself
                self._check(optimizer, step)
        except Exception:
            self._has_reported = True  # tensors of a kind that cannot be read so

    def _check(self, optimizer: Any, step: int) -> None:
        groups = optimizer.param_groups
        ends = (
            (parameter.grad for group in groups for parameter in group["params"]),
            (parameter.grad for group in reversed(groups) for parameter in reversed(group["params"])),
        )
        if all(_is_finite(grads) for grads in ends):
            return
        self._has_reported = True
        named = [(f"group {number}, parameter {index}", parameter.grad) for number, group in enumerate(groups)
                 for index, parameter in enumerate(group["params"]) if parameter.grad is not None]  # fmt: skip
        bad = [name for name, grad in named if not _is_sum_finite(_local(grad))]
        kind, line = type(optimizer).__name__, _line()
        found = f"{len(bad)} of {len(named)} gradients are not finite, first that of {(bad or [named[0][0]])[0]}"
        sys.stderr.write(
            f"monarch: before step {step} of {kind}{f' ({line})' if line else ''}, {found}. Run the steps before it "
            "within %%watch, or monarch.watch(mesh), to see where it comes from.\n"
        )


def _is_finite(grads: Iterable[Any]) -> bool:
    """Whether a few numbers of the smallest of the next gradients are finite."""
    near = [_local(grad) for grad in islice((each for each in grads if each is not None), NEAR)]
    near = [grad for grad in near if grad.device.type == "cpu" and grad.layout is sys.modules["torch"].strided]
    if not near:
        return True
    smallest = min(near, key=_size)
    if smallest.numel() > MOST:
        smallest = smallest.flatten()[:: smallest.numel() // MOST]
    return _is_sum_finite(smallest)


def _is_sum_finite(tensor: Any) -> bool:
    return math.isfinite(float(tensor.sum(dtype=sys.modules["torch"].float64)))  # in which no finite numbers overflow


def _size(tensor: Any) -> int:
    return int(tensor.numel())


def _local(tensor: Any) -> Any:
    """The part of a distributed tensor that this rank has, without asking the others."""
    return getattr(tensor, "_local_tensor", tensor)


def _line() -> str:
    frame = users_frame(sys._getframe(2))
    if frame is None:
        return ""
    if is_cell_file(frame.f_code.co_filename):
        return f"line {frame.f_lineno} of a cell"  # whose number only the notebook knows
    return line_name(f"{frame.f_code.co_filename}:{frame.f_lineno}")
