"""Detection of the first NaN of one actor: the part of `watch` that runs on the thread of its endpoints."""

import math
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch._subclasses import FakeTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

from monarch_nb._package import when_imported
from monarch_nb.code.modules import line_name
from monarch_nb.runtime import DEBUG, current, current_runtime
from monarch_nb.wire import users_frame

T = TypeVar("T")
_COMPILER = "torch._dynamo"
STEP_S = 60.0  # limit for a step that is watched without a request
_FORWARD = 1 << 16  # operations of forward passes whose module and line are known for their backward
# Their results are uninitialized memory.
_UNINITIALISED = frozenset(
    {
        "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted", "resize_", "set_",
        "all_gather_copy_in",
    }
)  # fmt: skip
# Their results are from other ranks, and may arrive later.
_COLLECTIVES = frozenset({"c10d", "_c10d_functional", "c10d_functional"})
# Infinities that these write are intended.
_DELIBERATE = frozenset({"fill", "fill_", "full", "full_like", "new_full", "masked_fill", "masked_fill_", "where"})


@dataclass(frozen=True)
class NonFinite:
    """A PyTorch operation with results that are not finite.

    `given` says of its inputs "finite", "inf" or "nan". `module` is the path of the module that ran, "" outside of
    modules; in the backward pass it and `source` are those of the forward operation. `call` counts the calls of
    `endpoint` since the watch began. Of an operation on sharded tensors, `issued` is its stream and number there.
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
    issued: tuple[int, int] | None = None

    def text(self, inf: "NonFinite | None" = None) -> str:
        """Describes the operation's results, place and inputs; `inf` is the first operation with an infinity."""
        count = f"{self.nans} NaN" if self.nans else f"{self.infinities} infinite numbers"
        shape = "×".join(map(str, self.shape))
        backward = "the backward of " if self.backward else ""
        module = f" in {backward}{self.module}" if self.module else " in the backward pass" if self.backward else ""
        line = f" ({line_name(self.source)})" if self.source else ""
        text = f"{self.operation} gave {count} in {self.dtype}[{shape}]{module}{line}"
        if self.given == "nan":
            return f"{text}; its inputs had NaN already, which came with the arguments, or with data"
        if self.given != "inf":
            return f"{text}, from finite inputs"
        source = f" ({line_name(inf.source)})" if inf is not None and inf.source else ""
        return f"{text}, from inputs with infinities{f', the first from {inf.operation}{source}' if inf else ''}"


class _Plan(NamedTuple):
    """The results of an operation that are checked, by its schema."""

    name: str
    is_checked: bool
    written: tuple[tuple[int, str], ...]  # arguments that it writes to: index and name
    returns_what_it_writes: bool


def _plan(func: Any) -> _Plan:
    name = func._overloadpacket.__name__
    is_checked = not func.is_view and name not in _UNINITIALISED and func.namespace not in _COLLECTIVES
    arguments, returns = func._schema.arguments, func._schema.returns
    written = [(index, argument.name) for index, argument in enumerate(arguments) if _is_written(argument)]
    returned = sum(_is_written(argument) for argument in returns)
    return _Plan(name, is_checked, tuple(written), len(written) == returned)


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and bool(argument.alias_info.is_write)


