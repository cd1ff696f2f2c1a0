"""Capture of the commands that a run of a step issues: its program, inputs, outputs and effects on gradients."""

import gc
import threading
import weakref
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.utils import _pytree as pytree

from monarch_nb.tensor.commands import (
    OBJECT,
    CallRemote,
    Define,
    Locals,
    MakeParts,
    Making,
    Number,
    PutTensor,
    RunFunction,
    Send,
    Take,
)
from monarch_nb.tensor.compiled.guards import Watched
from monarch_nb.tensor.compiled.program import Issued, Program, RunDifference, Sent, difference, renamed
from monarch_nb.tensor.errors import CallSite, origin_of
from monarch_nb.tensor.handle import MeshTensor
from monarch_nb.tensor.propagation import Meta, OperationPlan
from monarch_nb.tensor.references import Calls, LogicalMemory, Reference
from monarch_nb.tensor.seeds import seed_number
from monarch_nb.tensor.stream import Stream
from monarch_nb.tensor.workers.plans import PlanSignature

_NODES = 10_000  # of a graph, examined at most
_recording = threading.local()


class Recording:
    """Commands that one thread issues on one mesh. `reason` says why the step cannot be compiled, "" if it can."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.issued_here: list[Issued] = []
        self.sites: list[CallSite | None] = []
        self.metas: dict[int, Meta] = {}  # of tensors that the step uses but does not make
        self.reason = ""
        self.drawn = 0  # random operations in total
        self.calls: Calls = Counter()
        self._first = stream.held.next()
        self._made: set[int] = set()
        self._written: set[int] = set()  # tensors that shared no memory when written
        self._written_memory: weakref.WeakSet[LogicalMemory] = weakref.WeakSet()
        self._thread = threading.get_ident()
        self._seed, self._drawn = stream.draws.seed, stream.draws.drawn
        self._before = stream.table.calls

    def finished(self) -> None:
        """Completes the record after the step."""
        self.drawn = self.stream.draws.drawn - self._drawn
        self.calls = self.stream.table.calls
        self.calls.subtract(self._before)
        self.calls = +self.calls
        if self.stream.draws.seed != self._seed:
            self._refuse("it sets the seed of random numbers", None, "Call torch.manual_seed outside of it")

    @property
    def made(self) -> set[int]:
        """The numbers of the tensors that the step made. Existing views that are made again do not count."""
        return self._made

    def writes(self, number: int) -> bool:
        """Returns whether the step has written to a live tensor, also through a view or to its base."""
        if number in self._written:
            return True
        entry = self.stream.table.entries.get(number)
        reference = entry() if entry is not None else None
        return reference is not None and reference.memory in self._written_memory

    # -- as a watcher of the stream ---------------------------------------------------------------------------------

    def issued(self, command: tuple[object, ...], site: CallSite | None) -> None:
        """Records an operation, by the definition of its plan."""
        if threading.get_ident() != self._thread:
            return
        if command[0] == OBJECT:
            self._on_object(command[1], site)
            return
        numbers = [number for number in command if isinstance(number, int | float)]  # the whole command
        plan = self.stream.defined.get(int(numbers[0]))
        if plan is None:
            return
        if isinstance(plan, Define) and plan.agrees:
            self._refuse("ranks exchange values of their own in it", site, "Do that outside of it")
        signature = PlanSignature(plan)
        drawn = 0
        if signature.seeded is not None:
            drawn = self.stream.draws.drawn - self._drawn
            if numbers[1] != seed_number(self._seed, self.stream.draws.drawn):
                self._refuse("it sets the seed of random numbers", site, "Call torch.manual_seed outside of it")
        self._add(plan, site, numbers[signature.tensors], numbers[signature.floats], numbers[signature.results], drawn)

    def asked(self, operation: str, site: CallSite | None) -> None:
        """Refuses the step, since its later operations may depend on the value."""
        if threading.get_ident() == self._thread:
            advice = "Return the tensor, and ask for its value outside; torch.where chooses on the mesh"
            self._refuse(f"it waits for a value ({operation}), on which what it does next may depend", site, advice)

    def _on_object(self, command: object, site: CallSite | None) -> None:
        """Records a sent tensor as a constant; functions that run on ranks cannot be compiled."""
        match command:
            case PutTensor():
                meta = self.stream.table.entries[command.result].meta
                self._add(Sent(command.tensor, meta), site, (), (), (command.result,), 0)
            case Locals():
                self._refuse("it sends a tensor for each rank", site, "Do that outside of it")
            case RunFunction() | MakeParts() | CallRemote():
                self._refuse("it runs a function on the ranks", site, "Do that outside of it")
            case Send() | Take():
                self._refuse("it takes a tensor to another mesh or stream", site, "Do that outside of it")

    def _add(
        self,
        action: Define | Making | Sent,
        site: CallSite | None,
        tensors: Iterable[Number],
        floats: Iterable[Number],
        results: Iterable[Number],
        drawn: int,
    ) -> None:
        numbers = tuple(map(int, tensors))
        entries = self.stream.table.entries
        for number in numbers:
            if number not in self._made and number not in self.metas:
                self.metas[number] = entries[number].meta
        for index in action.writes if isinstance(action, Define) else ():
            reference = entries[numbers[index]]()
            if reference is None or reference.memory is None:
                self._written.add(numbers[index])
            else:
                self._written_memory.add(reference.memory)
        outputs = tuple(map(int, results))
        self._made.update(number for number in outputs if number > self._first)
        self.issued_here.append(Issued(action, numbers, tuple(map(float, floats)), outputs, drawn))
        self.sites.append(site)

    def _refuse(self, reason: str, site: CallSite | None, advice: str) -> None:
        if not self.reason:
            self.reason = reason_text(reason, site, advice)


def reason_text(reason: str, site: CallSite | None, advice: str) -> str:
    """Returns a reason with the line of the program and advice."""
    origin = origin_of(site)
    return reason + (f"\n  at {origin}" if origin is not None else "") + f"\n{advice}"


def is_recording() -> bool:
    """Returns whether this thread records a step, in which nested compiled steps run uncompiled."""
    return getattr(_recording, "now", False)


@contextmanager
def recorded(streams: Iterable[Stream]) -> Iterator[list[Recording]]:
    """Records the commands that this thread issues on these meshes."""
    recordings = [Recording(stream) for stream in streams]
    _recording.now = True
    for recording in recordings:
        recording.stream.watcher = recording
    try:
        yield recordings
    finally:
        _recording.now = False
        for recording in recordings:
            recording.stream.watcher = None
    for recording in recordings:
        recording.finished()


class GradientSlot(NamedTuple):
    """State of a parameter's gradient before a run (`None`, `read`, `unread`) and after it (`None`, `same`, `made`).

    `there` after the run is another tensor, which existed before.
    """

    leaf: "weakref.ref[MeshTensor]"
    number: int  # of the parameter
    before: str
    after: str

    def like(self, earlier: "GradientSlot") -> bool:
        """Returns whether the slot equals one of an earlier run; an unread gradient may have been absent."""
        same_before = self.before == earlier.before or (self.before, earlier.before) == ("unread", "None")
        return self.number == earlier.number and same_before and self.after == earlier.after


class Leaf(NamedTuple):
    """A value that a step returns: `made` by it, `given` to it, or any other `value`."""

    kind: str
    position: int = 0  # among its new tensors, or its arguments
    value: object = None
    has_graph: bool = False


class SharedResult(NamedTuple):
    """A result that shares memory of an input, or of an earlier result.

    `result` and `source` are positions among the inputs and then the results; `offset` is that of the result from the
    source in bytes. `steps` make the result from `base` if it is a copy on the workers.
    """

    result: int
    source: int
    offset: int
    base: int = 0
    steps: tuple[tuple[OperationPlan, int], ...] = ()


@dataclass
class Capture:
    """A recorded run. `reason` says why the step cannot be compiled, "" if it can.

    `sharing` are inputs that share memory, if one is a copy on the workers; see `shared_memory`.
    """

    stream: Stream
    reason: str
    program: Program
    fixed: tuple[int, ...]
    slots: tuple[GradientSlot, ...]
    arguments: tuple[int, ...]  # numbers of tensor arguments, without repetition
    returned: tuple[Leaf, ...]
    tree: pytree.TreeSpec
    sites: tuple[CallSite | None, ...]
    result_sites: list[CallSite | None]  # call sites of the results of the program
    aliases: tuple[SharedResult, ...]
    sharing: tuple[tuple[int, ...], ...]
    recording: Recording
    watched: Watched | None = field(default=None)

    def unlike(self, before: "Capture") -> RunDifference | None:
        """Returns the first difference from an earlier run, or None."""
        if self.stream is not before.stream:
            return RunDifference(None, "it runs on another mesh")
        mismatch = difference(before.program, self.program)
        if mismatch is not None:
            return mismatch
        for was, number in zip(before.fixed, self.fixed, strict=True):
            if was != number:
                issued = self.recording.issued_here
                index = next(index for index, step in enumerate(issued) if number in step.tensors)
                name = self.program.operations[index].name
                return RunDifference(index, f"{name} takes a tensor that was not there before, and is no argument")
        if len(self.slots) != len(before.slots) or not all(map(GradientSlot.like, self.slots, before.slots)):
            return RunDifference(None, "gradients are there, or are left, for other parameters")
        if self.tree != before.tree or len(self.returned) != len(before.returned):
            return RunDifference(None, "it returns something of another form")
        for old, new in zip(before.returned, self.returned, strict=True):
            if old[:2] != new[:2] or old.has_graph != new.has_graph or not _alike(old.value, new.value):
                return RunDifference(None, f"it returns {old.value!r} before and {new.value!r} now, and no tensor")
        return None


def parameters(stream: Stream) -> dict[int, tuple[MeshTensor, int | None]]:
    """Returns tensors of a mesh that accumulate gradients, by number, each with the number of its gradient.

    Only tensors that took part in an operation; others have a gradient only if the program assigned one.
    """
    leaves = {}
    for number, reference in tuple(stream.held.leaves.items()):
        leaf = reference()
        if leaf is not None and leaf.requires_grad and leaf.is_leaf and leaf.reference.number == number:
            grad = leaf.grad
            leaves[number] = (leaf, grad.reference.number if isinstance(grad, MeshTensor) else None)
    return leaves


def captured(
    recordings: Sequence[Recording],
    before: dict[int, dict[int, tuple[MeshTensor, int | None]]],
    leaves: Sequence[object],
    result: object,
) -> Capture | str:
    """Builds the capture of a run, or returns the reason why there is none. `before` has the parameters by stream."""
    used = [recording for recording in recordings if recording.issued_here or recording.reason]
    if len(used) != 1:
        meshes = " and ".join(recording.stream.title for recording in used)
        return f"it uses several meshes, {meshes}" if used else "it issues no operation on a mesh"
    [recording] = used
    stream = recording.stream
    returned, tree = pytree.tree_flatten(result)
    numbers = [leaf.reference.number for leaf in leaves if isinstance(leaf, MeshTensor)]
    arguments = tuple(dict.fromkeys(numbers))
    outputs = {value.reference.number: value for value in returned if isinstance(value, MeshTensor)}
    results = [number for number in outputs if number in recording.made]
    slots, read, grads = _slots(recording, before[id(stream)], parameters(stream))
    reason = recording.reason
    if not reason and any(slot.number in arguments for slot in slots if slot.after == "made"):
        reason = "an argument of it gathers a gradient. Give it detached, or make it a parameter"
    if not reason and any(slot.after == "there" for slot in slots):
        reason = "a gradient of it is a tensor that was there before. Copy it: weight.grad = gradient.clone()"
    template = []
    for value in returned:
        leaf, problem = _leaf(value, results, arguments)
        template.append(leaf)
        reason = reason or problem
    bases = {value.reference.copied.base.number for value in outputs.values() if value.reference.copied is not None}
    reason = reason or _unreturned_reason(recording, {*results, *grads}, bases)
    metas = dict(recording.metas)
    metas.update({value.reference.number: value.meta for value in leaves if isinstance(value, MeshTensor)})
    written = [number for number in (*arguments, *recording.metas) if recording.writes(number)]
    program, fixed = renamed(recording.issued_here, (*arguments, *read), (*results, *grads), metas, written)
    inputs = stream.held.references((*arguments, *read, *fixed))
    aliases = _aliases(inputs, stream.held.references((*results, *grads)))
    sites = {
        number: site
        for issued, site in zip(recording.issued_here, recording.sites, strict=True)
        for number in issued.results
    }
    return Capture(
        stream,
        reason,
        program,
        fixed,
        slots,
        arguments,
        tuple(template),
        tree,
        tuple(recording.sites),
        [sites[number] for number in (*results, *grads)],
        aliases,
        shared_memory(inputs),
        recording,
    )


def shared_memory(inputs: Sequence[Reference | None]) -> tuple[tuple[int, ...], ...]:
    """Returns positions of inputs that share memory, by memory, if one of them is a copy on the workers.

    A step renews copies after its writes like the captured run, so that its inputs must share memory like the run's.
    """
    groups: dict[LogicalMemory, list[int]] = {}
    for position, reference in enumerate(inputs):
        if reference is not None and reference.memory is not None and reference.memory.copies:
            groups.setdefault(reference.memory, []).append(position)
    return tuple(tuple(group) for group in groups.values() if len(group) > 1)


def _aliases(inputs: Sequence[Reference | None], results: Sequence[Reference | None]) -> tuple[SharedResult, ...]:
    shared = []
    sources: dict[LogicalMemory, tuple[int, Reference]] = {}
    positions: dict[Reference, int] = {}
    for position, reference in enumerate((*inputs, *results)):
        if reference is None:
            continue
        positions[reference] = position
        if reference.memory is None:
            continue
        source, source_reference = sources.setdefault(reference.memory, (position, reference))
        if position >= len(inputs) and source != position:
            offset = reference.offset - source_reference.offset
            base, steps = reference.copied or (source_reference, ())
            shared.append(SharedResult(position, source, offset, positions.get(base, source), steps))
    return tuple(shared)


def _slots(
    recording: Recording,
    before: dict[int, tuple[MeshTensor, int | None]],
    after: dict[int, tuple[MeshTensor, int | None]],
) -> tuple[tuple[GradientSlot, ...], list[int], list[int]]:
    """Returns slots of gradients, and the numbers of gradients that the step uses and of those that it makes."""
    slots, used, new = [], [], []
    for number, (leaf, grad) in sorted(after.items()):
        if number not in recording.metas and grad not in recording.made:
            continue
        old = before[number][1] if number in before else None
        old_kind = "None" if old is None else "read" if old in recording.metas else "unread"
        kind = "made" if grad in recording.made else "None" if grad is None else "same" if grad == old else "there"
        slots.append(GradientSlot(weakref.ref(leaf), number, old_kind, kind))
        if old is not None and old_kind == "read":
            used.append(old)
        if grad is not None and kind == "made":
            new.append(grad)
    return tuple(slots), used, new


def _unreturned_reason(recording: Recording, returned: Iterable[int], bases: Container[int]) -> str:
    """Returns why a step that stores tensors without returning them cannot be compiled; "" if it stores none.

    `bases` stay since results are views of them, which are copies on the workers.
    """
    recording.stream.free()
    entries = recording.stream.table.entries
    unreturned = recording.made.difference(returned)
    if not any(number in entries for number in unreturned):
        return ""
    gc.collect()
    recording.stream.free()
    for issued, site in zip(recording.issued_here, recording.sites, strict=True):
        for number in issued.results:
            if number in unreturned and number in entries:
                name = "distribute" if not hasattr(issued.action, "operation") else issued.action.operation
                if number in bases:
                    reason = f"it returns a view of what {name} has made, and not that"
                    return reason_text(reason, site, "Return a copy of the view: view.clone()")
                return reason_text(
                    f"it keeps what {name} has made, beyond the call, and neither as its result nor as a gradient",
                    site,
                    "Return the tensor, or write into one that is there before (t.copy_(...))",
                )
    return ""


def _leaf(value: object, results: list[int], arguments: tuple[int, ...]) -> tuple[Leaf, str]:
    if not isinstance(value, MeshTensor):
        problem = "it returns a local tensor. Return that of the mesh, and fetch it outside"
        return Leaf("value", value=value), problem if isinstance(value, torch.Tensor) else ""
    number = value.reference.number
    has_graph = value.grad_fn is not None
    problem = ""
    if value.grad_fn is not None and _is_open(value.grad_fn):
        problem = "it returns a tensor with its graph. Call backward() inside of it, or return it detached"
    if number in results:
        return Leaf("made", results.index(number), has_graph=has_graph), problem
    if number in arguments:
        return Leaf("given", arguments.index(number)), problem
    return Leaf("value", value=value), problem


def _is_open(node: torch.autograd.graph.Node) -> bool:
    """Returns whether gradients can flow through a graph, i.e. its saved tensors have not been freed."""
    pending, visited = [node], {node}
    while pending and len(visited) < _NODES:
        current = pending.pop()
        for name in dir(current):
            if name.startswith("_saved_"):
                try:
                    getattr(current, name)
                except RuntimeError:  # "… after they have already been freed"
                    return False
        for following, _ in current.next_functions:
            if following is not None and following not in visited:
                visited.add(following)
                pending.append(following)
    return True


def _alike(before: object, now: object) -> bool:
    if before is now:
        return True
    if isinstance(before, MeshTensor) and isinstance(
        now, MeshTensor
    ):  # of a tensor that existed before, such as a parameter
        return before.reference is now.reference and not (before.requires_grad or now.requires_grad)
    if isinstance(before, torch.Tensor) or isinstance(now, torch.Tensor):
        return False
    return bool(type(before) is type(now) and before == now)
