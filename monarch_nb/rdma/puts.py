"""One process's part in put values: those it has put, and those it holds for the other processes of its host."""

import contextlib
import os
import secrets
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Generic, Protocol, TypeVar

import msgspec

from monarch_nb.rdma import verbs
from monarch_nb.rdma.errors import BufferDroppedError
from monarch_nb.rdma.handle import Handle
from monarch_nb.rdma.limits import Limit
from monarch_nb.rdma.memory import Memory, memory_of
from monarch_nb.rdma.movers import Move
from monarch_nb.rdma.place import Place, here
from monarch_nb.rdma.regions import Regions
from monarch_nb.rdma.routes import Routes
from monarch_nb.runtime import Instance, Runtime
from monarch_nb.settings import settings
from monarch_nb.transport import SharedMemoryError
from monarch_nb.transport.mapping import map_file
from monarch_nb.transport.shared import MemoryFile
from monarch_nb.wire import Asker, Pieces

__all__ = ["Kept", "Puts", "starts"]

_MARGIN = 64  # bytes before the first frame, in which the token is; frames begin at multiples of it
_TOKEN = 16
A = TypeVar("A")
_Host = tuple[str, int]


class Kept(msgspec.Struct, array_like=True, frozen=True):
    """What names a value that was put."""

    handle: Handle  # of the whole file
    token: bytes  # with which the file begins: descriptors are used again
    descriptor: int  # of the file, in the process that put it
    sizes: tuple[int, ...]  # of the frames


class End(Protocol):
    """What is needed of the process that this is in."""

    engine: Runtime
    regions: Regions
    routes: Routes

    def offer(self, memory: Memory, owner: Instance, *, readonly: bool) -> Handle:
        """Offers memory of this process on behalf of an actor."""

    def where(self, handle: Handle, question: verbs.WhereIs, limit: Limit) -> verbs.Where | None:
        """Asks the owner of a value where it lies; None if that takes too long."""


