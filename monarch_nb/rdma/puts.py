"""Put values in one process: its own, and those that it stores for the other processes of its host."""

import contextlib
import os
import secrets
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec

from monarch_nb.rdma import verbs
from monarch_nb.rdma.errors import BufferDroppedError, Limit
from monarch_nb.rdma.memory import memory_of
from monarch_nb.rdma.movers import Move
from monarch_nb.rdma.verbs import BufferHandle, ProcessIdentity, own_identity
from monarch_nb.runtime import Instance
from monarch_nb.settings import settings
from monarch_nb.transport import SharedMemoryError
from monarch_nb.transport.shared import MemoryFile, map_file
from monarch_nb.wire import Asker, Pieces

if TYPE_CHECKING:
    from monarch_nb.rdma.service import RdmaService


_MARGIN = 64  # bytes before the first frame, which start with the token; frames are aligned to this
_TOKEN = 16
A = TypeVar("A")
_Host = tuple[str, int]


class StoredValue(msgspec.Struct, array_like=True, frozen=True):
    """Reference to a put value, as sent to other processes."""

    handle: BufferHandle  # covers the whole file
    token: bytes  # start of the file, since descriptors are reused
    descriptor: int  # of the file, in the process that put it
    sizes: tuple[int, ...]  # of the frames