class WatchMode(TorchDispatchMode):
    """A mode that intercepts operations, and is not compiled.

    PyTorch's own way not to compile a mode imports the compiler with the first operation, which takes seconds.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)  # type: ignore[no-untyped-call]
        if _COMPILER in sys.modules:
            cls._leave_uncompiled()

    def enter(self) -> None:
        """Intercepts operations of this thread from now on."""
        self.__enter__()  # type: ignore[no-untyped-call]

    def leave(self) -> None:
        """Stops intercepting operations; this must be the mode that was entered last."""
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Returns True: compiled functions of the program stay compiled (PyTorch calls this since 2.10)."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    @classmethod
    def _leave_uncompiled(cls) -> None:
        dispatch: Any = cls.__dict__["__torch_dispatch__"]
        type.__setattr__(cls, "__torch_dispatch__", _disable_dynamo(dispatch, recursive=True))


def _leave_uncompiled(_: object) -> None:
    for mode in WatchMode.__subclasses__():
        mode._leave_uncompiled()


when_imported(_COMPILER, _leave_uncompiled)


class ModulePaths:
    """Follows the calls of modules on threads that are watched."""

    def __init__(self, is_watched: Callable[[], bool]) -> None:
        self._is_watched = is_watched
        self._running: list[str] = []
        self._names: dict[int, str] = {}  # of the modules below the outermost one, by id
        self._outermost: weakref.ref[nn.Module] | None = None
        self._hooks = [
            nn.modules.module.register_module_forward_pre_hook(self._before_forward),
            nn.modules.module.register_module_forward_hook(self._after_forward, always_call=True),
        ]

    def end(self) -> None:
        """Stops following."""
        for hook in self._hooks:
            hook.remove()

    @property
    def current(self) -> str:
        """The path of the module that runs; empty outside of modules."""
        return self._running[-1] if self._running else ""

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the parameters of the last outermost module, with their paths."""
        module = self._outermost() if self._outermost is not None else None
        return iter(()) if module is None else module.named_parameters(prefix=type(module).__name__)

    def _before_forward(self, module: nn.Module, args: object) -> None:
        if not self._is_watched():
            return
        if not self._running:
            self._outermost = weakref.ref(module)
            self._names = {id(child): name for name, child in module.named_modules(prefix=type(module).__name__)}
        self._running.append(self._names.get(id(module)) or type(module).__name__)

    def _after_forward(self, module: nn.Module, args: object, output: object) -> None:
        if self._is_watched() and self._running:
            self._running.pop()


class ForwardRecord(Generic[T]):
    """Notes on the last operations of the forward pass, for their backward, by autograd node."""

    def __init__(self) -> None:
        self._last: dict[int, T] = {}
        self._earlier: dict[int, T] = {}

    def note(self, make: Callable[[], T]) -> None:
        """Stores a note on the operation that runs, unless its node has one: the node may be an earlier operation's."""
        number = torch._C._autograd._get_sequence_nr() - 1  # that of the node that autograd has just made
        if number in self._last:
            return
        if len(self._last) >= _FORWARD:
            self._last, self._earlier = {}, self._last
        self._last[number] = make()

    def of_backward(self) -> T | None:
        """Returns the note on the operation whose backward runs."""
        node = torch._C._current_autograd_node()
        number = node._sequence_nr() if node is not None else -1
        return self._last.get(number) or self._earlier.get(number)


