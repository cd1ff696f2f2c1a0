"""Result of recording a step: its program, inputs, outputs and effects on gradients."""

import gc
import weakref
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from monarch_nb.tensor.compiled.difference import RunDifference, difference
from monarch_nb.tensor.compiled.guards import Watched
from monarch_nb.tensor.compiled.program import Program, renamed
from monarch_nb.tensor.compiled.recording import Recording, reason_text
from monarch_nb.tensor.handle import MeshTensor
from monarch_nb.tensor.origin import CallSite
from monarch_nb.tensor.propagation import OperationPlan
from monarch_nb.tensor.references import LogicalMemory, Reference
from monarch_nb.tensor.stream import Stream

_NODES = 10_000  # of a graph that are examined


class GradientSlot(NamedTuple):
    """State of a parameter's gradient before a run (`None`, `read`, `unread`) and after it (`None`, `same`, `made`).

    After it, `there` is another tensor, which was there before.
    """

    leaf: "weakref.ref[MeshTensor]"
    number: int  # of the parameter
    before: str
    after: str

    def like(self, other: "GradientSlot") -> bool:
        """Returns whether the slot equals one of an earlier run; an unread gradient may have been absent."""
        same_before = self.before == other.before or (self.before, other.before) == ("unread", "None")
        return self.number == other.number and same_before and self.after == other.after


class Leaf(NamedTuple):
    """A value that a step returns: `made` by it, `given` to it, or any other `value`."""

    kind: str
    position: int = 0  # among the tensors that it made, or was given
    value: Any = None
    has_graph: bool = False


class SharedResult(NamedTuple):
    """A result that shows memory of an input, or of an earlier result.

    `result` and `source` are positions among the inputs and then the results; `offset` is that of the result from the
    source in bytes. `steps` make the result from `base` where it is a copy on the workers.
    """

    result: int
    source: int
    offset: int
    base: int = 0
    steps: tuple[tuple[OperationPlan, int], ...] = ()


@dataclass
class Capture:
    """A recorded run. `reason` says why the step cannot be compiled, "" if it can.

    `sharing` are inputs that share memory, where one is a copy on the workers; see `shared_memory`.
    """

    stream: Stream
    reason: str
    program: Program
    fixed: tuple[int, ...]
    slots: tuple[GradientSlot, ...]
    given: tuple[int, ...]  # numbers of tensor arguments, without repetition
    returned: tuple[Leaf, ...]
    tree: Any
    sites: tuple[CallSite | None, ...]
    made_at: list[CallSite | None]  # call sites of the results of the program
    aliases: tuple[SharedResult, ...]
    sharing: tuple[tuple[int, ...], ...]
    recording: Recording
    watched: Watched | None = field(default=None)

    def unlike(self, before: "Capture") -> RunDifference | None:
        """Returns the first difference from an earlier run, or None."""
        if self.stream is not before.stream:
            return RunDifference(None, "it runs on another mesh")
        found = difference(before.program, self.program)
        if found is not None:
            return found
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
        for earlier, later in zip(before.returned, self.returned, strict=True):
            if (
                earlier[:2] != later[:2]
                or earlier.has_graph != later.has_graph
                or not _alike(earlier.value, later.value)
            ):
                return RunDifference(
                    None, f"it returns {earlier.value!r} before and {later.value!r} now, and no tensor"
                )
        return None


def parameters(stream: Stream) -> dict[int, tuple[MeshTensor, int | None]]:
    """Tensors of a mesh that accumulate gradients, by number, each with the number of its gradient.

    Only tensors that took part in an operation; others have a gradient only if the program assigned one.
    """
    found = {}
    for number, known in tuple(stream.held.leaves.items()):
        leaf = known()
        if leaf is not None and leaf.requires_grad and leaf.is_leaf and leaf.reference.number == number:
            grad = leaf.grad
            found[number] = (leaf, grad.reference.number if type(grad) is MeshTensor else None)
    return found


def captured(
    recordings: Sequence[Recording],
    before: dict[int, dict[int, tuple[MeshTensor, int | None]]],
    leaves: Sequence[Any],
    result: Any,
) -> Capture | str:
    """Builds the capture of a run, or returns why there is none. `before` has the parameters by stream."""
    used = [recording for recording in recordings if recording.issued_here or recording.reason]
    if len(used) != 1:
        meshes = " and ".join(recording.stream.title for recording in used)
        return f"it uses several meshes, {meshes}" if used else "it issues no operation on a mesh"
    [recording] = used
    stream = recording.stream
    returned, tree = pytree.tree_flatten(result)
    numbers = [leaf.reference.number for leaf in leaves if type(leaf) is MeshTensor]
    given = tuple(dict.fromkeys(numbers))
    own = {value.reference.number: value for value in returned if type(value) is MeshTensor}
    results = [number for number in own if number in recording.made]
    slots, read, grads = _slots(recording, before[id(stream)], parameters(stream))
    reason = recording.reason
    if not reason and any(slot.number in given for slot in slots if slot.after == "made"):
        reason = "an argument of it gathers a gradient. Give it detached, or make it a parameter"
    if not reason and any(slot.after == "there" for slot in slots):
        reason = "a gradient of it is a tensor that was there before. Copy it: weight.grad = gradient.clone()"
    template = []
    for value in returned:
        leaf, wrong = _leaf(value, results, given)
        template.append(leaf)
        reason = reason or wrong
    bases = {value.reference.copied.base.number for value in own.values() if value.reference.copied is not None}
    reason = reason or _unreturned(recording, {*results, *grads}, bases)
    metas = dict(recording.metas)
    metas.update({value.reference.number: value.meta for value in leaves if type(value) is MeshTensor})
    written = [number for number in (*given, *recording.metas) if recording.writes(number)]
    program, fixed = renamed(recording.issued_here, (*given, *read), (*results, *grads), metas, written)
    inputs = stream.held.references((*given, *read, *fixed))
    aliases = _aliases(inputs, stream.held.references((*results, *grads)))
    sites = {
        number: where
        for issued, where in zip(recording.issued_here, recording.sites, strict=True)
        for number in issued.results
    }
    return Capture(
        stream, reason, program, fixed, slots, given, tuple(template), tree, tuple(recording.sites),
        [sites[number] for number in (*results, *grads)], aliases, shared_memory(inputs), recording,
    )  # fmt: skip


