"""Reference counting of tensors on the workers, with memory shared by views, and records of the live ones for displays.

The records are written on the hot path, so only existing objects are stored; the rest is computed on demand.
"""

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, NamedTuple, NoReturn, Protocol, cast, final

import torch
from torch.utils.weak import TensorWeakRef

from monarch_nb.tensor.commands import DrawFrom
from monarch_nb.tensor.errors import (
    RESTORE,
    CallSite,
    ContentsLostError,
    ProgramLine,
    RankTensorError,
    TensorError,
    origin_of,
)
from monarch_nb.tensor.propagation import Collective, Meta, OperationPlan

if TYPE_CHECKING:
    from monarch_nb.tensor.lanes import MemoryLoans
    from monarch_nb.tensor.processes import Observer
    from monarch_nb.tensor.stream import Stream

NEVER = -1  # the number of the last write to a tensor that no operation has written to
UNSENT = sys.maxsize  # the number for an operation that was not sent, so that it never runs


class WriteRecord(Protocol):
    """Holds the number of the last operation that writes to a tensor."""

    written: int


class StreamGroup(Protocol):
    """The interface of `MeshProcesses` that a stream uses."""

    observer: "Observer | None"
    draws: "dict[int, DrawFrom]"  # generators of the program's streams, by their numbers

    @property
    def over(self) -> int:
        """The current generation of process groups if it was ended, else -1."""

    def failure(self, stream: int, number: int) -> TensorError | None:
        """Returns the error of an operation of a stream, if it is known to have failed."""

    def regroup(self, over: int) -> None:
        """Makes the generation after `over`. Blocks."""

    def revive(self, stream: "Stream") -> None:
        """Resumes a lost stream after a heal. Blocks."""


@final
class CallSites(tuple[CallSite | None, ...]):
    """Call sites of the operations that one replay command runs."""

    __slots__ = ()


class Reference:
    """A tensor on the workers, shared by all its handles; the tensor is freed after the last of them.

    `number` identifies the tensor in its stream. `memory` is shared with its views and its base, None without them.
    `copied` is how to recreate a view that has memory of its own on the workers. `offset` is the offset in the
    shared memory in bytes, without sharding.
    """

    __slots__ = ("__weakref__", "_writes", "copied", "is_view", "memory", "number", "offset", "stream")

    def __init__(self, stream: "Stream", number: int) -> None:
        self.stream, self.number = stream, number
        self.is_view = False
        self.offset = 0
        self.memory: LogicalMemory | None = None
        self.copied: Copied | None = None
        self._writes: OwnWrites | None = None

    @property
    def writes(self) -> WriteRecord:
        """The record of the last write, without the tensor: queued commands refer to it."""
        if self.memory is not None:
            return self.memory
        if self._writes is None:
            self._writes = OwnWrites()
        return self._writes

    def is_written_from(self, start: int) -> bool:
        """Returns whether operations from `start` on write to it, or to its memory."""
        own, memory = self._writes, self.memory
        return (own is not None and own.written >= start) or (memory is not None and memory.written >= start)


class DroppedReference(Reference):
    """The reference of a handle that the program has dropped: each use raises RankTensorError."""

    __slots__ = ("_site",)

    def __init__(self, stream: "Stream", site: CallSite | None) -> None:
        self.stream, self._site = stream, site

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise RankTensorError("DROPPED", f"the tensor is dropped at {origin_of(self._site)}")


class OwnWrites:
    """The last operation that writes to a tensor while no other one shares its memory."""

    __slots__ = ("written",)

    def __init__(self) -> None:
        self.written = NEVER


class LogicalMemory:
    """Logical memory of a tensor and its views.

    `copies` are views with memory of their own on the workers. `reshaped` had their shape changed in place. `written`
    is the last operation that writes to any of them. `loans`: its stream has lent or borrowed it.
    """

    __slots__ = ("__weakref__", "copies", "loans", "reshaped", "written")

    def __init__(self) -> None:
        self.written = NEVER
        self.loans: MemoryLoans | None = None
        self.copies: weakref.WeakSet[Reference] = weakref.WeakSet()
        self.reshaped: weakref.WeakSet[Reference] = weakref.WeakSet()


class Copied(NamedTuple):
    """Origin of a copied view, i.e. one that cuts a sharded dimension: its base, and plans with indices of results."""

    base: Reference
    steps: tuple[tuple[OperationPlan, int], ...]


