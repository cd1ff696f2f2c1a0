"""Memory files: anonymous files in RAM that contain large buffers for the processes of one host.

Written once, sealed, then mapped privately by every receiver: changes of a receiver's mapping are seen by nobody else.
They have no name, so nothing is left after SIGKILL, and they are not counted against /dev/shm. The file lives while
any process holds a descriptor or a mapping of it.
"""

import contextlib
import ctypes
import errno
import fcntl
import functools
import mmap
import os
import select
import sys
from typing import Any

from monarch_nb.transport.errors import SharedMemoryError, descriptor_limit, is_descriptor_limit
from monarch_nb.transport.interrupts import uninterrupted
from monarch_nb.wire import Pieces

_MAP_FIXED = 0x10  # Linux and macOS
_FAILED = ctypes.c_void_p(-1).value


class _Mapping(mmap.mmap):
    """A mapping that may be on loan: it holds the loan while any part of it is held."""

    loan: object = None


def map_file(fd: int, length: int, *, private: bool, writable: bool = False, loan: object = None) -> memoryview:
    """Returns the content of a file: writable and private to this mapping, or shared and read-only. Raises OSError.

    `writable` makes a shared one writable: others see the changes. The mapping keeps `loan` alive.
    """
    flags = mmap.MAP_PRIVATE if private else mmap.MAP_SHARED
    writable = writable or private
    protection = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
    if sys.version_info >= (3, 13):
        mapped = _Mapping(fd, length, flags=flags, prot=protection, trackfd=False)
        mapped.loan = loan
        return memoryview(mapped)
    # An anonymous mapping has no descriptor; the file is mapped over it, and unmapped with the mmap object.
    reserved = _Mapping(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    reserved.loan = loan
    start = ctypes.addressof(ctypes.c_char.from_buffer(reserved))
    if _mmap()(start, length, protection, flags | _MAP_FIXED, fd, 0) == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    view = memoryview(reserved)
    return view if writable else view.toreadonly()


@functools.cache
def _mmap() -> "ctypes._FuncPointer":
    function = ctypes.CDLL(None, use_errno=True).mmap
    function.restype = ctypes.c_void_p
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    return function


threshold = 256 * 1024  # bytes; smaller buffers are cheaper in band
_NAME = "monarch-nb"
_MAPPED = 8 << 20  # bytes; above, a mapping is faster to read than the file
_PIECE = 1 << 20  # bytes per write; larger writes measured slower


def available() -> bool:
    """Returns whether this system has memory files and the user has not disabled them (MONARCH_NB_PORTABLE=1)."""
    return hasattr(os, "memfd_create") and os.environ.get("MONARCH_NB_PORTABLE", "") in ("", "0")


class MemoryFile:
    """One buffer in a memory file; its descriptor is closed when the last reference to this object goes."""

    __slots__ = ("__weakref__", "_closer", "entry", "fd", "length", "loan", "shared")

    def __init__(self, fd: int, length: int, closer: object = None) -> None:
        self._closer = closer or _closer(fd)
        self.fd = fd
        self.length = length
        self.entry: Any = None  # for a file made here: its entry in the pool
        self.loan: Any = None  # for a received file: the loan of the sender's pool
        self.shared: memoryview | None = None

    @property
    def nbytes(self) -> int:
        """As `length`, under the name that other buffers use."""
        return self.length

    def part(self, length: int) -> "MemoryFile":
        """Returns another object for the first `length` bytes of the same file."""
        return MemoryFile(self.fd, length, self._closer)

    @classmethod
    def holding(cls, data: memoryview | Pieces) -> "MemoryFile":
        """Returns a sealed memory file with a copy of `data` (contiguous bytes)."""
        file = cls._create(data.nbytes)
        file.append(data)
        file.seal()
        return file

    @classmethod
    def _create(cls, length: int) -> "MemoryFile":
        try:
            return uninterrupted(cls._new, length)
        except OSError as error:
            if is_descriptor_limit(error):
                raise descriptor_limit("a memory file for a large buffer") from error
            raise _no_room(error, length) from error

    @classmethod
    def _new(cls, length: int) -> "MemoryFile":
        return cls(os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), length)

    @classmethod
    def empty(cls, length: int) -> "MemoryFile":
        """Returns an unsealed memory file that `append` will fill up to `length`."""
        return cls._create(length)

    def append(self, data: memoryview | Pieces) -> None:
        """Appends data. Raises SharedMemoryError when memory runs out."""
        piece = memoryview(bytes(data)) if isinstance(data, Pieces) else data
        done = 0
        try:
            while done < piece.nbytes:
                done += os.write(self.fd, piece[done : done + _PIECE])
        except OSError as error:
            raise _no_room(error, self.length) from error

    def seal(self) -> None:
        """Makes the content immutable for all processes."""
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        with contextlib.suppress(OSError):  # a kernel without seals still has the file
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals)

    @classmethod
    def of_process(cls, pid: int, fd: int, length: int) -> "MemoryFile":
        """Opens the memory file that process `pid` has as `fd`. Raises SharedMemoryError."""
        path = f"/proc/{pid}/fd/{fd}"
        if length < 0:
            raise SharedMemoryError(f"a memory file cannot have {length} bytes: {path}")
        try:
            own = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            if is_descriptor_limit(error):
                raise descriptor_limit("a large buffer that arrived") from error
            raise SharedMemoryError(
                f"cannot open the memory file {path} of a peer on this host ({error.strerror}). If the processes "
                "do not see each other's /proc (containers), set MONARCH_NB_PORTABLE=1 in all of them."
            ) from error
        file = cls(own, length)
        name = os.readlink(f"/proc/self/fd/{own}")
        if not name.startswith(f"/memfd:{_NAME}") or os.fstat(own).st_size < length:
            raise SharedMemoryError(f"{path} is not the memory file that was announced; its process may be gone")
        return file

    def private(self) -> memoryview:
        """Returns a writable mapping of its own: writes go to copies of the pages."""
        if self.length == 0:
            return memoryview(bytearray())
        if self.entry is not None:
            self.entry.given = True  # mapped by its own creator, whose release of it is not reported
        try:
            return map_file(self.fd, self.length, private=True, loan=self.loan)
        except OSError as error:
            raise _no_room(error, self.length) from error

    def read_into(self, target: memoryview) -> None:
        """Copies the content into writable memory of the same length. Faster than a mapping for small files."""
        if self.length > _MAPPED:
            target[:] = self.private()
            return
        done = 0
        while done < self.length:
            count = os.preadv(self.fd, [target[done:]], done)
            if not count:
                raise SharedMemoryError("a memory file is shorter than announced")
            done += count

    def view(self) -> memoryview:
        """Returns a read-only mapping, shared by all callers, for sending over a socket."""
        if self.shared is None:
            if self.loan is not None:
                self.loan.void()
            try:
                self.shared = map_file(self.fd, self.length, private=False)
            except OSError as error:
                raise _no_room(error, self.length) from error
        return self.shared


def _closer(fd: int) -> object:
    """Returns an object that closes a descriptor when dropped; in C, since Ctrl-C can end a Python finalizer early."""
    return select.epoll.fromfd(fd) if hasattr(select, "epoll") else _Closer(fd)


class _Closer:
    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._fd)


def _no_room(error: OSError, length: int) -> SharedMemoryError:
    if isinstance(error, SharedMemoryError):
        return error
    if error.errno in (errno.ENOMEM, errno.ENOSPC, errno.EFBIG):
        return SharedMemoryError(
            f"no memory for a buffer of {length / 2**20:.0f} MiB ({error.strerror}): free some, "
            "send it in smaller parts, or raise the memory limit of this container"
        )
    return SharedMemoryError(f"cannot write a memory file of {length / 2**20:.0f} MiB: {error.strerror}")