def shared_memory(inputs: Sequence[Reference | None]) -> tuple[tuple[int, ...], ...]:
    """Positions of inputs that share memory, by memory, where one of them is a copy on the workers.

    A step makes copies again after its writes as the captured run did, so that its inputs must share what they did.
    """
    groups: dict[LogicalMemory, list[int]] = {}
    for position, reference in enumerate(inputs):
        if reference is not None and reference.memory is not None and reference.memory.copies:
            groups.setdefault(reference.memory, []).append(position)
    return tuple(tuple(group) for group in groups.values() if len(group) > 1)


def _aliases(inputs: Sequence[Reference | None], made: Sequence[Reference | None]) -> tuple[SharedResult, ...]:
    found = []
    known: dict[LogicalMemory, tuple[int, Reference]] = {}
    positions: dict[Reference, int] = {}
    for position, reference in enumerate((*inputs, *made)):
        if reference is None:
            continue
        positions[reference] = position
        if reference.memory is None:
            continue
        source, known_reference = known.setdefault(reference.memory, (position, reference))
        if position >= len(inputs) and source != position:
            offset = reference.offset - known_reference.offset
            base, steps = reference.copied or (known_reference, ())
            found.append(SharedResult(position, source, offset, positions.get(base, source), steps))
    return tuple(found)


def _slots(
    recording: Recording,
    before: dict[int, tuple[MeshTensor, int | None]],
    after: dict[int, tuple[MeshTensor, int | None]],
) -> tuple[tuple[GradientSlot, ...], list[int], list[int]]:
    """Slots of gradients, and the numbers of those that the step uses and of those that it makes."""
    slots, read, made = [], [], []
    for number, (leaf, grad) in sorted(after.items()):
        if number not in recording.metas and grad not in recording.made:
            continue
        was = before[number][1] if number in before else None
        was_kind = "None" if was is None else "read" if was in recording.metas else "unread"
        kind = "made" if grad in recording.made else "None" if grad is None else "same" if grad == was else "there"
        slots.append(GradientSlot(weakref.ref(leaf), number, was_kind, kind))
        if was is not None and was_kind == "read":
            read.append(was)
        if grad is not None and kind == "made":
            made.append(grad)
    return tuple(slots), read, made


def _unreturned(recording: Recording, known: Iterable[int], bases: Container[int]) -> str:
    """The reason against compiling a step that stores tensors without returning them; "" if it does not.

    `bases` stay since results are views of them, which are copies on the workers.
    """
    recording.stream.free()
    entries = recording.stream.table.entries
    left = recording.made.difference(known)
    if not any(number in entries for number in left):
        return ""
    gc.collect()
    recording.stream.free()
    for issued, where in zip(recording.issued_here, recording.sites, strict=True):
        for number in issued.results:
            if number in left and number in entries:
                name = "distribute" if not hasattr(issued.action, "operation") else issued.action.operation
                if number in bases:
                    why = f"it returns a view of what {name} has made, and not that"
                    return reason_text(why, where, "Return a copy of the view: view.clone()")
                return reason_text(
                    f"it keeps what {name} has made, beyond the call, and neither as its result nor as a gradient",
                    where,
                    "Return the tensor, or write into one that is there before (t.copy_(...))",
                )
    return ""


def _leaf(value: Any, results: list[int], given: tuple[int, ...]) -> tuple[Leaf, str]:
    if type(value) is not MeshTensor:
        wrong = "it returns a local tensor. Return that of the mesh, and fetch it outside"
        return Leaf("value", value=value), wrong if isinstance(value, torch.Tensor) else ""
    number = value.reference.number
    has_graph = value.grad_fn is not None
    wrong = ""
    if has_graph and _is_open(value.grad_fn):
        wrong = "it returns a tensor with its graph. Call backward() inside of it, or return it detached"
    if number in results:
        return Leaf("made", results.index(number), has_graph=has_graph), wrong
    if number in given:
        return Leaf("given", given.index(number)), wrong
    return Leaf("value", value=value), wrong


def _is_open(node: Any) -> bool:
    """Returns whether gradients can flow through a graph, i.e. its saved tensors have not been freed."""
    pending, seen = [node], {node}
    while pending and len(seen) < _NODES:
        current = pending.pop()
        for name in dir(current):
            if name.startswith("_saved_"):
                try:
                    getattr(current, name)
                except RuntimeError:  # "… after they have already been freed"
                    return False
        for following, _ in current.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                pending.append(following)
    return True


def _alike(before: Any, now: Any) -> bool:
    if before is now:
        return True
    if type(before) is MeshTensor and type(now) is MeshTensor:  # of a tensor that was there before, such as a parameter
        return before.reference is now.reference and not (before.requires_grad or now.requires_grad)
    if isinstance(before, torch.Tensor) or isinstance(now, torch.Tensor):
        return False
    return bool(type(before) is type(now) and before == now)