class FirstNan(WatchMode):
    """Checks the results of each operation of this thread until one has a NaN; for sharded tensors, `worker`'s alone.

    Of an optimizer's step the parameters are checked afterwards: checking its operations would double its time.
    """

    def __init__(self, stop: bool, worker: Any = None, *, optimizers: bool = True) -> None:
        super().__init__()
        self.is_over = False
        self.nan: NonFinite | None = None
        self.inf: NonFinite | None = None
        self._stop = stop
        self._plans: dict[Any, _Plan] = {}
        self._worker = worker
        self._thread = threading.get_ident()
        self._modules = ModulePaths(self._is_own_thread)
        self._forward: ForwardRecord[tuple[str, CodeType | None, int]] = ForwardRecord()  # module, code and line
        context = current.get()
        self._call, self._number = context.call if context is not None else "", 0
        self._hooks = [nn.modules.module.register_module_forward_pre_hook(self._module_begins)]
        if optimizers:
            self._hooks.append(register_optimizer_step_pre_hook(self._step_begins))
            self._hooks.append(register_optimizer_step_post_hook(self._step_ends))
        self._stack: list[TorchDispatchMode] | None = None  # of an optimizer's step, in which this mode is left
        self.enter()

    def end(self) -> tuple[NonFinite | None, NonFinite | None]:
        """Ends the checks. Returns the first NaN, and the first infinity that the program did not write on purpose."""
        for hook in self._hooks:
            hook.remove()
        self._modules.end()
        if self._stack is None:  # else an optimizer's step has raised, and the mode has been left
            self.leave()
        return self.nan, self.inf

    def _step_begins(self, optimizer: Optimizer, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
        if not self._is_own_thread() or torch.compiler.is_compiling():
            return
        self._resume()
        stack = _get_current_dispatch_mode_stack()
        has_closure = any(argument is not None for argument in (*args[1:], *kwargs.values()))
        if stack and stack[-1] is self and not has_closure:  # a closure runs the model
            self.leave()
            self._stack = stack[:-1]

    def _step_ends(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if not self._is_own_thread() or self._stack is None:
            return
        self._check_parameters(optimizer)
        self._resume()

    def _module_begins(self, module: nn.Module, args: object) -> None:
        if self._stack is not None and self._is_own_thread():
            self._resume()

    def _is_own_thread(self) -> bool:
        """Returns whether the calling thread is watched: hooks run for modules and optimizers of all threads."""
        return threading.get_ident() == self._thread

    def _resume(self) -> None:
        """Enters this mode again, unless other modes were entered or left since. A step that raises has no end hook."""
        if self._stack is not None and self._stack == _get_current_dispatch_mode_stack():
            self.enter()
            self._stack = None

    def _check_parameters(self, optimizer: Optimizer) -> None:
        if self.nan is not None:
            return
        for number, group in enumerate(optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                local = getattr(parameter, "_local_tensor", parameter)
                for tensor in _float_tensors((local,) if parameter.grad is not None else ()):
                    if _is_suspicious(tensor):
                        grad = getattr(parameter.grad, "_local_tensor", parameter.grad)
                        names = (name for name, param in self._modules.parameters() if param is parameter)
                        path = next(names, f"parameter {index} of group {number}")
                        self._report(f"{type(optimizer).__name__}.step", tensor, _worst([grad]), path)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        for kind in types:
            if kind is not torch.Tensor and kind is not nn.Parameter:
                if any(issubclass(cls, FakeTensor) for cls in types):
                    return func(*args, **(kwargs or {}))  # has no values
                return NotImplemented  # of a subclass, such as DTensor, the operations on its parts are seen
        results = func(*args, **kwargs) if kwargs else func(*args)
        if self.nan is not None or self.is_over:
            return results
        context = current.get()  # None on threads of autograd's
        if context is not None and context.call != self._call:
            self._call, self._number = context.call, self._number + 1
        backward = torch._C._current_graph_task_id() != -1
        if not backward and torch.is_grad_enabled():
            self._forward.note(self._origin)
        plan = self._plans.get(func)
        if plan is None:
            plan = self._plans[func] = _plan(func)
        if plan.is_checked:
            is_only_result = plan.returns_what_it_writes and type(results) is torch.Tensor
            for tensor in _float_tensors((results,) if is_only_result else _outputs(plan, args, kwargs or {}, results)):
                if _is_suspicious(tensor):
                    self._check(func, plan.name, tensor, args, kwargs or {}, backward)
        return results

    def _origin(self) -> tuple[str, CodeType | None, int]:
        frame = users_frame(sys._getframe(3))
        return (self._modules.current, *((frame.f_code, frame.f_lineno) if frame is not None else (None, 0)))

    def _check(self, func: Any, name: str, tensor: torch.Tensor, args: object, kwargs: object, backward: bool) -> None:
        if (name in _DELIBERATE or self.inf is not None) and not tensor.isnan().any():
            return
        worst = _worst(leaf for leaf in tree_leaves((args, kwargs)) if leaf is not tensor)
        module, source = self._modules.current, ""
        forward = self._forward.of_backward() if backward else None
        if forward is not None:
            module, source = forward[0] or module, f"{forward[1].co_filename}:{forward[2]}" if forward[1] else ""
        self._report(str(func), tensor, worst, module, source, backward=backward)

    def _report(
        self, operation: str, tensor: torch.Tensor, worst: str, module: str, source: str = "", *, backward: bool = False
    ) -> None:
        """Notes a result that is not finite if it is the first."""
        nans, infinities = int(tensor.isnan().sum()), int(tensor.isinf().sum())
        is_first = self.nan is None if nans else infinities > 0 and self.inf is None and worst == "finite"
        if not is_first:
            return
        frame = sys._getframe(2)
        worker = self._worker
        event = NonFinite(
            operation, nans, infinities, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), worst, backward,
            module, source or users_line(frame), "" if worker else _endpoint(self._call), self._number, time.time(),
            worker.operation_in(frame) if worker else None,
        )  # fmt: skip
        if not nans:
            self.inf = event
            return
        self.nan = event
        if self._stop:
            current_runtime().feature(DEBUG).stop(users_frame(frame) or frame, f"NaN in the result of {operation}")


def _endpoint(call: str) -> str:
    cells = tuple(current_runtime().cells.values())
    return next((cell.running[1] for cell in cells if cell.running is not None and cell.running[0] == call), "")


def _outputs(plan: _Plan, args: Sequence[object], kwargs: Mapping[str, object], results: object) -> list[object]:
    """Returns what an operation has made or written to, each object once."""
    leaves: list[object] = tree_leaves(results)
    for index, name in plan.written:
        leaves += tree_leaves(args[index] if index < len(args) else kwargs.get(name))
    return list({id(value): value for value in leaves}.values())


def _float_tensors(values: Iterable[object]) -> Iterator[torch.Tensor]:
    for value in values:
        if (
            isinstance(value, torch.Tensor)
            and type(value) in (torch.Tensor, nn.Parameter)
            and (value.is_floating_point() or value.is_complex())
            and value.numel() > 0
            and value.layout is torch.strided
            and not value.is_meta
        ):
            yield value


def _is_suspicious(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor may have an element that is not finite, at the cost of a sum. False is certain."""
    dtype = tensor.dtype
    if dtype is torch.float32 or dtype is torch.float64:
        return not math.isfinite(tensor.sum().item())
    if tensor.is_complex():
        return not bool(tensor.isfinite().all())
    return not math.isfinite(tensor.sum(dtype=torch.float32).item())


def _worst(values: Iterable[object]) -> str:
    worst = "finite"
    for value in values:
        if isinstance(value, float):
            value = torch.tensor(value)
        for tensor in _float_tensors((value,)):
            if bool(tensor.isnan().any()):
                return "nan"
            if bool(tensor.isinf().any()):
                worst = "inf"
    return worst


def users_line(frame: FrameType | None) -> str:
    """Returns the innermost line of the user's own code as `file:line`; "" without one."""
    users = users_frame(frame)
    return f"{users.f_code.co_filename}:{users.f_lineno}" if users is not None else ""


class StepWatch:
    """Watches one step without a request; `text` then describes the first NaN or infinity, if any."""

    def __init__(self) -> None:
        self._mode = FirstNan(stop=False, optimizers=False)  # created while hooks of optimizers run
        self._timer = threading.Timer(STEP_S, self._expire)
        self._timer.daemon = True
        self._timer.start()
        self.text = ""

    @classmethod
    def begun(cls) -> "StepWatch | None":
        """Begins to watch the operations of this thread, unless the program has entered its own modes."""
        return None if _get_current_dispatch_mode_stack() else cls()

    def end(self) -> bool:
        """Ends the watch. Returns False if it cannot: the program has entered a mode since, and must leave it first."""
        if _get_current_dispatch_mode_stack()[-1:] != [self._mode]:
            return False
        self._timer.cancel()
        nan, inf = self._mode.end()
        event = nan or inf
        self.text = event.text(inf) if event is not None else ""
        return True

    def _expire(self) -> None:
        self._mode.is_over = True  # the training has ended, or the step is too long
