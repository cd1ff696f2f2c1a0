"""One run of a step, watched: the commands that it issued, and what would keep it from being compiled."""

import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from monarch_nb.tensor.commands import OBJECT, Define, Locals, Making, Number, Parts, Put, Run
from monarch_nb.tensor.compiled.program import Issued, Sent
from monarch_nb.tensor.origin import Place, origin_of
from monarch_nb.tensor.propagation import Meta
from monarch_nb.tensor.seeds import seed_number
from monarch_nb.tensor.stream import Stream
from monarch_nb.tensor.table import Calls
from monarch_nb.tensor.workers.plans import Told

_recording = threading.local()


class Recording:
    """What one thread issues on one mesh. `reason` says why this cannot be compiled, "" while it can."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.issued_here: list[Issued] = []
        self.sites: list[Place | None] = []
        self.metas: dict[int, Meta] = {}  # of what it used, and has not made
        self.reason = ""
        self.drawn = 0  # random operations in all
        self.calls: Calls = Counter()
        self._made: set[int] = set()
        self._thread = threading.get_ident()
        self._seed, self._drawn = stream.seed, stream.drawn
        self._before = stream.table.calls

    def finished(self) -> None:
        """The step has ended."""
        self.drawn = self.stream.drawn - self._drawn
        self.calls = self.stream.table.calls
        self.calls.subtract(self._before)
        self.calls = +self.calls
        if self.stream.seed != self._seed:
            self._refuse("it sets the seed of random numbers", None, "Call torch.manual_seed outside of it")

    @property
    def made(self) -> set[int]:
        """The tensors that it made."""
        return self._made

    # -- as a watcher of the stream ---------------------------------------------------------------------------------

    def issued(self, command: tuple[Any, ...], where: Place | None) -> None:
        """An operation: what its plan says is what."""
        if threading.get_ident() != self._thread:
            return
        if command[0] == OBJECT:
            self._told(command[1], where)
            return
        plan = self.stream.told.get(int(command[0]))
        if plan is None:
            return
        at = Told(plan)
        drawn = 0
        if at.seeded is not None:
            drawn = self.stream.drawn - self._drawn
            if command[1] != seed_number(self._seed, self.stream.drawn):
                self._refuse("it sets the seed of random numbers", where, "Call torch.manual_seed outside of it")
        self._add(plan, where, command[at.tensors], command[at.floats], command[at.results], drawn)

    def asked(self, what: str, where: Place | None) -> None:
        """What the program does next may depend on the answer."""
        if threading.get_ident() == self._thread:
            advice = "Return the tensor, and ask for its value outside; torch.where chooses on the mesh"
            self._refuse(f"it waits for a value ({what}), on which what it does next may depend", where, advice)

    def _told(self, command: object, where: Place | None) -> None:
        """A tensor that is sent is a constant; what runs a function cannot be compiled."""
        match command:
            case Put():
                meta = self.stream.table.entries[command.result].meta
                self._add(Sent(command.tensor, meta), where, (), (), (command.result,), 0)
            case Locals():
                self._refuse("it sends a tensor for each rank", where, "Do that outside of it")
            case Run() | Parts():
                self._refuse("it runs a function on the ranks", where, "Do that outside of it")

    def _add(
        self,
        told: Define | Making | Sent,
        where: Place | None,
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
        made = tuple(map(int, results))
        self._made.update(made)
        self.issued_here.append(Issued(told, numbers, tuple(map(float, floats)), made, drawn))
        self.sites.append(where)

    def _refuse(self, why: str, where: Place | None, advice: str) -> None:
        if not self.reason:
            self.reason = told_at(why, where, advice)


def told_at(why: str, where: Place | None, advice: str) -> str:
    """A reason, the line and what to do."""
    origin = origin_of(where)
    return f"{why}" + (f"\n  at {origin}" if origin is not None else "") + f"\n{advice}"


def is_recording() -> bool:
    """A step is being recorded on this thread: compiled steps inside of it run as they are written."""
    return getattr(_recording, "now", False)


@contextmanager
def recorded(streams: Iterable[Stream]) -> Iterator[list[Recording]]:
    """Watches what this thread issues on these meshes."""
    recordings = [Recording(stream) for stream in streams]
    _recording.now = True
    for one in recordings:
        one.stream.watcher = one
    try:
        yield recordings
    finally:
        _recording.now = False
        for one in recordings:
            one.stream.watcher = None
    for one in recordings:
        one.finished()