class StepWrites:
    """The tensors, by number, that a compiled step writes to: `constants`, and the `gradients` of its last call."""

    def __init__(self, constants: Sequence[int]) -> None:
        self.constants, self.written = tuple(constants), NEVER
        self.gradients: list[int] = []


@final
class LiveEntry(weakref.ref[Reference]):
    """Entry of a live tensor; appends itself to the stream's queue when its reference is garbage-collected.

    A weak reference with a callback, not a finalizer, since Ctrl-C can abort a finalizer. Commands that name a tensor
    are issued while something refers to it, so that its entry follows them.
    """

    __slots__ = ("call_site", "meta", "number")

    number: int
    meta: Meta
    call_site: CallSite | None


# What a stream's queue has: commands, with the call site that issued each and a record for each tensor that it writes
# to; and the entries of tensors to free. The object of an `OBJECT` command is part of it until it is sent.
Item = tuple[tuple[object, ...], CallSite | CallSites | None, Sequence[WriteRecord]] | LiveEntry


class HeldObjects:
    """Objects that workers hold for a stream, by number. `entries` are the tensors, also for displays.

    `on_end` is called with the entry of each that is referred to no more.
    """

    def __init__(self, entries: dict[int, LiveEntry], on_end: Callable[[LiveEntry], None]) -> None:
        self.entries, self.on_end = entries, on_end
        self.objects: dict[int, LiveEntry] = {}  # other objects on the workers
        self.lost: dict[int, str] = {}  # tensors whose contents are lost, with the reason
        self.stale: dict[int, Copied] = {}  # views that have to be recreated before use
        self.leaves: dict[int, TensorWeakRef] = {}  # handles that accumulate gradients, from their first operation on
        self.has_lent = False  # some memory here was ever lent or borrowed
        self.steps: set[StepWrites] = set()  # of compiled steps since the last heal
        self.next = count(1).__next__  # next number

    def hold(self, stream: "Stream", meta: Meta, site: CallSite | None) -> Reference:
        """Returns a reference to a tensor that the next command makes."""
        reference = Reference(stream, self.next())
        self._enter(self.entries, reference, meta, site)
        return reference

    def hold_object(self, stream: "Stream") -> Reference:
        """Returns a reference to an object other than a tensor that the next command makes."""
        reference = Reference(stream, self.next())
        self._enter(self.objects, reference, cast(Meta, None), None)
        return reference

    def _enter(self, entries: dict[int, LiveEntry], reference: Reference, meta: Meta, site: CallSite | None) -> None:
        entry = LiveEntry(reference, self.on_end)
        entry.number, entry.meta, entry.call_site = reference.number, meta, site
        entries[reference.number] = entry

    def references(self, numbers: Iterable[int]) -> list[Reference | None]:
        """Returns the references to tensors, None for unreferenced ones."""
        entries = self.entries
        return [entry() if (entry := entries.get(number)) is not None else None for number in numbers]

    def register_leaf(self, number: int, handle: torch.Tensor) -> None:
        """Records a handle that takes part in an operation and accumulates gradients."""
        self.leaves[number] = TensorWeakRef(handle)

    def is_alone(self, reference: Reference) -> bool:
        """Returns whether no other live tensor shares the memory of this one."""
        memory = reference.memory
        live = (entry() for entry in tuple(self.entries.values())) if memory is not None else ()
        return all(peer is None or peer is reference or peer.memory is not memory for peer in live)

    def forget(self, numbers: Iterable[int]) -> None:
        """Removes the records of tensors and objects that are referred to no more."""
        leaves, lost, stale = self.leaves, self.lost, self.stale
        for number in numbers:
            if self.entries.pop(number, None) is None:
                self.objects.pop(number, None)
            if leaves:
                leaves.pop(number, None)
            if lost:
                lost.pop(number, None)
            if stale:
                stale.pop(number, None)

    def written_from(self, start: int) -> set[int]:
        """Returns the tensors that operations from `start` on write to, also through other tensors of their memory."""
        numbers = {
            number for step in self.steps if step.written >= start for number in (*step.constants, *step.gradients)
        }
        references = [ref for entry in tuple(self.entries.values()) if (ref := entry()) is not None]
        memories = {ref.memory for ref in references if ref.number in numbers and ref.memory is not None}
        return {
            ref.number
            for ref in references
            if ref.number in numbers or ref.memory in memories or ref.is_written_from(start)
        }

    def lose(self, numbers: Iterable[int], reason: str) -> None:
        """Marks the contents of tensors as lost, for this reason unless they are lost already."""
        for number in numbers:
            self.lost.setdefault(number, reason)

    def require_contents(self, numbers: Iterable[int]) -> None:
        """Raises ContentsLostError if the contents of one of these tensors are lost."""
        for number in numbers:
            reason = self.lost.get(number)
            if reason is not None:
                entry = self.entries[number]
                origin = origin_of(entry.call_site)
                raise ContentsLostError(
                    f"the contents of {entry.meta!r} are gone, since the mesh was healed. Restore them: {RESTORE}"
                    + (f"\n  it was made at {origin}" if origin else "")
                    + f"\n  {reason}"
                )


