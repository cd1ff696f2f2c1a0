"""`monarch.compile`: a step runs uncompiled until two runs are equal, and then as one message."""

import functools
import inspect
import threading
import types
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from sys import getrefcount
from typing import Any, NoReturn, overload

import torch
from torch.utils import _pytree as pytree

from monarch_nb._package import more
from monarch_nb.tensor import device
from monarch_nb.tensor.commands import REPLAY
from monarch_nb.tensor.compiled.capture import (
    Capture,
    GradientSlot,
    Leaf,
    captured,
    is_recording,
    parameters,
    recorded,
    shared_memory,
)
from monarch_nb.tensor.compiled.guards import Watched
from monarch_nb.tensor.compiled.program import RunDifference, Trace
from monarch_nb.tensor.errors import CallSite, CompileError, CompileWarning, origin_of
from monarch_nb.tensor.handle import MeshTensor
from monarch_nb.tensor.lanes import ACTIVE, check_lane
from monarch_nb.tensor.propagation import Meta
from monarch_nb.tensor.references import CallSites, Copied, Reference, StepWrites, WriteRecord
from monarch_nb.tensor.seeds import seed_number
from monarch_nb.tensor.stream import Stream
from monarch_nb.tensor.views import make_again, make_stale, share
from monarch_nb.transport import held_back
from monarch_nb.wire import counted

BACKENDS = ("python", "fx", "inductor", "cudagraphs")
_WITHOUT_RANDOMNESS = {
    "inductor": "inductor would draw others than PyTorch does",
    "cudagraphs": "a CUDA graph would draw the same in each call",
}
PROGRAMS = 8  # of a step at most; further kinds of calls run uncompiled
KINDS = 32  # different kinds of arguments at most
RUNS = 4  # of which two must be equal
CHECK_EVERY = 1000


def _reference_count_once() -> int:
    items = [object()]
    name = items[0]
    return getrefcount(name)


_HANDLE_ALONE = _reference_count_once()  # reference count of a gradient held by its parameter only
_REFERENCE_ALONE = 2


