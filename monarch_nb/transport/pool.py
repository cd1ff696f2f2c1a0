"""Memory files that are reused: the sender refills files that their receivers have released.

Measured: filling new pages takes four times as long as filling old ones. A file is lent with each message that names
it; a receiver returns the loan when none of its objects holds the file any longer. Nothing depends on that: a loan that
is not returned in time is forgotten, and the file belongs to its receivers alone.
"""

import contextlib
import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable

import msgspec

from monarch_nb.transport.errors import TransportError
from monarch_nb.transport.interrupts import uninterrupted
from monarch_nb.transport.parcel import Parcel
from monarch_nb.transport.reader import Reader
from monarch_nb.transport.shared import MemoryFile, map_file
from monarch_nb.wire import Pieces, msgpack_decoder
from monarch_nb.wire.header import Header, Kind

MOST_IDLE = 256 << 20  # bytes that may be idle
IDLE = 2.0  # seconds that they may be idle
LENT = 10.0  # seconds until a loan is forgotten
_FILES = 64
_numbers = msgpack_decoder(list[int])
_PIECE = 4 << 20  # bytes copied at a time, so that other threads can run


class _Entry:
    """One file, its present user, and its loans."""

    __slots__ = ("file", "given", "last_used", "lent", "mapping", "user")

    def __init__(self, file: MemoryFile) -> None:
        self.file = file  # its length is that of the file itself
        self.user: weakref.ref[MemoryFile] | None = None
        self.given = False  # sent without a loan, so that it cannot be reused
        self.lent: set[int] = set()
        self.mapping: memoryview | None = None
        self.last_used = time.monotonic()

    @property
    def idle(self) -> bool:
        return not self.lent and not self.given and (self.user is None or self.user() is None)

    def used(self, length: int) -> MemoryFile:
        user = self.file.part(length)
        user.entry = self
        self.user = weakref.ref(user)
        self.last_used = time.monotonic()
        return user