def starts(sizes: Sequence[int]) -> list[int]:
    """Where frames of these sizes begin in a file."""
    return list(accumulate((-(-size // _MARGIN) * _MARGIN for size in sizes[:-1]), initial=_MARGIN))


def _opened(kept: Kept, pid: int, descriptor: int) -> MemoryFile | None:
    """The file that a process of this host has; None if it has that no more, or lets nobody open it."""
    try:
        file = MemoryFile.of_process(pid, descriptor, kept.handle.size)
        return file if os.pread(file.fd, _TOKEN, 0) == kept.token else None
    except (SharedMemoryError, OSError):
        return None


@dataclass(frozen=True, slots=True)
class Location:
    """A memory file: in which process of the asker's host, and by which descriptor there."""

    process: str
    pid: int
    descriptor: int


@dataclass(slots=True)
class _Copy(Generic[A]):
    location: Location | None = None  # where those who ask are told to look
    holders: set[str] = field(default_factory=set)  # more than one where somebody has waited for another in vain
    waiting: list[A] = field(default_factory=list)


class Copies(Generic[A]):
    """The owner's list for one value: the first that asks from a host fetches it for all others there. No I/O."""

    def __init__(self) -> None:
        self._by_host: dict[_Host, _Copy[A]] = {}

    def ask(self, place: Place, asker: A, *, missing: bool) -> Location | bool | None:
        """Where it lies on that host; True: the asker is to fetch it; None: another does, and the asker waits.

        `missing` says that the asker found nothing where it was told to look, or has waited in vain.
        """
        host = (place.boot, place.namespace)
        copy = self._by_host.get(host)
        if copy is None or missing:
            if copy is None:
                copy = self._by_host[host] = _Copy()
            copy.location = None
            return True
        if copy.location is None:
            copy.waiting.append(asker)
        return copy.location

    def held(self, place: Place, location: Location) -> list[A]:
        """It lies there now; those who have waited for that."""
        copy = self._by_host.setdefault((place.boot, place.namespace), _Copy())
        copy.location = location
        copy.holders.add(location.process)
        waiting, copy.waiting = copy.waiting, []
        return waiting

    def waiting(self) -> list[A]:
        """Those who wait."""
        return [asker for copy in self._by_host.values() for asker in copy.waiting]

    def holders(self) -> list[str]:
        """The processes that have a file of it."""
        return [process for copy in self._by_host.values() for process in sorted(copy.holders)]


class Puts:
    """Methods from any thread."""

    def __init__(self, end: End) -> None:
        self._end = end
        self._lock = threading.Lock()
        self._copies: dict[int, Copies[Asker[verbs.Where]]] = {}
        self._files: dict[int, tuple[bytes, MemoryFile]] = {}  # of values put here
        self._unused: OrderedDict[int, int] = OrderedDict()  # number -> bytes: nobody here refers to these any more
        self._held: OrderedDict[bytes, MemoryFile] = OrderedDict()  # by token: those of other hosts

    # -- values put here --------------------------------------------------------------------------------------------

    def keep(self, frames: Sequence[memoryview | Pieces], owner: Instance) -> Kept:
        """Copies frames into a memory file, which is on offer to other hosts."""
        sizes = tuple(frame.nbytes for frame in frames)
        token = secrets.token_bytes(_TOKEN)
        file = MemoryFile.empty(starts((*sizes, 0))[-1])
        file.append(memoryview(token + bytes(_MARGIN - _TOKEN)))
        for frame in frames:
            file.append(frame)
            file.append(memoryview(bytes(-frame.nbytes % _MARGIN)))
        file.seal()
        handle = self._end.offer(memory_of(file.view()), owner, readonly=True)
        with self._lock:
            self._copies[handle.number], self._files[handle.number] = Copies(), (token, file)
        return Kept(handle, token, file.fd, sizes)

    def release(self, number: int) -> None:
        """Nobody in this process refers to a value any more. The oldest of such go when they have too many bytes."""
        gone = []
        with self._lock:
            entry = self._files.get(number)
            if entry is None:
                return
            self._unused[number] = entry[1].length
            while sum(self._unused.values()) > settings.rdma_put_kept:
                gone.append(self._unused.popitem(last=False)[0])
        for one in gone:
            self.drop(one)

    def drop(self, number: int) -> None:
        """Ends a value, on all hosts; a second time it does nothing."""
        with self._lock:
            copies, entry = self._copies.pop(number, None), self._files.pop(number, None)
            self._unused.pop(number, None)
        if copies is None or entry is None:
            return
        self._end.regions.withdraw(number)
        for asker in copies.waiting():
            asker.reply(verbs.Where("dropped"))
        for process in copies.holders():
            with contextlib.suppress(Exception):  # it may be gone
                self._end.engine.tell(process, verbs.FORGET, verbs.Forget(entry[0]))

    def sweep(self) -> None:
        """Ends the values whose actors have ended."""
        there = {region.number for region in self._end.regions}
        for number in tuple(self._files):
            if number not in there:
                self.drop(number)

    def where(self, question: verbs.WhereIs, asker: Asker[verbs.Where]) -> verbs.Where | None:
        """Where a value put here lies on the asker's host."""
        with self._lock:
            copies, entry = self._copies.get(question.number), self._files.get(question.number)
            if copies is None or entry is None or not secrets.compare_digest(entry[0], question.token):
                return verbs.Where("dropped")
            found = copies.ask(question.place, asker, missing=question.missing)
        if found is None:
            return None  # it is told later
        return verbs.Where("fetch") if isinstance(found, bool) else _where(found)

    def holds(self, message: verbs.Holds, asker: Asker[None]) -> None:
        """A process has fetched a value for its host."""
        location = Location(asker.src, message.place.pid, message.descriptor)
        with self._lock:
            copies = self._copies.get(message.number)
            waiting = copies.held(message.place, location) if copies is not None else []
        for one in waiting:
            one.reply(_where(location))

    # -- values put elsewhere ---------------------------------------------------------------------------------------

    def near(self, kept: Kept) -> MemoryFile | None:
        """The file of a value, if the process that put it is on this host, or this process holds it."""
        held = self._held.get(kept.token)
        place = kept.handle.place
        if held is not None or not here().same_namespace(place):
            return held
        return _opened(kept, place.pid, kept.descriptor)

    def fetch(self, kept: Kept, limit: Limit) -> MemoryFile:
        """The file of a value, from another host if need be. Blocks. Raises what movers raise."""
        near = self.near(kept)
        if near is not None:
            return near
        missing = False
        while True:
            question = verbs.WhereIs(kept.handle.number, kept.token, here(), missing)
            answer = self._end.where(kept.handle, question, limit)
            if answer is not None and answer.how == "dropped":
                raise BufferDroppedError(f"{kept.handle} was dropped: put it again, and keep what put() gives")
            if answer is not None and answer.how == "fetch":
                return self._pull(kept, limit)
            file = _opened(kept, answer.pid, answer.descriptor) if answer is not None else None
            if file is not None:
                return file
            missing = True  # whoever was to fetch it is gone, or lets nobody open its files

    def forget(self, message: verbs.Forget, asker: Asker[None]) -> None:
        """A value was dropped where it was put."""
        with self._lock:
            self._held.pop(message.token, None)

    def close(self) -> None:
        """Lets go of everything."""
        with self._lock:
            for table in (self._copies, self._files, self._unused, self._held):
                table.clear()

    def _pull(self, kept: Kept, limit: Limit) -> MemoryFile:
        size = kept.handle.size
        file = MemoryFile.empty(size)
        os.ftruncate(file.fd, size)
        memory = memory_of(map_file(file.fd, size, private=False, writable=True), writable=True)
        self._end.routes.transfer([Move(kept.handle, 0, memory)], limit, write=False)
        with self._lock:
            self._held[kept.token] = file
            while len(self._held) > 1 and sum(one.length for one in self._held.values()) > settings.rdma_put_kept:
                self._held.popitem(last=False)
        self._end.engine.tell(kept.handle.process, verbs.HOLDS, verbs.Holds(kept.handle.number, here(), file.fd))
        return file


def _where(location: Location) -> verbs.Where:
    return verbs.Where("there", location.pid, location.descriptor)