class Variant:
    """A program of a step, sent to the workers on construction. `leaves` are the arguments of the captured run."""

    def __init__(
        self, capture: Capture, leaves: Sequence[object], floats: tuple[float, ...], watched: Watched, backend: str
    ) -> None:
        self.stream: Stream = capture.stream
        self._heals = self.stream.heals
        self.floats = floats
        self.capture, self.watched = capture, watched
        self.calls = 0
        numbers = [leaf.reference.number if isinstance(leaf, MeshTensor) else None for leaf in leaves]
        self._arguments = [numbers.index(number) for number in capture.arguments]
        self._fixed = frozenset(capture.fixed)
        self._sites = CallSites(capture.sites)
        program = capture.program
        metas = program.metas
        self._is_own = all(meta.is_own for meta in metas)
        self._metas = [metas[register] for register in program.results]
        slots = [slot for slot in capture.slots if slot.after == "made"]
        self._results = len(program.results) - len(slots)
        self._read = [slot for slot in capture.slots if slot.before == "read"]
        self._gradients = [_Gradient(slot) for slot in slots]
        self._dropped = [slot for slot in capture.slots if slot.after == "None" and slot.before != "None"]
        self._absent = [slot for slot in capture.slots if slot.before == "None"]
        self._reference = self.stream.hold_object()
        inputs = len(program.inputs) - len(capture.fixed)
        self._head = (REPLAY, self._reference.number, len(program.operations), inputs, len(program.results))
        constant = [capture.fixed[register - inputs] for register in program.written if register >= inputs]
        self._written = [register for register in program.written if register < inputs]
        self._writes = StepWrites(constant)
        self.stream.held.steps.add(self._writes)
        self.stream.issue_object(Trace(self._reference.number, program, capture.fixed, backend))

    def unfit(self, leaves: Sequence[object] | None = None) -> str:
        """Returns why this program may differ from the step now, called with `leaves`; "" if there is no reason."""
        if self.stream.lost is not None:
            return "the mesh has lost its tensors"
        if self.stream.heals != self._heals:
            return "the mesh was healed since"
        changed = self.watched.changed()
        if changed:
            return changed
        if self.stream.queue:
            self.stream.free()
        if not self.stream.table.entries.keys() >= self._fixed:
            return "a tensor that it uses is no more"
        for slot in self._absent:
            leaf = slot.leaf()
            if leaf is None or leaf.grad is not None:
                return "a parameter has a gradient that had none"
        for slot in self._read:
            leaf = slot.leaf()
            if leaf is None or leaf.grad is None:
                return "a parameter has no gradient that had one"
        if leaves is not None and self.stream.viewed and shared_memory(self._inputs(leaves)) != self.capture.sharing:
            return "its tensors share memory with others than before"
        return ""

    def _inputs(self, leaves: Sequence[Any]) -> list[Reference | None]:
        references: list[Reference | None] = [leaves[index].reference for index in self._arguments]
        references += [_grad(slot).reference for slot in self._read]
        return references + self.stream.held.references(self.capture.fixed)

    def __call__(self, leaves: Sequence[object]) -> object:
        """Replays the step and returns its results. Blocks, interruptibly, while the window is exceeded."""
        stream = self.stream
        if self._is_own and (stream.lane is not ACTIVE.stream or stream.held.has_lent):
            check_lane(stream, "a compiled step", self._inputs(leaves), self.capture.program.written)
        self.calls += 1
        stream.wait_for_window()
        return held_back(self._call, leaves)

    def _call(self, leaves: Sequence[Any]) -> object:
        stream, sites = self.stream, self.capture.result_sites
        numbers = [leaves[index].reference.number for index in self._arguments]
        numbers += [_grad(slot).reference.number for slot in self._read]
        if stream.held.lost:
            stream.held.require_contents((*numbers, *self._fixed))
        if stream.held.stale:
            make_again(stream, (*numbers, *self._fixed), None)
        inputs = self._inputs(leaves) if stream.viewed or self.capture.aliases else []
        references = [stream.hold(meta, sites[index]) for index, meta in enumerate(self._metas[: self._results])]
        outputs = [reference.number for reference in references]
        for index, gradient in enumerate(self._gradients, self._results):
            outputs.append(gradient.number(stream, self._metas[index], sites[index]))
        for slot in self._dropped:
            leaf = slot.leaf()
            if leaf is not None:
                leaf.grad = None
        if self.capture.recording.drawn:
            stream.draws.announce(stream)
        seed = seed_number(stream.draws.seed, stream.draws.drawn)
        if self._writes.gradients != (gradients := outputs[self._results :]):
            self._replace_gradients(gradients)
        written: list[WriteRecord] = [self._writes]
        if self._written:
            arguments = stream.held.references([numbers[register] for register in self._written])
            written += [reference.writes for reference in arguments if reference is not None]
        stream.repeat((*self._head, seed, *numbers, *outputs), self._sites, written)
        if inputs:
            self._update_views(inputs, stream.held.references(outputs))
        stream.draws.drawn += self.capture.recording.drawn
        if self.capture.recording.calls:
            stream.table.moved_again(self.capture.recording.calls)
        for gradient in self._gradients:
            if gradient.new is not None:
                gradient.give()
        capture = self.capture
        values = [self._handle(leaf, references, leaves) for leaf in capture.returned]
        return pytree.tree_unflatten(values, capture.tree)

    def _replace_gradients(self, numbers: list[int]) -> None:
        """Notes the gradients that the step writes to from now on. Earlier ones, if alive, keep their last write."""
        writes = self._writes
        for reference in self.stream.held.references(set(writes.gradients).difference(numbers)):
            if reference is not None:
                reference.writes.written = writes.written
        writes.gradients = numbers

    def _update_views(self, inputs: list[Reference | None], results: list[Reference | None]) -> None:
        """Records the bases of results that are views, and the copied views that have become stale."""
        references = inputs + results
        for alias in self.capture.aliases:
            result, source, base = references[alias.result], references[alias.source], references[alias.base]
            assert result is not None
            assert source is not None
            assert base is not None
            share(result, source, alias.offset, Copied(base, alias.steps) if alias.steps else None)
        for register in self.capture.program.written:
            reference = inputs[register]
            if reference is not None:
                make_stale(reference)

    def _handle(self, leaf: Leaf, references: Sequence[Reference], leaves: Sequence[object]) -> object:
        if leaf.kind == "given":
            return leaves[self._arguments[leaf.position]]
        if leaf.kind == "value":
            return leaf.value
        make: Callable[..., object] = _Ended.apply if leaf.has_graph else _handle
        return make(_anchor(), self._metas[leaf.position], references[leaf.position])


