"""Detection, without a request, of gradients that are not finite at an optimizer's step: a rank reports them once.

PyTorch runs a hook before each step of every optimizer. The hook reads a few numbers of a gradient near the first and
last parameters in turns: a NaN of the loss, or of any layer, is in the gradients of the layers before it. On GPUs,
where reading would wait for the kernels under way, and in compiled steps, the hook does nothing; `watch` checks
every operation. If the parameters are still finite after the step, the next one is watched.
"""

import math
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from time import monotonic
from types import FrameType
from typing import TYPE_CHECKING, Any

from monarch_nb._package import when_imported
from monarch_nb.code.modules import line_name
from monarch_nb.runtime import current
from monarch_nb.wire import is_cell_file, users_frame

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from monarch_nb.diagnosis.nonfinite_rank import StepWatch

MOST = 4096  # numbers of a gradient that are read
FIRST = 100  # steps of an optimizer, which are all checked
INTERVAL_S = 0.05  # least interval between later checks, which would slow down shorter steps
CHOSEN_AGAIN = 100  # checks after which the gradients are chosen again: parameters may change
ENDS = 8  # parameters at either end, among which the smallest gradient is read
FRAMES = 40  # of the callers of a step, which are searched for its loss


def install() -> None:
    """Has optimizers watched once the program imports them."""
    when_imported("torch.optim.optimizer", _watch)


def _watch(module: Any) -> None:
    if hasattr(module, "register_optimizer_step_pre_hook"):  # since PyTorch 2.0
        check = _GradientCheck()
        module.register_optimizer_step_pre_hook(check.before)
        module.register_optimizer_step_post_hook(check.after)


class _Steps:
    """Steps of one optimizer so far, and the parameters whose gradients are read before the next ones."""

    def __init__(self) -> None:
        self.number = 0
        self.next_check = 0.0  # earliest time, in seconds of `monotonic`
        self.checks = 0
        self.read: tuple[Any, ...] = ()


class _GradientCheck:
    """Counts the steps of each optimizer, and checks the gradients before them."""

    def __init__(self) -> None:
        self._torch: Any = sys.modules["torch"]
        self._steps: weakref.WeakKeyDictionary[Optimizer, _Steps] = weakref.WeakKeyDictionary()
        self._has_reported = False
        self._bad: _BadStep | None = None

    def before(self, optimizer: "Optimizer", args: object, kwargs: object) -> None:
        """Checks the gradients before a step. Never raises, so that the program does not fail because of it."""
        if self._has_reported or self._torch.compiler.is_compiling() or current.get() is None:
            if self._bad is not None and self._bad.before_next(optimizer):
                self._bad = None
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
                steps.next_check = now + INTERVAL_S
            if getattr(optimizer, "found_inf", None) is None:  # unless a gradient scaler has checked them
                self._check(optimizer, steps)
        except Exception:
            self._has_reported = True  # tensors of a kind that cannot be read this way

    def after(self, optimizer: "Optimizer", args: object, kwargs: object) -> None:
        """Counts a step, and continues the report of bad gradients. Never raises."""
        if self._bad is not None:
            self._bad.after(optimizer)

    def _check(self, optimizer: "Optimizer", steps: _Steps) -> None:
        groups = optimizer.param_groups
        steps.checks += 1
        if steps.checks % CHOSEN_AGAIN == 1 or any(parameter.grad is None for parameter in steps.read):
            steps.read = _smallest_at_both_ends(groups)
        if not steps.read or _is_finite(steps.read[steps.checks % len(steps.read)].grad):
            return
        self._has_reported = True
        named = [(f"group {number}, parameter {index}", parameter.grad) for number, group in enumerate(groups)
                 for index, parameter in enumerate(group["params"]) if parameter.grad is not None]  # fmt: skip
        bad = [name for name, grad in named if not _is_sum_finite(_local(grad))]
        frame = sys._getframe(1)
        line = _line(frame)
        summary = f"{len(bad)} of {len(named)} gradients are not finite, first that of {(bad or [named[0][0]])[0]}"
        before = f"before step {steps.number} of {type(optimizer).__name__}{f' ({line})' if line else ''}"
        self._bad = _BadStep(optimizer, steps.number + 1, f"{before}, {summary}{_about_loss(frame)}")


