"""Result of recording a step: its program, inputs, outputs and effects on gradients."""

import gc
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from monarch_nb.tensor.compiled.difference import Difference, difference
from monarch_nb.tensor.compiled.guards import Watched
from monarch_nb.tensor.compiled.program import Program, renamed
from monarch_nb.tensor.compiled.recording import Recording, reason_text
from monarch_nb.tensor.handle import MeshTensor
from monarch_nb.tensor.origin import CallSite
from monarch_nb.tensor.stream import Stream

_NODES = 10_000  # of a graph that are examined


class Slot(NamedTuple):
    """State of a parameter's gradient before a run (`None`, `read`, `unread`) and after it (`None`, `same`, `made`)."""

    leaf: "weakref.ref[MeshTensor]"
    number: int  # of the parameter
    before: str
    after: str

    def like(self, other: "Slot") -> bool:
        """Returns whether the slot equals one of an earlier run; an unread gradient may have been absent."""
        same_before = self.before == other.before or (self.before, other.before) == ("unread", "None")
        return self.number == other.number and same_before and self.after == other.after


class Leaf(NamedTuple):
    """A value that a step returns: `made` by it, `given` to it, or any other `value`."""

    kind: str
    position: int = 0  # among the tensors that it made, or was given
    value: Any = None
    has_graph: bool = False


@dataclass
class Capture:
    """A recorded run. `reason` says why the step cannot be compiled, "" if it can."""

    stream: Stream
    reason: str
    program: Program
    fixed: tuple[int, ...]
    slots: tuple[Slot, ...]
    given: tuple[int, ...]  # numbers of tensor arguments, without repetition
    returned: tuple[Leaf, ...]
    tree: Any
    sites: tuple[CallSite | None, ...]
    made_at: list[CallSite | None]  # call sites of the results of the program
    recording: Recording
    watched: Watched | None = field(default=None)

    def unlike(self, before: "Capture") -> Difference | None:
        """Returns the first difference from an earlier run, or None."""
        if self.stream is not before.stream:
            return Difference(None, "it runs on another mesh")
        found = difference(before.program, self.program)
        if found is not None:
            return found
        for was, number in zip(before.fixed, self.fixed, strict=True):
            if was != number:
                issued = self.recording.issued_here
                index = next(index for index, step in enumerate(issued) if number in step.tensors)
                name = self.program.operations[index].name
                return Difference(index, f"{name} takes a tensor that was not there before, and is no argument")
        if len(self.slots) != len(before.slots) or not all(map(Slot.like, self.slots, before.slots)):
            return Difference(None, "gradients are there, or are left, for other parameters")
        if self.tree != before.tree or len(self.returned) != len(before.returned):
            return Difference(None, "it returns something of another form")
        for one, other in zip(before.returned, self.returned, strict=True):
            if one[:2] != other[:2] or one.has_graph != other.has_graph or not _alike(one.value, other.value):
                return Difference(None, f"it returns {one.value!r} before and {other.value!r} now, and no tensor")
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
    used = [one for one in recordings if one.issued_here or one.reason]
    if len(used) != 1:
        meshes = " and ".join(one.stream.title for one in used)
        return f"it uses several meshes, {meshes}" if used else "it issues no operation on a mesh"
    [recording] = used
    stream = recording.stream
    returned, tree = pytree.tree_flatten(result)
    numbers = [leaf.reference.number for leaf in leaves if type(leaf) is MeshTensor]
    given = tuple(dict.fromkeys(numbers))
    own = {one.reference.number: one for one in returned if type(one) is MeshTensor}
    results = [number for number in own if number in recording.made]
    slots, read, grads = _slots(recording, before[id(stream)], parameters(stream))
    reason = recording.reason
    if not reason and any(slot.number in given for slot in slots if slot.after == "made"):
        reason = "an argument of it gathers a gradient. Give it detached, or make it a parameter"
    template = []
    for one in returned:
        leaf, wrong = _leaf(one, results, given)
        template.append(leaf)
        reason = reason or wrong
    reason = reason or _unreturned(recording, {*results, *grads})
    metas = dict(recording.metas)
    metas.update({one.reference.number: one.meta for one in leaves if type(one) is MeshTensor})
    program, fixed = renamed(recording.issued_here, (*given, *read), (*results, *grads), metas)
    sites = {
        number: where
        for one, where in zip(recording.issued_here, recording.sites, strict=True)
        for number in one.results
    }
    return Capture(
        stream, reason, program, fixed, slots, given, tuple(template), tree, tuple(recording.sites),
        [sites[number] for number in (*results, *grads)], recording,
    )  # fmt: skip


def _slots(
    recording: Recording,
    before: dict[int, tuple[MeshTensor, int | None]],
    after: dict[int, tuple[MeshTensor, int | None]],
) -> tuple[tuple[Slot, ...], list[int], list[int]]:
    """Slots of gradients, and the numbers of those that the step uses and of those that it makes."""
    slots, read, made = [], [], []
    for number, (leaf, grad) in sorted(after.items()):
        if number not in recording.metas and grad not in recording.made:
            continue
        was = before[number][1] if number in before else None
        was_kind = "None" if was is None else "read" if was in recording.metas else "unread"
        kind = "made" if grad in recording.made else "None" if grad is None else "same"
        slots.append(Slot(weakref.ref(leaf), number, was_kind, kind))
        if was is not None and was_kind == "read":
            read.append(was)
        if grad is not None and kind == "made":
            made.append(grad)
    return tuple(slots), read, made


def _unreturned(recording: Recording, known: Iterable[int]) -> str:
    """The reason against compiling a step that stores tensors without returning them; "" if it does not."""
    recording.stream.free()
    entries = recording.stream.table.entries
    left = recording.made.difference(known)
    if not any(number in entries for number in left):
        return ""
    gc.collect()
    recording.stream.free()
    for one, where in zip(recording.issued_here, recording.sites, strict=True):
        for number in one.results:
            if number in left and number in entries:
                name = "distribute" if not hasattr(one.action, "operation") else one.action.operation
                return reason_text(
                    f"it keeps what {name} has made, beyond the call, and neither as its result nor as a gradient",
                    where,
                    "Return the tensor, or write into one that is there before (t.copy_(...))",
                )
    return ""


def _leaf(one: Any, results: list[int], given: tuple[int, ...]) -> tuple[Leaf, str]:
    if type(one) is not MeshTensor:
        wrong = "it returns a local tensor. Return that of the mesh, and fetch it outside"
        return Leaf("value", value=one), wrong if isinstance(one, torch.Tensor) else ""
    number = one.reference.number
    has_graph = one.grad_fn is not None
    wrong = ""
    if has_graph and _is_open(one.grad_fn):
        wrong = "it returns a tensor with its graph. Call backward() inside of it, or return it detached"
    if number in results:
        return Leaf("made", results.index(number), has_graph=has_graph), wrong
    if number in given:
        return Leaf("given", given.index(number)), wrong
    return Leaf("value", value=one), wrong


def _is_open(node: Any) -> bool:
    """Returns whether gradients can flow through a graph, i.e. its saved tensors have not been freed."""
    waiting, seen = [node], {node}
    while waiting and len(seen) < _NODES:
        one = waiting.pop()
        for name in dir(one):
            if name.startswith("_saved_"):
                try:
                    getattr(one, name)
                except RuntimeError:  # "… after they have already been freed"
                    return False
        for following, _ in one.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return True


def _alike(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return False
    return bool(type(one) is type(other) and one == other)