class _Gradient:
    """The gradient of a parameter after a call; reuses the last one's number unless that is still referred to."""

    def __init__(self, slot: GradientSlot) -> None:
        self._slot = slot
        self._number = 0
        self.new: MeshTensor | None = None  # not assigned yet

    def number(self, stream: Stream, meta: Meta, site: CallSite | None) -> int:
        """Returns the number of the gradient on the workers."""
        leaf = self._slot.leaf()
        grad = leaf.grad if leaf is not None else None
        if (
            isinstance(grad, MeshTensor)
            and grad.reference.number == self._number
            and getrefcount(grad) <= _HANDLE_ALONE
            and getrefcount(grad.reference) <= _REFERENCE_ALONE
        ):
            return self._number
        if leaf is not None and self._slot.before != "read":
            leaf.grad = None  # freed before the call, as in the step
        self.new = MeshTensor(meta, stream.hold(meta, site))
        self._number = self.new.reference.number
        return self._number

    def give(self) -> None:
        """Assigns the new gradient to the parameter."""
        leaf = self._slot.leaf()
        if leaf is not None:
            leaf.grad = self.new
        self.new = None


class _Ended(torch.autograd.Function):
    """A result whose graph was consumed by the step."""

    @staticmethod
    def forward(ctx: object, anchor: torch.Tensor, meta: Meta, reference: Reference) -> MeshTensor:
        """Creates the result here, since passing a tensor through would be an operation."""
        return MeshTensor(meta, reference)

    @staticmethod
    def backward(ctx: object, *grads: object) -> NoReturn:
        """Raises CompileError."""
        raise CompileError(
            "this tensor came out of a compiled step, which has called backward() on it already. "
            "Call backward() inside of the step only, or use the tensor detached"
        )


def _handle(anchor: torch.Tensor, meta: Meta, reference: Reference) -> MeshTensor:
    return MeshTensor(meta, reference)


_anchors: list[torch.Tensor] = []


def _anchor() -> torch.Tensor:
    if not _anchors:
        _anchors.append(torch.zeros((), device="cpu", requires_grad=True))
    return _anchors[0]


def _grad(slot: GradientSlot) -> MeshTensor:
    leaf = slot.leaf()
    assert leaf is not None
    assert isinstance(leaf.grad, MeshTensor)
    return leaf.grad


