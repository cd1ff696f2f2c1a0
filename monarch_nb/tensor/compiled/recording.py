"""Records the commands that a run of a step issues, and reasons against compiling it."""

import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from monarch_nb.tensor.commands import OBJECT, Define, Locals, MakeParts, Making, Number, PutTensor, RunFunction
from monarch_nb.tensor.compiled.program import Issued, Sent
from monarch_nb.tensor.origin import CallSite, origin_of
from monarch_nb.tensor.propagation import Meta
from monarch_nb.tensor.references import LogicalMemory
from monarch_nb.tensor.seeds import seed_number
from monarch_nb.tensor.stream import Stream
from monarch_nb.tensor.table import Calls
from monarch_nb.tensor.workers.plans import PlanSignature

_recording = threading.local()


class Recording:
    """Commands that one thread issues on one mesh. `reason` says why the step cannot be compiled, "" if it can."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.issued_here: list[Issued] = []
        self.sites: list[CallSite | None] = []
        self.metas: dict[int, Meta] = {}  # of tensors that it uses but does not make
        self.reason = ""
        self.drawn = 0  # random operations in all
        self.calls: Calls = Counter()
        self._first = stream.held.next()
        self._made: set[int] = set()
        self._written: set[int] = set()  # tensors that no view shared then
        self._written_memory: weakref.WeakSet[LogicalMemory] = weakref.WeakSet()
        self._thread = threading.get_ident()
        self._seed, self._drawn = stream.seed, stream.drawn
        self._before = stream.table.calls

    def finished(self) -> None:
        """Completes the record after the step."""
        self.drawn = self.stream.drawn - self._drawn
        self.calls = self.stream.table.calls
        self.calls.subtract(self._before)
        self.calls = +self.calls
        if self.stream.seed != self._seed:
            self._refuse("it sets the seed of random numbers", None, "Call torch.manual_seed outside of it")

    @property
    def made(self) -> set[int]:
        """Numbers of the tensors that the step made. Views that were there before and are made again do not count."""
        return self._made

    def writes(self, number: int) -> bool:
        """Returns whether the step has written to a live tensor, also through a view or to its base."""
        if number in self._written:
            return True
        entry = self.stream.table.entries.get(number)
        reference = entry() if entry is not None else None
        return reference is not None and reference.memory in self._written_memory

    # -- as a watcher of the stream ---------------------------------------------------------------------------------

    def issued(self, command: tuple[Any, ...], where: CallSite | None) -> None:
        """Records an operation, by the definition of its plan."""
        if threading.get_ident() != self._thread:
            return
        if command[0] == OBJECT:
            self._on_object(command[1], where)
            return
        plan = self.stream.defined.get(int(command[0]))
        if plan is None:
            return
        signature = PlanSignature(plan)
        drawn = 0
        if signature.seeded is not None:
            drawn = self.stream.drawn - self._drawn
            if command[1] != seed_number(self._seed, self.stream.drawn):
                self._refuse("it sets the seed of random numbers", where, "Call torch.manual_seed outside of it")
        self._add(plan, where, command[signature.tensors], command[signature.floats], command[signature.results], drawn)

    def asked(self, what: str, where: CallSite | None) -> None:
        """Refuses the step, since what follows may depend on the value."""
        if threading.get_ident() == self._thread:
            advice = "Return the tensor, and ask for its value outside; torch.where chooses on the mesh"
            self._refuse(f"it waits for a value ({what}), on which what it does next may depend", where, advice)

    def _on_object(self, command: object, where: CallSite | None) -> None:
        """Records a sent tensor as a constant; functions that run on ranks cannot be compiled."""
        match command:
            case PutTensor():
                meta = self.stream.table.entries[command.result].meta
                self._add(Sent(command.tensor, meta), where, (), (), (command.result,), 0)
            case Locals():
                self._refuse("it sends a tensor for each rank", where, "Do that outside of it")
            case RunFunction() | MakeParts():
                self._refuse("it runs a function on the ranks", where, "Do that outside of it")

    def _add(
        self,
        action: Define | Making | Sent,
        where: CallSite | None,
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
        made = tuple(map(int, results))
        self._made.update(number for number in made if number > self._first)
        self.issued_here.append(Issued(action, numbers, tuple(map(float, floats)), made, drawn))
        self.sites.append(where)

    def _refuse(self, why: str, where: CallSite | None, advice: str) -> None:
        if not self.reason:
            self.reason = reason_text(why, where, advice)


def reason_text(why: str, where: CallSite | None, advice: str) -> str:
    """A reason with the line of the program and advice."""
    origin = origin_of(where)
    return why + (f"\n  at {origin}" if origin is not None else "") + f"\n{advice}"


def is_recording() -> bool:
    """Returns whether this thread records a step, in which nested compiled steps run uncompiled."""
    return getattr(_recording, "now", False)


@contextmanager
def recorded(streams: Iterable[Stream]) -> Iterator[list[Recording]]:
    """Records what this thread issues on these meshes."""
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
