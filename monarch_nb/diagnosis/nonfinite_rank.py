"""The first NaN of one actor: what `watch` runs on each rank, on the thread that runs its endpoints."""

import math
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import FrameType
from typing import Any, TypeGuard

import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from monarch_nb.runtime import DEBUG, current, current_runtime
from monarch_nb.wire import users_frame

_FORWARD = 1 << 16  # operations of forward passes whose module and line are known for their backward
# Their results are whatever was in the memory before.
_UNINITIALISED = frozenset(
    {
        "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted", "resize_", "set_",
        "all_gather_copy_in",
    }
)  # fmt: skip
# Their results come from other ranks, and may come later.
_COLLECTIVES = frozenset({"c10d", "_c10d_functional", "c10d_functional"})
# Infinities that these write are meant.
_DELIBERATE = frozenset({"fill", "fill_", "full", "full_like", "new_full", "masked_fill", "masked_fill_", "where"})


@dataclass(frozen=True)
class NonFinite:
    """An operation of PyTorch's with results that are not finite.

    `given` says of its inputs "finite", "inf" or "nan". `module` is the path of the module that ran, "" outside of
    modules; in the backward pass it and `source` are those of the forward operation. `call` counts the calls of
    `endpoint` since the watch began.
    """

    operation: str
    nans: int
    infinities: int
    shape: tuple[int, ...]
    dtype: str
    given: str
    backward: bool
    module: str
    source: str
    endpoint: str
    call: int
    at: float


class _FirstNan(TorchDispatchMode):
    """Checks the results of each operation until one has a NaN."""

    def __init__(self, *, stop: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nan: NonFinite | None = None
        self.inf: NonFinite | None = None
        self._stop = stop
        self._modules: list[str] = []
        self._names: dict[int, str] = {}  # of the modules below the outermost one, by id
        self._forward: dict[int, tuple[str, str]] = {}  # module and line, by the number of the autograd node
        context = current.get()
        self._call, self._number = context.call if context is not None else "", 0
        self._hooks = [
            nn.modules.module.register_module_forward_pre_hook(self._entered),
            nn.modules.module.register_module_forward_hook(self._left, always_call=True),
        ]

    def end(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _entered(self, module: nn.Module, args: object) -> None:
        if current.get() is None:
            return
        if not self._modules:
            self._names = {id(each): name for name, each in module.named_modules(prefix=type(module).__name__)}
        self._modules.append(self._names.get(id(module)) or type(module).__name__)

    def _left(self, module: nn.Module, args: object, output: object) -> None:
        if current.get() is not None and self._modules:
            self._modules.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if any(kind is not torch.Tensor and kind is not nn.Parameter for kind in types):
            if any(issubclass(kind, FakeTensor) for kind in types):
                return func(*args, **(kwargs or {}))  # has no values
            return NotImplemented  # of a subclass, such as DTensor, the operations on its parts are seen
        kwargs = kwargs or {}
        results = func(*args, **kwargs)
        if self.nan is not None:
            return results
        context = current.get()  # None on threads of autograd's
        if context is not None and context.call != self._call:
            self._call, self._number = context.call, self._number + 1
        backward = torch._C._current_graph_task_id() != -1
        if not backward and torch.is_grad_enabled():
            self._remember()
        name = func._overloadpacket.__name__
        if not func.is_view and name not in _UNINITIALISED and func.namespace not in _COLLECTIVES:
            for tensor in _changed(func, args, kwargs, results):
                if _is_suspicious(tensor):
                    self._found(func, name, tensor, args, kwargs, backward)
        return results

    def _remember(self) -> None:
        number = torch._C._autograd._get_sequence_nr() - 1  # that of the node that autograd has just made
        if len(self._forward) >= _FORWARD:
            self._forward.pop(next(iter(self._forward)))
        self._forward[number] = (self._modules[-1] if self._modules else "", users_line(sys._getframe(2)))

    def _found(self, func: Any, name: str, tensor: torch.Tensor, args: object, kwargs: object, backward: bool) -> None:
        nans = int(tensor.isnan().sum())
        infinities = int(tensor.isinf().sum())
        if not nans and (not infinities or self.inf is not None or name in _DELIBERATE):
            return
        given = _worst(each for each in tree_leaves((args, kwargs)) if each is not tensor)
        if not nans and given != "finite":
            return
        module, source = self._modules[-1] if self._modules else "", ""
        if backward:
            node = torch._C._current_autograd_node()
            module, source = self._forward.get(node._sequence_nr() if node is not None else -1, (module, ""))
        frame = sys._getframe(2)
        found = NonFinite(
            str(func), nans, infinities, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), given, backward,
            module, source or users_line(frame), _endpoint(self._call), self._number, time.time(),
        )  # fmt: skip
        if not nans:
            self.inf = found
            return
        self.nan = found
        if self._stop:
            current_runtime().feature(DEBUG).stop(users_frame(frame) or frame, f"NaN in the result of {func}")


def _endpoint(call: str) -> str:
    cells = tuple(current_runtime().cells.values())
    return next((cell.running[1] for cell in cells if cell.running is not None and cell.running[0] == call), "")


def _changed(
    func: Any, args: Sequence[object], kwargs: Mapping[str, object], results: object
) -> Iterator[torch.Tensor]:
    """Tensors that an operation has made, or written to."""
    found: list[object] = tree_leaves(results)
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += tree_leaves(value)
    for argument in func._schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write and argument.name in kwargs:
            found += tree_leaves(kwargs[argument.name])
    seen = set()
    for value in found:
        if _has_values(value) and id(value) not in seen:
            seen.add(id(value))
            yield value


def _has_values(value: object) -> TypeGuard[torch.Tensor]:
    return (
        isinstance(value, torch.Tensor)
        and type(value) in (torch.Tensor, nn.Parameter)
        and (value.is_floating_point() or value.is_complex())
        and value.numel() > 0
        and value.layout is torch.strided
        and not value.is_meta
    )


def _is_suspicious(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor may have an element that is not finite, at the cost of a sum. False is certain."""
    if tensor.is_complex():
        return not bool(tensor.isfinite().all())
    return not math.isfinite(float(tensor.sum(dtype=torch.promote_types(tensor.dtype, torch.float32))))


def _worst(values: Iterable[object]) -> str:
    worst = "finite"
    for value in values:
        if isinstance(value, float):
            value = torch.tensor(value)
        if isinstance(value, torch.Tensor) and _has_values(value):
            if bool(value.isnan().any()):
                return "nan"
            if bool(value.isinf().any()):
                worst = "inf"
    return worst


def users_line(frame: FrameType | None) -> str:
    """The innermost line of the user's own code, as `file:line`; "" without one."""
    users = users_frame(frame)
    return f"{users.f_code.co_filename}:{users.f_lineno}" if users is not None else ""


_running: dict[int, tuple[_FirstNan, ExitStack]] = {}


def begin(number: int, stop: bool) -> None:
    """Begins to watch what this thread runs."""
    watch, entered = _FirstNan(stop=stop), ExitStack()
    entered.callback(watch.end)
    entered.enter_context(watch)
    _running[number] = watch, entered


def end(number: int) -> tuple[NonFinite | None, NonFinite | None]:
    """Ends it. Returns the first NaN, and the first infinity that nobody wrote. Raises RuntimeError if none runs."""
    if number not in _running:
        raise RuntimeError("its process is a new one, which was not watched")
    watch, entered = _running.pop(number)
    entered.close()
    return watch.nan, watch.inf