class CompiledStep:
    """A step whose Python runs only for capture and checks. See `monarch.compile`."""

    def __init__(self, function: Callable[..., object], backend: str, check_every: int) -> None:
        functools.update_wrapper(self, function)
        self._function, self._backend, self._check_every = function, backend, check_every
        self._variants: dict[Hashable, list[Variant]] = {}
        self._candidates: dict[Hashable, Capture] = {}  # captured runs without an equal one yet
        self._runs: Counter[Hashable] = Counter()  # runs since the last program, by kind of arguments
        self._not_compilable: set[Hashable] = set()  # kinds of calls that cannot be compiled
        self._warned: set[str] = set()
        self._checked_optimizers = False
        self._lock = threading.RLock()

    @property
    def programs(self) -> int:
        """The number of programs: one for each kind of arguments and each state of the values read."""
        return sum(map(len, self._variants.values()))

    @property
    def calls(self) -> int:
        """The number of replayed calls."""
        return sum(variant.calls for variants in self._variants.values() for variant in variants)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step. A compiled step blocks only while the window is exceeded.

        Raises CompileError if the step cannot be compiled in its present form, and the step's own errors.
        """
        if is_recording():
            return self._function(*args, **kwargs)
        with self._lock:
            leaves, tree = (
                pytree.tree_flatten((args, kwargs)) if kwargs or not _are_tensors(args) else (args, len(args))
            )
            facts, floats = _facts(leaves)
            key = (tree, facts, torch.is_grad_enabled(), _autocast())
            for variant in self._variants.get(key, ()):
                if variant.floats == floats and not variant.unfit(leaves):
                    if self._check_every and variant.calls % self._check_every == self._check_every - 1:
                        return self._run_and_check(variant, key, leaves, args, kwargs)
                    return variant(leaves)
            if key in self._not_compilable or len(self._runs) > KINDS:
                return self._function(*args, **kwargs)
            return self._run_and_capture(key, leaves, floats, args, kwargs)

    def __get__(self, instance: object, owner: type | None = None) -> "CompiledStep | types.MethodType":
        return self if instance is None else types.MethodType(self, instance)

    def __repr__(self) -> str:
        name = getattr(self._function, "__qualname__", repr(self._function))
        if not self.programs:
            state = "runs as it is written" if self._not_compilable else f"captured in its first runs ({self._backend})"
            return f"<compiled step {name}: {state}>"
        sizes = [
            len(variant.capture.program.operations) for variants in self._variants.values() for variant in variants
        ]
        operations = ", ".join(f"{size} operations" for size in sizes)
        return f"<compiled step {name} ({self._backend}): {operations}; {counted(self.calls, 'call')}>"

    # -- capturing --------------------------------------------------------------------------------------------------

    def _run(
        self, leaves: Sequence[object], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[object, Capture | str, Watched]:
        """Runs the Python and returns its result and capture."""
        watched = Watched(self._function, (*args, *kwargs.values()))
        self._check_optimizers(watched)
        streams = [stream for stream, _ in device.streams() if stream.lost is None]
        before = {id(stream): parameters(stream) for stream in streams}
        with recorded(streams) as recordings:
            result = self._function(*args, **kwargs)
        capture = captured(recordings, before, leaves, result)
        if isinstance(capture, Capture) and not capture.reason:
            changed = watched.changed()
            if changed:
                capture.reason = (
                    f"it changes what it reads itself: {changed}. Python does not run in a compiled call: "
                    "do that outside of the step, or keep the number in a tensor of the mesh"
                )
        return result, capture, watched

    def _run_and_capture(
        self,
        key: Hashable,
        leaves: Sequence[object],
        floats: tuple[float, ...],
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> object:
        if self.programs >= PROGRAMS:
            self._drop_unfit()
        if self.programs >= PROGRAMS:
            self._give_up(
                key,
                f"it has {PROGRAMS} programs already, for arguments of other shapes or other values that it reads"
                f"{self._last_reason(key)}. Pad what differs, or keep numbers that change in tensors",
            )
            return self._function(*args, **kwargs)
        result, capture, watched = self._run(leaves, args, kwargs)
        candidate = self._candidates.pop(key, None)
        self._runs[key] += 1
        if len(self._runs) > KINDS:
            self._give_up(key, f"it was called in {KINDS} different ways. Pad what differs; numbers can be tensors")
            return result
        if isinstance(capture, str) or capture.reason:
            if self._runs[key] > 1:
                self._give_up(key, capture if isinstance(capture, str) else capture.reason)
            return result
        difference = capture.unlike(candidate) if candidate is not None else None
        if candidate is None or difference is not None:
            if difference is not None and difference.scalars:
                raise _scalar_error(capture, difference)
            if difference is not None and self._runs[key] >= RUNS:
                self._give_up(key, f"no two of {RUNS} runs of it were alike: {_difference_text(capture, difference)}")
            else:
                self._candidates[key] = capture
            return result
        self._check_backend(capture)
        variant = Variant(capture, leaves, floats, watched, self._backend)
        self._variants.setdefault(key, []).append(variant)
        self._runs[key] = 0
        return result

    def _run_and_check(
        self,
        variant: Variant,
        key: Hashable,
        leaves: Sequence[object],
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> object:
        """Runs the Python and compares it with the program. Raises CompileError if they differ."""
        result, capture, _ = self._run(leaves, args, kwargs)
        if isinstance(capture, str) or capture.reason:
            text = capture if isinstance(capture, str) else capture.reason
        else:
            difference = capture.unlike(variant.capture)
            if difference is None:
                variant.calls += 1
                return result
            text = _difference_text(capture, difference)
        self._variants[key].remove(variant)
        raise CompileError(
            f"{self._name} does something else by now than when it was captured: {text}\n"
            f"This call ran as it is written; the {self._check_every - 1} before ran as captured. "
            "It is captured anew" + more("manual/compile.md#when-a-step-is-captured-again")
        )

    def _check_backend(self, capture: Capture) -> None:
        if capture.recording.drawn and self._backend in _WITHOUT_RANDOMNESS:
            raise CompileError(
                f"the step draws random numbers (dropout), and {_WITHOUT_RANDOMNESS[self._backend]}: "
                'take backend="fx" or "python"'
            )
        device = capture.stream.layout.device
        if self._backend == "cudagraphs" and device != "cuda":
            raise CompileError(
                f'backend="cudagraphs" needs ranks that compute on GPUs, and those of {capture.stream.title} compute '
                f'on {device}: take backend="python"'
            )

    def _check_optimizers(self, watched: Watched) -> None:
        if self._checked_optimizers:
            return
        for optimizer in watched.optimizers:
            for group in optimizer.param_groups:
                if "capturable" in group and not group["capturable"] and not group.get("fused"):
                    name = type(optimizer).__name__
                    option = "fused=True" if "fused" in group else "capturable=True"
                    raise CompileError(
                        f"{name} counts its steps in Python, which a compiled step does not run: "
                        f"make it {name}(..., {option})" + more("manual/compile.md#what-a-step-needs")
                    )
        self._checked_optimizers = True

    # -- warnings ---------------------------------------------------------------------------------------------------

    @property
    def _name(self) -> str:
        return getattr(self._function, "__qualname__", repr(self._function))

    def _give_up(self, key: Hashable, reason: str) -> None:
        self._not_compilable.add(key)
        if reason not in self._warned:
            self._warned.add(reason)
            warnings.warn(f"{self._name} runs as it is written, not compiled: {reason}", CompileWarning, stacklevel=4)

    def _drop_unfit(self) -> None:
        """Drops programs whose mesh is lost."""
        for key, variants in list(self._variants.items()):
            self._variants[key] = [variant for variant in variants if variant.stream.lost is None]

    def _last_reason(self, key: Hashable) -> str:
        variants = self._variants.get(key, ())
        return f" (the last: {variants[-1].unfit()})" if variants else ""


def _difference_text(capture: Capture, difference: RunDifference) -> str:
    origin = origin_of(capture.sites[difference.index]) if difference.index is not None else None
    return difference.text + (f"\n  issued at {origin}" if origin is not None else "")


def _scalar_error(capture: Capture, difference: RunDifference) -> CompileError:
    return CompileError(
        "a number changes from call to call, and a compiled step would go on with the last: "
        f"{_difference_text(capture, difference)}\n"
        "This call has run as it is written. Keep the number in a tensor of the mesh: lr=torch.tensor(1e-3, "
        "device=mesh.device), an optimizer with fused=True or capturable=True, a scheduler stepped outside; or give a "
        "tensor as an argument"
    )


def _are_tensors(args: tuple[object, ...]) -> bool:
    return all(isinstance(value, MeshTensor) for value in args)


def _facts(leaves: Sequence[object]) -> tuple[tuple[Hashable, ...], tuple[float, ...]]:
    """Returns the properties of the arguments on which a program depends, and the floats among them."""
    facts: list[Hashable] = []
    floats: list[float] = []
    first: dict[int, int] = {}
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, MeshTensor):
            number = leaf.reference.number
            facts += (leaf.meta, leaf.requires_grad, first.setdefault(number, index), leaf.reference.stream.number)
        elif type(leaf) is float:
            floats.append(leaf)
            facts.append(float)
        elif isinstance(leaf, (bool, int, str, bytes, type(None))):
            facts.append((type(leaf), leaf))
        else:
            facts.append(_Same(leaf))
    return tuple(facts), tuple(floats)


def _autocast() -> Hashable:
    kind = device.NAME if device.claim() else "cpu"
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


class _Same:
    """A key that compares by identity."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


@overload
def compile_step(step: Callable[..., object], *, backend: str = ..., check_every: int = ...) -> CompiledStep: ...
@overload
def compile_step(
    step: None = None, *, backend: str = ..., check_every: int = ...
) -> Callable[[Callable[..., object]], CompiledStep]: ...
def compile_step(
    step: Callable[..., object] | None = None, *, backend: str = "python", check_every: int = CHECK_EVERY
) -> CompiledStep | Callable[[Callable[..., object]], CompiledStep]:
    """See `monarch.compile`."""
    if step is None:
        return functools.partial(compile_step, backend=backend, check_every=check_every)
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r}: one of {', '.join(map(repr, BACKENDS))}")
    if not callable(step) or inspect.iscoroutinefunction(step) or inspect.isgeneratorfunction(step):
        raise TypeError(f"{step!r} is no function that runs and returns: a step that is compiled must be one")
    return CompiledStep(step, backend, check_every)
