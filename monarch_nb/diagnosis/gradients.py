"""Gradients that are not finite, noticed before an optimizer's step without being asked: a rank says so once.

PyTorch runs a hook before each step of every optimizer. It reads a few numbers of a gradient, near the first and near
the last parameter in turns: a NaN of the loss, or of any layer, is in the gradients of the layers before it. On GPUs,
where reading would wait for what the GPU still does, and in steps that are compiled, it does nothing; `watch` checks
every operation.
"""

import math
import sys
import weakref
from collections.abc import Mapping, Sequence
from time import monotonic
from typing import Any

from monarch_nb._imported import when_imported
from monarch_nb.code.file_names import line_name
from monarch_nb.runtime import current
from monarch_nb.wire import is_cell_file, users_frame

MOST = 4096  # numbers of a gradient that are read
FIRST = 100  # steps of an optimizer, which are all checked
EACH_S = 0.05  # afterwards, a check at most: shorter steps would feel its cost
CHOSEN_AGAIN = 100  # checks after which it chooses gradients again: parameters come and go
NEAR = 8  # parameters at either end, of which that with the smallest gradient is read


def install() -> None:
    """Has optimizers be watched once the program imports them."""
    when_imported("torch.optim.optimizer", _watch)


def _watch(module: Any) -> None:
    register = getattr(module, "register_optimizer_step_pre_hook", None)
    if register is not None:  # since PyTorch 2.0
        register(_GradientCheck())


class _Steps:
    """Steps of one optimizer so far, and the parameters whose gradients are read before the next ones."""

    def __init__(self) -> None:
        self.number = 0
        self.next_check = 0.0  # no earlier, in seconds of `monotonic`
        self.checks = 0
        self.read: tuple[Any, ...] = ()


class _GradientCheck:
    """Counts the steps of each optimizer, and checks the gradients before them."""

    def __init__(self) -> None:
        self._torch: Any = sys.modules["torch"]
        self._steps: weakref.WeakKeyDictionary[Any, _Steps] = weakref.WeakKeyDictionary()
        self._has_reported = False

    def __call__(self, optimizer: Any, args: object, kwargs: object) -> None:
        """Before a step. Never raises: the program is not to fail because of it."""
        if self._has_reported or self._torch.compiler.is_compiling() or current.get() is None:
            return
        try:
            steps = self._steps.get(optimizer)
            if steps is None:
                steps = self._steps[optimizer] = _Steps()
            steps.number += 1
            if steps.number > FIRST:
                now = monotonic()
                if now < steps.next_check:
                    return
                steps.next_check = now + EACH_S
            if getattr(optimizer, "found_inf", None) is None:  # a scaler of gradients has not looked itself
                self._check(optimizer, steps)
        except Exception:
            self._has_reported = True  # tensors of a kind that cannot be read so

    def _check(self, optimizer: Any, steps: _Steps) -> None:
        groups = optimizer.param_groups
        steps.checks += 1
        if steps.checks % CHOSEN_AGAIN == 1 or any(each.grad is None for each in steps.read):
            steps.read = _smallest_at_both_ends(groups)
        if not steps.read or _is_finite(steps.read[steps.checks % len(steps.read)].grad):
            return
        self._has_reported = True
        named = [(f"group {number}, parameter {index}", parameter.grad) for number, group in enumerate(groups)
                 for index, parameter in enumerate(group["params"]) if parameter.grad is not None]  # fmt: skip
        bad = [name for name, grad in named if not _is_sum_finite(_local(grad))]
        kind, line = type(optimizer).__name__, _line()
        found = f"{len(bad)} of {len(named)} gradients are not finite, first that of {(bad or [named[0][0]])[0]}"
        sys.stderr.write(
            f"monarch: before step {steps.number} of {kind}{f' ({line})' if line else ''}, {found}. Run the steps "
            "before it within %%watch, or monarch.watch(mesh), to see where it comes from.\n"
        )


def _smallest_at_both_ends(groups: Sequence[Mapping[str, Any]]) -> tuple[Any, ...]:
    """Chooses parameters whose gradients are read: near the first and near the last one, the smallest."""
    parameters = [each for group in groups for each in group["params"] if each.grad is not None]
    near = ([each for each in end if _is_readable(each.grad)] for end in (parameters[:NEAR], parameters[-NEAR:]))
    return tuple(min(end, key=lambda each: int(_local(each.grad).numel())) for end in near if end)


def _is_readable(grad: Any) -> bool:
    local = _local(grad)
    return local.device.type == "cpu" and local.layout is sys.modules["torch"].strided


def _is_finite(grad: Any) -> bool:
    """Whether a few numbers of a gradient are finite."""
    local = _local(grad)
    if local.numel() > MOST:
        local = local.flatten()[:: local.numel() // MOST]
    return math.isfinite(local.sum().item()) or _is_sum_finite(local)


def _is_sum_finite(tensor: Any) -> bool:
    return math.isfinite(tensor.sum(dtype=sys.modules["torch"].float64).item())  # in which no finite numbers overflow


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
