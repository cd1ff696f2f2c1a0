"""Between processes of one machine: the kernel copies from one address space into the other (process_vm_readv(2)).

A read needs nobody's help: the mark of the region is looked at before and after the bytes, so a buffer that was dropped
meanwhile is an error and never somebody else's bytes. A write is a read by the other side: the owner, who alone knows
that the memory stays, is asked to fetch the bytes.
"""

import ctypes
import errno
import functools
import os
import struct
import threading
from collections.abc import Callable, Sequence

from monarch_nb.rdma.errors import BufferDroppedError, owner_lost
from monarch_nb.rdma.handle import Handle
from monarch_nb.rdma.limits import Limit
from monarch_nb.rdma.movers.mover import CannotReachError, Move
from monarch_nb.rdma.place import here
from monarch_nb.rdma.regions import MARK

__all__ = ["CrossMemory", "fetch"]

_PIECE = 64 << 20  # bytes the kernel copies between two looks at the limit
_AT_ONCE = 256  # reads in one system call; each takes two of the kernel's 1,024 vectors


_VECTOR = 16  # bytes of an iovec, <sys/uio.h>: an address and a size


def _readv() -> "Callable[..., int] | None":
    try:
        function = ctypes.CDLL(None, use_errno=True).process_vm_readv
    except (AttributeError, OSError):
        return None
    address, count = ctypes.c_void_p, ctypes.c_ulong
    function.argtypes = (ctypes.c_int, address, count, address, count, count)
    function.restype = ctypes.c_ssize_t
    return function


_process_vm_readv = _readv()


class _Vectors(threading.local):
    """Room for the arguments of one call, made once per thread."""

    def __init__(self) -> None:
        self.local = ctypes.create_string_buffer(2 * _AT_ONCE * _VECTOR)
        self.remote = ctypes.create_string_buffer(2 * _AT_ONCE * _VECTOR)
        self.local_address, self.remote_address = ctypes.addressof(self.local), ctypes.addressof(self.remote)
        self.marks = ctypes.create_string_buffer(MARK * (_AT_ONCE + 1))
        self.marks_address = ctypes.addressof(self.marks)


_vectors = _Vectors()


class CrossMemory:
    """For buffers of processes on this machine whose memory the kernel lets this one read."""

    alone = True

    def __init__(self, ask_to_fetch: Callable[[Sequence[Move], Limit], None]) -> None:
        self._ask_to_fetch = ask_to_fetch

    def read(self, moves: Sequence[Move], limit: Limit) -> None:
        """From buffers of one process of this machine: two system calls for up to 256 small ones."""
        _check_place(moves[0].handle)
        small: list[Move] = []
        room = _PIECE  # bytes that still fit into the next system call
        for move in moves:
            if move.local.size > _PIECE:
                fetch(move.handle, move.offset, move.local.address, move.local.size, limit)
                continue
            if len(small) == _AT_ONCE or move.local.size > room:
                _read_small(small, limit)
                small, room = [], _PIECE
            small.append(move)
            room -= move.local.size
        if small:
            _read_small(small, limit)

    def write(self, moves: Sequence[Move], limit: Limit) -> None:
        """The owner fetches the bytes from here."""
        _check_place(moves[0].handle)
        self._ask_to_fetch(moves, limit)

    def close(self) -> None:
        """There is nothing to give up."""


def fetch(handle: Handle, offset: int, target: int, size: int, limit: Limit) -> None:
    """Copies `size` bytes of a buffer, from `offset` on, to an address of this process. Blocks.

    Raises CannotReachError where the kernel refuses, BufferDroppedError and OwnerLostError where there is nothing (any
    more), and what the limit raises. After an error the target may hold some of the new bytes and some of its old ones.
    """
    _check_place(handle)
    _check_mark(handle)
    for start in range(0, size, _PIECE):
        limit.left()
        step = min(_PIECE, size - start)
        _call(handle, [(target + start, handle.address + offset + start, step)])
        _check_mark(handle)


def _check_place(handle: Handle) -> None:
    if _process_vm_readv is None:
        raise CannotReachError("this system has no process_vm_readv")
    mine = here()
    if not mine.same_machine(handle.place):
        raise CannotReachError("it is on another machine")
    if not mine.same_namespace(handle.place):
        raise CannotReachError("it is in another container (another namespace of process ids)")


def _check_mark(handle: Handle) -> None:
    _call(handle, [(_vectors.marks_address, handle.mark, MARK)])
    if _vectors.marks.raw[:MARK] != handle.secret:
        raise _dropped(handle)


def _read_small(moves: list[Move], limit: Limit) -> None:
    """One look at all marks, then all bytes and all marks again, in this order, in a call each."""
    limit.left()
    first = moves[0].handle
    room = _vectors.marks_address
    marks = [(room + place * MARK, move.handle.mark, MARK) for place, move in enumerate(moves)]
    secrets = b"".join(move.handle.secret for move in moves)
    _call(first, marks)
    _compare(moves, secrets)
    data = [(move.local.address, move.handle.address + move.offset, move.local.size) for move in moves]
    _call(first, data + marks)
    _compare(moves, secrets)


def _compare(moves: list[Move], secrets: bytes) -> None:
    seen = _vectors.marks.raw[: len(secrets)]
    if seen == secrets:
        return
    for place, move in enumerate(moves):
        if seen[place * MARK : (place + 1) * MARK] != move.handle.secret:
            raise _dropped(move.handle)


@functools.cache
def _form(number: int) -> struct.Struct:
    return struct.Struct(f"={2 * number}Q")


def _call(handle: Handle, pieces: "list[tuple[int, int, int]]") -> None:
    """Reads pieces (address here, address there, bytes) in one system call."""
    room, number = _vectors, len(pieces)
    local: list[int] = []
    remote: list[int] = []
    total = 0
    for to, origin, size in pieces:
        local += (to, size)
        remote += (origin, size)
        total += size
    form = _form(number)
    form.pack_into(room.local, 0, *local)
    form.pack_into(room.remote, 0, *remote)
    assert _process_vm_readv is not None
    count = _process_vm_readv(handle.place.pid, room.local_address, number, room.remote_address, number, 0)
    if count == total:
        return
    code = ctypes.get_errno() if count < 0 else errno.EFAULT
    if code == errno.ESRCH:
        raise owner_lost(handle, f"process {handle.place.pid} has ended")
    if code == errno.EFAULT:  # memory that was given back to the system, after a drop
        raise _dropped(handle)
    if code in (errno.EPERM, errno.EACCES, errno.ENOSYS):
        raise CannotReachError(f"the kernel forbids reading its memory ({os.strerror(code)}; yama, seccomp or user)")
    raise OSError(code, f"{handle} could not be read: {os.strerror(code)}")


def _dropped(handle: Handle) -> BufferDroppedError:
    return BufferDroppedError(f"{handle} was dropped, or its process has ended: nobody offers that memory any more")