Calls = Counter[tuple[CallSite | None, str, tuple[Collective, ...]]]  # by line, operation and its collectives


@dataclass(frozen=True)
class LiveTensor:
    """A tensor with a handle. `number` identifies it on the workers, `origin` is the line that made it."""

    number: int
    meta: Meta
    origin: ProgramLine | None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return self.meta.shape

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor, once."""
        return self.meta.nbytes


@dataclass(frozen=True)
class Moved:
    """Collectives of one kind that one line has issued since the record was cleared: their number and bytes.

    `nbytes` counts the input of each rank, of the largest shard.
    """

    origin: ProgramLine | None
    operation: str
    collective: str
    dimension: str
    count: int
    nbytes: int


@dataclass(frozen=True)
class Synchronised:
    """Number of waits of a line for the workers since the record was cleared, and the operation (`item`, …)."""

    origin: ProgramLine | None
    what: str
    count: int


class TensorTable:
    """Records of one mesh, written by the thread that issues operations and read by any."""

    def __init__(self) -> None:
        self.entries: dict[int, LiveEntry] = {}  # by number
        self._calls: Calls = Counter()
        self._repeated: dict[int, tuple[Calls, int]] = {}  # those of compiled steps, and the numbers of their runs
        self._syncs: Counter[tuple[CallSite | None, str]] = Counter()
        self.cell = 0  # grows with each `clear`

    def moved(self, site: CallSite | None, plan: OperationPlan) -> None:
        """Records a call of a plan that has collectives."""
        self._calls[site, plan.operation, plan.collectives] += 1

    @property
    def calls(self) -> Calls:
        """Calls with collectives since `clear`, without those of compiled steps."""
        return self._calls.copy()

    def moved_again(self, calls: Calls) -> None:
        """Records that a compiled step has made all these calls, which must not change."""
        self._repeated[id(calls)] = (calls, self._repeated.get(id(calls), (calls, 0))[1] + 1)

    def synchronised(self, site: CallSite | None, operation: str) -> None:
        """Records that a line waits for the workers."""
        self._syncs[site, operation] += 1

    def live(self) -> list[LiveTensor]:
        """Returns tensors with handles, oldest first."""
        entries = tuple(self.entries.values())
        return [
            LiveTensor(entry.number, entry.meta, origin_of(entry.call_site)) for entry in entries if entry() is not None
        ]

    def movements(self) -> list[Moved]:
        """Returns collectives by line since `clear`, in order of the first."""
        by_line: dict[tuple[ProgramLine | None, str, str, str], tuple[int, int]] = {}
        total = self.calls
        for calls, times in tuple(self._repeated.values()):
            for call, count_per_call in calls.items():
                total[call] += count_per_call * times
        for (site, operation, collectives), times in total.items():
            for collective in collectives:
                key = (origin_of(site), operation, collective.kind, collective.dim)
                count, nbytes = by_line.get(key, (0, 0))
                by_line[key] = (count + times, nbytes + times * collective.nbytes)
        return [Moved(*key, *sums) for key, sums in by_line.items()]

    def synchronisations(self) -> list[Synchronised]:
        """Returns waits by line since `clear`."""
        return list(self._waits())

    def _waits(self) -> Iterator[Synchronised]:
        for (site, operation), waits in tuple(self._syncs.items()):
            yield Synchronised(origin_of(site), operation, waits)

    def clear(self) -> None:
        """Clears the records for a new cell; live tensors stay."""
        self._calls.clear()
        self._repeated.clear()
        self._syncs.clear()
        self.cell += 1