def starts(sizes: Sequence[int]) -> list[int]:
    """Offsets of frames of these sizes in a file."""
    return list(accumulate((-(-size // _MARGIN) * _MARGIN for size in sizes[:-1]), initial=_MARGIN))


def _opened(stored: StoredValue, pid: int, descriptor: int) -> MemoryFile | None:
    """Opens the file of a process on this host; None if it is gone or cannot be opened."""
    try:
        file = MemoryFile.of_process(pid, descriptor, stored.handle.size)
        return file if os.pread(file.fd, _TOKEN, 0) == stored.token else None
    except (SharedMemoryError, OSError):
        return None


@dataclass(frozen=True, slots=True)
class Location:
    """Location of a memory file: a process on the host of the asker, and the descriptor there."""

    process: str
    pid: int
    descriptor: int


@dataclass(slots=True)
class _Copy(Generic[A]):
    location: Location | None = None  # the location that is sent to askers
    holders: set[str] = field(default_factory=set)  # several if a process has waited for another in vain
    waiting: list[A] = field(default_factory=list)


class Copies(Generic[A]):
    """Copies of one value by host, on the side of the owner: the first asker of a host fetches it for all. No I/O."""

    def __init__(self) -> None:
        self._by_host: dict[_Host, _Copy[A]] = {}

    def ask(self, identity: ProcessIdentity, asker: A, *, missing: bool) -> Location | bool | None:
        """Returns the location on that host, True if the asker is to fetch the value, None if it has to wait.

        `missing` says that the asker found nothing at the last location, or has waited in vain.
        """
        host = (identity.boot, identity.namespace)
        copy = self._by_host.get(host)
        if copy is None or missing:
            if copy is None:
                copy = self._by_host[host] = _Copy()
            copy.location = None
            return True
        if copy.location is None:
            copy.waiting.append(asker)
        return copy.location

    def held(self, identity: ProcessIdentity, location: Location) -> list[A]:
        """Records a location; returns the askers that waited for it."""
        copy = self._by_host.setdefault((identity.boot, identity.namespace), _Copy())
        copy.location = location
        copy.holders.add(location.process)
        waiting, copy.waiting = copy.waiting, []
        return waiting

    def waiting(self) -> list[A]:
        """Returns all waiting askers."""
        return [asker for copy in self._by_host.values() for asker in copy.waiting]

    def holders(self) -> list[str]:
        """Returns the processes that hold a file of the value."""
        return [process for copy in self._by_host.values() for process in sorted(copy.holders)]


class Puts:
    """Put values of one process. Thread-safe."""

    def __init__(self, end: "RdmaService") -> None:
        self._end = end
        self._lock = threading.Lock()
        self._copies: dict[int, Copies[Asker[verbs.ValueLocation]]] = {}
        self._files: dict[int, tuple[bytes, MemoryFile]] = {}  # of values put by this process
        self._unused: OrderedDict[int, int] = OrderedDict()  # number -> bytes of unreferenced values
        self._foreign: OrderedDict[bytes, MemoryFile] = OrderedDict()  # values of other hosts, by token

    # -- values of this process -------------------------------------------------------------------------------------

    def store(self, frames: Sequence[memoryview | Pieces], owner: Instance) -> StoredValue:
        """Copies frames into a memory file and offers it to other hosts."""
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
        return StoredValue(handle, token, file.fd, sizes)

    def release(self, number: int) -> None:
        """Marks a value as unreferenced in this process. The oldest such values are dropped above a limit of bytes."""
        surplus = []
        with self._lock:
            entry = self._files.get(number)
            if entry is None:
                return
            self._unused[number] = entry[1].length
            while sum(self._unused.values()) > settings.rdma_put_kept:
                surplus.append(self._unused.popitem(last=False)[0])
        for unused in surplus:
            self.drop(unused)

    def drop(self, number: int) -> None:
        """Drops a value on all hosts; idempotent."""
        with self._lock:
            copies, entry = self._copies.pop(number, None), self._files.pop(number, None)
            self._unused.pop(number, None)
        if copies is None or entry is None:
            return
        self._end.regions.withdraw(number)
        for asker in copies.waiting():
            asker.reply(verbs.ValueLocation("dropped"))
        for process in copies.holders():
            with contextlib.suppress(Exception):  # the process may have ended
                self._end.runtime.post(process, verbs.FORGET, verbs.Forget(entry[0]))

    def sweep(self) -> None:
        """Drops the values whose actors have ended."""
        offered = {region.number for region in self._end.regions}
        for number in tuple(self._files):
            if number not in offered:
                self.drop(number)

    def where(self, question: verbs.LocateValue, asker: Asker[verbs.ValueLocation]) -> verbs.ValueLocation | None:
        """Returns the location of a value on the host of the asker, None if the reply follows later."""
        with self._lock:
            copies, entry = self._copies.get(question.number), self._files.get(question.number)
            if copies is None or entry is None or not secrets.compare_digest(entry[0], question.token):
                return verbs.ValueLocation("dropped")
            location = copies.ask(question.identity, asker, missing=question.missing)
        if location is None:
            return None  # the reply follows when the value has been fetched
        return verbs.ValueLocation("fetch") if isinstance(location, bool) else _where(location)

    def holds(self, message: verbs.Holds, asker: Asker[None]) -> None:
        """Records that a process has fetched a value for its host."""
        location = Location(asker.src, message.identity.pid, message.descriptor)
        with self._lock:
            copies = self._copies.get(message.number)
            waiting = copies.held(message.identity, location) if copies is not None else []
        for waiter in waiting:
            waiter.reply(_where(location))

    # -- values of other processes ----------------------------------------------------------------------------------

    def local_file(self, stored: StoredValue) -> MemoryFile | None:
        """Returns the file of a value whose owner is on this host, or that this process holds; else None."""
        file = self._foreign.get(stored.token)
        identity = stored.handle.identity
        if file is not None or not own_identity().same_namespace(identity):
            return file
        return _opened(stored, identity.pid, stored.descriptor)

    def fetch(self, stored: StoredValue, limit: Limit) -> MemoryFile:
        """Returns the file of a value, fetched from another host if necessary. Blocks; raises what movers raise."""
        local = self.local_file(stored)
        if local is not None:
            return local
        missing = False
        while True:
            question = verbs.LocateValue(stored.handle.number, stored.token, own_identity(), missing)
            answer = self._end.where(stored.handle, question, limit)
            if answer is not None and answer.how == "dropped":
                raise BufferDroppedError(f"{stored.handle} was dropped: put it again, and keep what put() gives")
            if answer is not None and answer.how == "fetch":
                return self._pull(stored, limit)
            file = _opened(stored, answer.pid, answer.descriptor) if answer is not None else None
            if file is not None:
                return file
            missing = True  # the process that fetched it has ended or cannot be accessed

    def forget(self, message: verbs.Forget, asker: Asker[None]) -> None:
        """Releases a value that its owner has dropped."""
        with self._lock:
            self._foreign.pop(message.token, None)

    def close(self) -> None:
        """Releases all files."""
        with self._lock:
            for table in (self._copies, self._files, self._unused, self._foreign):
                table.clear()

    def _pull(self, stored: StoredValue, limit: Limit) -> MemoryFile:
        size = stored.handle.size
        file = MemoryFile.empty(size)
        os.ftruncate(file.fd, size)
        memory = memory_of(map_file(file.fd, size, private=False, writable=True), writable=True)
        self._end.routes.transfer([Move(stored.handle, 0, memory)], limit, write=False)
        with self._lock:
            self._foreign[stored.token] = file
            while (
                len(self._foreign) > 1
                and sum(stored_file.length for stored_file in self._foreign.values()) > settings.rdma_put_kept
            ):
                self._foreign.popitem(last=False)
        self._end.runtime.post(
            stored.handle.process, verbs.HOLDS, verbs.Holds(stored.handle.number, own_identity(), file.fd)
        )
        return file


def _where(location: Location) -> verbs.ValueLocation:
    return verbs.ValueLocation("there", location.pid, location.descriptor)
