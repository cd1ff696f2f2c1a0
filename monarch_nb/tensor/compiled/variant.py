"""One program of a compiled step, as the controller calls it."""

from collections.abc import Sequence
from sys import getrefcount
from typing import Any

import torch
from torch.utils import _pytree as pytree

from monarch_nb.tensor.batch import Sites
from monarch_nb.tensor.commands import REPLAY
from monarch_nb.tensor.compiled.capture import Capture, Leaf, Slot
from monarch_nb.tensor.compiled.errors import CompileError
from monarch_nb.tensor.compiled.guards import Watched
from monarch_nb.tensor.compiled.program import Trace
from monarch_nb.tensor.handle import MeshTensor
from monarch_nb.tensor.propagation import Meta
from monarch_nb.tensor.references import Reference
from monarch_nb.tensor.seeds import seed_number
from monarch_nb.tensor.stream import Stream
from monarch_nb.tensor.views import all_rewritten, make_again
from monarch_nb.transport import held_back


def _held_once() -> int:
    held = [object()]
    name = held[0]
    return getrefcount(name)


_HANDLE_ALONE = _held_once()  # references to a gradient that only its parameter holds, as this Python counts them
_REFERENCE_ALONE = 2


class Variant:
    """Sends the program when it is made. `leaves` are the arguments that it was captured with."""

    def __init__(
        self, capture: Capture, leaves: Sequence[Any], floats: tuple[float, ...], watched: Watched, backend: str
    ) -> None:
        self.stream: Stream = capture.stream
        self._life = self.stream.lives
        self.floats = floats
        self.capture, self.watched = capture, watched
        self.calls = 0
        numbers = [leaf.reference.number if type(leaf) is MeshTensor else None for leaf in leaves]
        self._given = [numbers.index(number) for number in capture.given]
        self._fixed = frozenset(capture.fixed)
        self._sites = Sites(capture.sites)
        program = capture.program
        metas = program.metas
        self._metas = [metas[register] for register in program.results]
        made = [slot for slot in capture.slots if slot.after == "made"]
        self._results = len(program.results) - len(made)
        self._read = [slot for slot in capture.slots if slot.before == "read"]
        self._made = [_Gradient(slot) for slot in made]
        self._dropped = [slot for slot in capture.slots if slot.after == "None" and slot.before != "None"]
        self._absent = [slot for slot in capture.slots if slot.before == "None"]
        self._reference = self.stream.hold_aside()
        inputs = len(program.inputs) - len(capture.fixed)
        self._head = (REPLAY, self._reference.number, len(program.operations), inputs, len(program.results))
        self.stream.tell(Trace(self._reference.number, program, capture.fixed, backend))

    def unfit(self) -> str:
        """Why this program is not what the step would do now, "" where it is as far as can be seen."""
        if self.stream.lost is not None:
            return "the mesh has lost its tensors"
        if self.stream.lives != self._life:
            return "the mesh was healed since"
        changed = self.watched.changed()
        if changed:
            return changed
        if self.stream.held.ended:
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
        return ""

    def __call__(self, leaves: Sequence[Any]) -> Any:
        """What the step would return. Blocks, interruptibly, only where workers are far behind."""
        self.calls += 1
        self.stream.draw_near()
        return held_back(self._call, leaves)

    def _call(self, leaves: Sequence[Any]) -> Any:
        stream, sites = self.stream, self.capture.made_at
        given = [leaves[at].reference.number for at in self._given]
        given += [_grad(slot).reference.number for slot in self._read]
        if stream.held.gone:
            stream.held.refuse_gone((*given, *self._fixed))
        if stream.held.stale:
            make_again(stream, (*given, *self._fixed), None)
        references = [stream.hold(meta, sites[at]) for at, meta in enumerate(self._metas[: self._results])]
        into = [reference.number for reference in references]
        for at, gradient in enumerate(self._made, self._results):
            into.append(gradient.number(stream, self._metas[at], sites[at]))
        for slot in self._dropped:
            leaf = slot.leaf()
            if leaf is not None:
                leaf.grad = None
        seed = seed_number(stream.seed, stream.drawn)
        stream.repeat((*self._head, seed, *given, *into), self._sites)
        if stream.viewed:
            all_rewritten(stream)
        stream.drawn += self.capture.recording.drawn
        if self.capture.recording.calls:
            stream.table.moved_again(self.capture.recording.calls)
        for gradient in self._made:
            gradient.give()
        capture = self.capture
        made = [self._handle(leaf, references, leaves) for leaf in capture.returned]
        return pytree.tree_unflatten(made, capture.tree)

    def _handle(self, leaf: Leaf, references: Sequence[Reference], leaves: Sequence[Any]) -> Any:
        if leaf.kind == "given":
            return leaves[self._given[leaf.at]]
        if leaf.kind == "value":
            return leaf.value
        make: Any = _Ended.apply if leaf.has_graph else _handle
        return make(_anchor(), self._metas[leaf.at], references[leaf.at])


class _Gradient:
    """The gradient that a call leaves in a parameter: of the same number as the last, unless somebody else has that."""

    def __init__(self, slot: Slot) -> None:
        self._slot = slot
        self._number = 0
        self._new: MeshTensor | None = None

    def number(self, stream: Stream, meta: Any, where: Any) -> int:
        """Under which the workers are to keep it."""
        leaf = self._slot.leaf()
        grad = leaf.grad if leaf is not None else None
        if (
            grad is not None
            and grad.reference.number == self._number  # type: ignore[attr-defined]
            and getrefcount(grad) <= _HANDLE_ALONE
            and getrefcount(grad.reference) <= _REFERENCE_ALONE  # type: ignore[attr-defined]
        ):
            return self._number
        if leaf is not None and self._slot.before != "read":
            leaf.grad = None  # goes before the call, as it does where the step drops it
        self._new = MeshTensor(meta, stream.hold(meta, where))
        self._number = self._new.reference.number
        return self._number

    def give(self) -> None:
        """Leaves it there."""
        if self._new is not None:
            leaf = self._slot.leaf()
            if leaf is not None:
                leaf.grad = self._new
            self._new = None


class _Ended(torch.autograd.Function):
    """A result whose graph has been used up."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, meta: Meta, reference: Reference) -> MeshTensor:
        """The result, which is made here: to hand one through would be an operation."""
        return MeshTensor(meta, reference)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
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


def _grad(slot: Slot) -> MeshTensor:
    leaf = slot.leaf()
    assert leaf is not None
    assert isinstance(leaf.grad, MeshTensor)
    return leaf.grad