class _BadStep:
    """Reports gradients that are not finite after their step, and watches the next step.

    The next step is watched only if the parameters are still finite: if the gradients were clipped or left out.
    """

    def __init__(self, optimizer: "Optimizer", number: int, text: str) -> None:
        self._optimizer, self._number, self._text = weakref.ref(optimizer), number, text
        self._thread = threading.get_ident()
        self._is_reported = False
        self._watch: StepWatch | None = None

    def after(self, optimizer: "Optimizer") -> None:
        """Reports after a step of any optimizer, once. Never raises."""
        if self._is_reported or not self._concerns(optimizer):
            return
        self._is_reported = True
        advice = "Run the steps before it within %%watch, or monarch.watch(mesh), to see where it comes from."
        try:
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            if all(_is_sum_finite(_local(parameter)) for parameter in parameters):
                from monarch_nb.diagnosis.nonfinite_rank import StepWatch  # a module that the program may never need

                self._watch = StepWatch.begun()
                if self._watch is not None:
                    advice = "The parameters are still finite, and the next step is watched."
        except Exception:
            self._watch = None  # tensors of a kind that cannot be read this way
        sys.stderr.write(f"monarch: {self._text}. {advice}\n")

    def before_next(self, optimizer: "Optimizer") -> bool:
        """Ends the watch before a later step of any optimizer. Returns whether there is nothing more to do."""
        if self._watch is None or not self._concerns(optimizer):
            return self._is_reported and self._watch is None
        if not self._watch.end():
            return False
        finding = self._watch.text or "no operation gave a NaN"
        sys.stderr.write(f"monarch: in step {self._number} of {type(optimizer).__name__}, {finding}.\n")
        return True

    def _concerns(self, optimizer: "Optimizer") -> bool:
        return optimizer is self._optimizer() and threading.get_ident() == self._thread


def _smallest_at_both_ends(groups: Sequence[Mapping[str, Any]]) -> tuple[Any, ...]:
    """Chooses parameters whose gradients are read: near the first and near the last one, the smallest."""
    parameters = [param for group in groups for param in group["params"] if param.grad is not None]
    ends = ([param for param in end if _is_readable(param.grad)] for end in (parameters[:ENDS], parameters[-ENDS:]))
    return tuple(min(end, key=lambda param: int(_local(param.grad).numel())) for end in ends if end)


def _is_readable(grad: Any) -> bool:
    local = _local(grad)
    return local.device.type == "cpu" and local.layout is sys.modules["torch"].strided


def _is_finite(grad: Any) -> bool:
    """Returns whether a few numbers of a gradient are finite."""
    local = _local(grad)
    if local.numel() > MOST:
        local = local.flatten()[:: local.numel() // MOST]
    return math.isfinite(local.sum().item()) or _is_sum_finite(local)


def _is_sum_finite(tensor: Any) -> bool:
    return math.isfinite(tensor.sum(dtype=sys.modules["torch"].float64).item())  # finite numbers do not overflow in it


def _local(tensor: Any) -> Any:
    """Returns this rank's part of a distributed tensor, without communication."""
    return getattr(tensor, "_local_tensor", tensor)


def _line(frame: FrameType) -> str:
    users = users_frame(frame)
    if users is None:
        return ""
    if is_cell_file(users.f_code.co_filename):
        return f"line {users.f_lineno} of a cell"  # whose number only the notebook knows
    return line_name(f"{users.f_code.co_filename}:{users.f_lineno}")


def _about_loss(frame: FrameType | None) -> str:
    """Says whether this rank's loss, found in its callers' variables, is finite: another rank's may be the cause."""
    tensor = sys.modules["torch"].Tensor
    for _ in range(FRAMES):
        if frame is None:
            break
        for name, value in tuple(frame.f_locals.items()):
            if "loss" in name and isinstance(value, tensor) and value.numel() == 1 and value.is_floating_point():
                number = value.item()
                if not math.isfinite(number):
                    return f"; `{name}` is {number}"
                return f"; `{name}` is finite, so that they come from the backward pass, or from another rank"
        frame = frame.f_back
    return ""
