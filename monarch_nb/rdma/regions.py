"""Memory that this process offers to others: a table, a mark for each region that readers check, and locks.

The locks prevent the release of memory while other processes write to it: one per region, in a file that they can open.
A writer holds a shared lock on the byte with the number of the region, and the owner releases no memory that is locked.
The kernel releases the lock of a killed writer. Locks belong to the opened file (fcntl(2), "open file description
locks"), not to a process.
"""

import contextlib
import ctypes
import fcntl
import itertools
import os
import secrets
import struct
import threading
from collections.abc import Callable, Iterator

from monarch_nb.rdma.memory import Memory

MARK = 16  # bytes of the secret of a region, and of its mark in memory
_BLOCK = 256  # marks allocated at a time; never freed, so that their addresses stay valid
_NOTHING = bytes(MARK)
_FLOCK = struct.Struct("hhqqi")  # <fcntl.h>, struct flock: type, whence, start, length, pid


def _lock_byte(descriptor: int, kind: int, number: int) -> bool:
    """Takes or releases the lock of one byte; False if another lock conflicts."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, number, 1, 0))
    except (BlockingIOError, PermissionError):
        return False
    return True


class Guard:
    """The owner's side. Without memory files (no Linux) there are no writers from outside."""

    def __init__(self) -> None:
        self.descriptor = -1
        with contextlib.suppress(OSError, AttributeError):
            self.descriptor = os.memfd_create("monarch-rdma-guard", os.MFD_CLOEXEC)

    def written(self, number: int) -> bool:
        """Returns whether a process writes to a region now. Does not block."""
        if self.descriptor < 0:
            return False
        if not _lock_byte(self.descriptor, fcntl.F_WRLCK, number):
            return True
        _lock_byte(self.descriptor, fcntl.F_UNLCK, number)
        return False

    def close(self) -> None:
        """Closes the file."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


@contextlib.contextmanager
def writing(pid: int, descriptor: int, numbers: "list[int]") -> Iterator[bool]:
    """The writer's side: retains regions of process `pid`. Yields False if one is being released.

    Raises OSError if the file cannot be opened: FileNotFoundError if the process has ended, PermissionError without
    access.
    """
    guard = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield all(_lock_byte(guard, fcntl.F_RDLCK, number) for number in numbers)
    finally:
        os.close(guard)  # ends the locks


def for_reading_only(secret: bytes) -> bool:
    """Returns whether a secret permits reading only: its lowest bit."""
    return bool(secret[0] & 1)


class OfferedRegion:
    """Offered memory. Its mark holds the secret during the offer, and zeros after it."""

    __slots__ = ("actor", "lock", "mark", "memory", "number", "owner", "readonly", "secret", "writers")

    def __init__(self, number: int, memory: Memory, owner: str, actor: object, mark: int, *, readonly: bool) -> None:
        self.number = number
        self.actor = actor  # ends the offer when it ends; None: the process itself
        self.memory: Memory | None = memory
        self.owner = owner  # display name of the actor that offers it
        self.readonly = readonly
        first, *rest = secrets.token_bytes(MARK)
        self.secret = bytes((first | 1 if readonly else first & ~1, *rest))
        self.mark = mark  # address
        self.lock = threading.Condition()
        self.writers = 0  # transfers of this process's own threads that use the memory now


class Regions:
    """The offered regions of a process. Thread-safe."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._regions: dict[int, OfferedRegion] = {}
        self._blocks: list[ctypes.Array[ctypes.c_char]] = []
        self._free: list[int] = []
        self.guard = Guard()
        self._in_use: list[Callable[[int], bool]] = []
        self._withdrawn: list[OfferedRegion] = []  # withdrawn, but still in use by other processes

    def __len__(self) -> int:
        return len(self._regions)

    def __iter__(self) -> Iterator[OfferedRegion]:
        return iter(tuple(self._regions.values()))

    def retain_while(self, in_use: Callable[[int], bool]) -> None:
        """Retains withdrawn memory while `in_use(number)` is True; the caller calls `release_withdrawn` afterwards."""
        self._in_use.append(in_use)

    def offer(self, memory: Memory, owner: str, actor: object = None, *, readonly: bool = False) -> OfferedRegion:
        """Offers memory and keeps it alive until the offer is withdrawn. Read-only memory is offered for reading."""
        self.release_withdrawn()
        with self._lock:
            if not self._free:
                block = ctypes.create_string_buffer(_BLOCK * MARK)
                self._blocks.append(block)
                start = ctypes.addressof(block)
                self._free.extend(start + index * MARK for index in range(_BLOCK))
            mark, readonly = self._free.pop(), readonly or memory.readonly
            region = OfferedRegion(next(self._numbers), memory, owner, actor, mark, readonly=readonly)
            ctypes.memmove(region.mark, region.secret, MARK)
            self._regions[region.number] = region
        return region

    def withdraw(self, number: int) -> bool:
        """Ends an offer, and waits for this process's own transfers of it; False if there was none.

        While another process uses the memory, it is retained.
        """
        with self._lock:
            region = self._regions.pop(number, None)
            if region is None:
                return False
            ctypes.memmove(region.mark, _NOTHING, MARK)
        with region.lock:
            while region.writers:
                region.lock.wait()
        with self._lock:
            self._withdrawn.append(region)
        self.release_withdrawn()
        return True

    def release_withdrawn(self) -> None:
        """Releases withdrawn memory that no other process uses."""
        if not self._withdrawn:
            return
        with self._lock:
            withdrawn, self._withdrawn = self._withdrawn, []
            for region in withdrawn:
                if self.guard.written(region.number) or any(in_use(region.number) for in_use in self._in_use):
                    self._withdrawn.append(region)
                else:
                    region.memory = None
                    self._free.append(region.mark)

    def withdraw_all(self, matches: Callable[[OfferedRegion], bool]) -> int:
        """Ends the offers that match; returns their number."""
        return sum(self.withdraw(region.number) for region in self if matches(region))

    def use(self, number: int, secret: bytes, *, write: bool = False) -> "RegionUse":
        """Returns a `with` block that yields the memory of a region, which stays meanwhile.

        Raises LookupError for a region that is not offered (any more), PermissionError for a wrong secret, and for a
        write to memory offered for reading.
        """
        region = self._regions.get(number)
        if region is None:
            raise LookupError(f"there is no buffer {number} here: it was dropped")
        if not secrets.compare_digest(region.secret, secret):
            raise PermissionError(f"buffer {number} is not what this handle was made for")
        if write and region.readonly:
            raise PermissionError(f"buffer {number} is read-only")
        return RegionUse(region)


class RegionUse:
    """Holds the memory of a region while a transfer runs."""

    __slots__ = ("region",)

    def __init__(self, region: OfferedRegion) -> None:
        self.region = region

    def __enter__(self) -> Memory:
        with self.region.lock:
            memory = self.region.memory
            if memory is None:
                raise LookupError(f"there is no buffer {self.region.number} here: it was dropped")
            self.region.writers += 1
        return memory

    def __exit__(self, *_: object) -> None:
        with self.region.lock:
            self.region.writers -= 1
            self.region.lock.notify_all()