class Pool:
    """The memory files of one process that may be refilled. Thread-safe; calls that find it busy skip it."""

    def __init__(self, began: Callable[["Pool"], None]) -> None:
        """`began` is called when the pool has to be ticked from then on."""
        self._began = began
        self._lock = threading.Lock()
        self._entries: list[_Entry] = []
        self._loans: dict[int, tuple[str, list[_Entry]]] = {}
        self._numbers = itertools.count(1)
        self._ticking = False

    def holding(self, data: memoryview | Pieces) -> MemoryFile:
        """Returns a memory file with a copy of `data` (contiguous bytes). Raises SharedMemoryError without memory."""
        length = data.nbytes
        reused = uninterrupted(self._take, length)
        if reused is None:
            file = MemoryFile.empty(length)
            file.append(data)
            return uninterrupted(self._add, file)
        entry, user = reused
        if entry.mapping is None:
            entry.mapping = map_file(entry.file.fd, entry.file.length, private=False, writable=True)
        if isinstance(data, Pieces):
            data.copy_into(entry.mapping)
            return user
        for start in range(0, length, _PIECE):
            entry.mapping[start : min(start + _PIECE, length)] = data[start : start + _PIECE]
        return user

    def _take(self, length: int) -> tuple[_Entry, MemoryFile] | None:
        if not self._lock.acquire(blocking=False):
            return None
        try:
            fits = [e for e in self._entries if length <= e.file.length <= 2 * length and e.idle]
            if not fits:
                return None
            entry = min(fits, key=lambda e: e.file.length)
            return entry, entry.used(length)
        finally:
            self._lock.release()

    def _add(self, file: MemoryFile) -> MemoryFile:
        if not self._lock.acquire(blocking=False):
            return file
        try:
            if len(self._entries) >= _FILES:
                return file
            entry = _Entry(file)
            user = entry.used(file.length)
            self._entries.append(entry)
            began, self._ticking = not self._ticking, True
        finally:
            self._lock.release()
        if began:
            self._began(self)
        return user

    def lend(self, files: Iterable[object], to: str) -> int:
        """Returns a number for the loan of those of `files` that are of this pool; 0 without any."""
        lent = [file.entry for file in files if type(file) is MemoryFile and file.entry is not None]
        return uninterrupted(self._lend, lent, to) if lent else 0

    def _lend(self, lent: list[_Entry], to: str) -> int:
        if not self._lock.acquire(blocking=False):
            return 0
        try:
            number = next(self._numbers)
            self._loans[number] = (to, lent)
            now = time.monotonic()
            for entry in lent:
                entry.lent.add(number)
                entry.last_used = now
        finally:
            self._lock.release()
        return number

    def returned(self, numbers: Iterable[int], by: str) -> None:
        """Records that `by` has returned these loans."""
        with self._lock:
            now = time.monotonic()
            for number in numbers:
                to, entries = self._loans.get(number, ("", ()))
                if to == by:
                    del self._loans[number]
                    for entry in entries:
                        entry.lent.discard(number)
                        entry.last_used = now

    def tick(self, now: float) -> bool:
        """Releases files that were idle, or lent, for too long; returns whether any are left."""
        with self._lock:
            idle_bytes = 0
            remaining = []
            for entry in sorted(self._entries, key=lambda e: e.last_used, reverse=True):
                idle = entry.idle
                if entry.given or now - entry.last_used > (IDLE if idle else LENT):
                    continue
                if idle:
                    idle_bytes += entry.file.length
                    if idle_bytes > MOST_IDLE:
                        continue
                remaining.append(entry)
            if len(remaining) < len(self._entries):
                stay = set(map(id, remaining))
                self._loans = {n: (to, es) for n, (to, es) in self._loans.items() if any(id(e) in stay for e in es)}
            self._entries = remaining
            self._ticking = bool(remaining)
            return self._ticking

    def close(self) -> None:
        """Releases all files."""
        with self._lock:
            self._entries, self._loans = [], {}


class Loan:
    """The receiver's side of a loan, which is returned with the last reference to this object."""

    __slots__ = ("_back", "number")

    def __init__(self, number: int, back: Callable[[int], None]) -> None:
        self.number = number
        self._back = back

    def void(self) -> None:
        """Keeps the loan for good, since another process will hold the file too."""
        self.number = 0

    def __del__(self) -> None:
        if self.number:
            self._back(self.number)


class Loans:
    """The loans that one process has given and received. Thread-safe."""

    def __init__(self, address: str, pool: Pool, reader: Reader, send: Callable[[Header, Parcel], None]) -> None:
        """`send` may raise TransportError: the receiver is gone then, and does not reuse the files."""
        self._address, self._pool, self._reader, self._send = address, pool, reader, send
        self._back: deque[tuple[str, int]] = deque()

    def lend(self, parcel: Parcel, to: str) -> int:
        """Returns a number for the loan of a message's memory files to `to`; 0 if they are given for good."""
        return self._pool.lend(parcel.bodies, to)

    def returned(self, header: Header, parcel: Parcel) -> None:
        """Handles a GIVEN_BACK message."""
        with contextlib.suppress(msgspec.MsgspecError, IndexError):
            self._pool.returned(_numbers.decode(parcel.frames[0]), header.src)

    def give_back(self, to: str, number: int) -> None:
        """Returns a loan to `to` soon. Also in a finalizer."""
        self._back.append((to, number))
        self._reader.call_when_awake(self._send_back)

    def _send_back(self) -> None:
        loans: dict[str, list[int]] = {}
        while self._back:
            to, number = self._back.popleft()
            loans.setdefault(to, []).append(number)
        for to, numbers in loans.items():
            with contextlib.suppress(TransportError):
                body = Parcel([msgspec.msgpack.encode(numbers)])
                self._send(Header(Kind.GIVEN_BACK, to, self._address), body)
