"""On one machine: copies within this process, and between processes by the kernel (process_vm_readv(2)).

No other process helps. The mark of a region is read before and after the bytes, so a buffer that was dropped
meanwhile is an error and never somebody else's bytes. While it writes, a writer holds a lock that keeps the
owner from releasing the memory (`monarch_nb.rdma.regions`).
"""

import contextlib
import ctypes
import errno
import functools
import os
import struct
import threading
from collections.abc import Callable, Iterator, Sequence

from monarch_nb.rdma.errors import BufferDroppedError, Limit, owner_lost, side_by_side
from monarch_nb.rdma.memory import move_bytes
from monarch_nb.rdma.movers import CannotReachError, Move, is_of_host
from monarch_nb.rdma.regions import MARK, Regions, for_reading_only, writing
from monarch_nb.rdma.verbs import BufferHandle, own_identity

_COPIED = 64 << 20  # bytes copied within this process between two checks of the limit
_PIECE = 16 << 20  # bytes the kernel copies between two checks of the limit
_SMALL = 4096  # bytes up to which one system call reads marks and bytes, which are checked before use
_AT_ONCE = 256  # reads in one system call; each takes two of the kernel's 1,024 vectors
_PR_SET_PTRACER, _ANY = 0x59616D61, 2**64 - 1  # <sys/prctl.h>
_VECTOR = 16  # bytes of an iovec, <sys/uio.h>: an address and a size
_Piece = tuple[int, int, int]  # address here, address there, bytes


class LocalMover:
    """Moves bytes within this process."""

    alone = True

    def __init__(self, process: str, regions: Regions) -> None:
        self._process = process
        self._regions = regions

    def read(self, moves: Sequence[Move], limit: Limit) -> None:
        """Reads buffers into other memory of this process."""
        self._copy(moves, limit, into=False)

    def write(self, moves: Sequence[Move], limit: Limit) -> None:
        """Writes other memory of this process into buffers."""
        self._copy(moves, limit, into=True)

    def close(self) -> None:
        """Does nothing: there are no resources."""

    def _copy(self, moves: Sequence[Move], limit: Limit, *, into: bool) -> None:
        for move in moves:
            if move.handle.process != self._process:
                raise CannotReachError  # without a text, since another process is no surprise
            try:
                with self._regions.use(move.handle.number, move.handle.secret, write=into) as memory:
                    local = move.local
                    for start in range(0, local.size, _COPIED):
                        limit.remaining()
                        size = min(_COPIED, local.size - start)
                        offered, part = memory.part(move.offset + start, size), local.part(start, size)
                        move_bytes(*((offered, part) if into else (part, offered)))
            except LookupError as error:
                raise BufferDroppedError(f"{move.handle} was dropped; its owner offers it no longer") from error


def _kernel(name: str) -> "Callable[..., int] | None":
    try:
        function = ctypes.CDLL(None, use_errno=True)[name]
    except (AttributeError, OSError):
        return None
    address, count = ctypes.c_void_p, ctypes.c_ulong
    function.argtypes = (ctypes.c_int, address, count, address, count, count)
    function.restype = ctypes.c_ssize_t
    call: Callable[..., int] = function
    return call


_readv, _writev = _kernel("process_vm_readv"), _kernel("process_vm_writev")


class _Vectors(threading.local):
    """Room for the arguments of one call, made once per thread."""

    def __init__(self) -> None:
        self.local = ctypes.create_string_buffer(2 * _AT_ONCE * _VECTOR)
        self.remote = ctypes.create_string_buffer(2 * _AT_ONCE * _VECTOR)
        self.local_address, self.remote_address = ctypes.addressof(self.local), ctypes.addressof(self.remote)
        self.marks = ctypes.create_string_buffer(MARK * (_AT_ONCE + 1))
        self.marks_address = ctypes.addressof(self.marks)
        self.small = ctypes.create_string_buffer(_SMALL)
        self.small_address = ctypes.addressof(self.small)


_vectors = _Vectors()


class CrossMemory:
    """Moves bytes of processes on this machine whose memory the kernel lets this process access."""

    alone = True

    def __init__(self) -> None:
        _let_others_in()

    def read(self, moves: Sequence[Move], limit: Limit) -> None:
        """Reads from buffers of one process of this machine: one system call for a small one, two for up to 256."""
        _check_host(moves)
        _each(moves, limit, _read)

    def write(self, moves: Sequence[Move], limit: Limit) -> None:
        """Writes into buffers of one process of this machine, whose memory stays meanwhile."""
        _check_host(moves)
        _each(moves, limit, _write)

    def close(self) -> None:
        """Does nothing: there are no resources."""


def _let_others_in() -> None:
    """Lets processes of the same user access this one where Linux's yama restricts access to descendants.

    As MPI and UCX do; systems without yama allow it anyhow. If it is not allowed, another mover is used.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(_ANY), 0, 0, 0)


def _each(moves: Sequence[Move], limit: Limit, carry: Callable[[list[Move]], None]) -> None:
    """Executes all moves, large ones on two threads, since two processors copy faster than one."""
    units = list(_units(moves))
    remaining = iter(units)

    def work() -> None:
        for unit in remaining:
            limit.remaining()
            carry(unit)

    if len(units) > 1 and _processors() > 1:
        side_by_side((work, work))
    else:
        work()


def _units(moves: Sequence[Move]) -> Iterator[list[Move]]:
    """Groups moves for system calls: up to 256 moves and 16 MB, with larger ones divided."""
    unit: list[Move] = []
    room = _PIECE
    for move in moves:
        if unit and (len(unit) == _AT_ONCE or move.local.size > room):
            yield unit
            unit, room = [], _PIECE
        if move.local.size > _PIECE:
            for start in range(0, move.local.size, _PIECE):
                part = move.local.part(start, min(_PIECE, move.local.size - start))
                yield [Move(move.handle, move.offset + start, part)]
            continue
        unit.append(move)
        room -= move.local.size
    if unit:
        yield unit


def _read(moves: list[Move]) -> None:
    """Reads all marks, then all bytes, then all marks again, with a system call each."""
    if len(moves) == 1 and moves[0].local.size <= _SMALL:
        _read_small(moves[0])
        return
    marks = _marks(moves)
    _call(_readv, moves[0].handle, marks)
    _compare(moves)
    _call(_readv, moves[0].handle, _pieces(moves) + marks)
    _compare(moves)


def _read_small(move: Move) -> None:
    """Reads the mark, the bytes and the mark again, in this order; copies the bytes into place if both are right."""
    room, handle, size = _vectors, move.handle, move.local.size
    mark, again = (room.marks_address, handle.mark, MARK), (room.marks_address + MARK, handle.mark, MARK)
    _call(_readv, handle, [mark, (room.small_address, handle.address + move.offset, size), again])
    if ctypes.string_at(room.marks_address, 2 * MARK) != 2 * handle.secret:
        raise _dropped(handle)
    ctypes.memmove(move.local.address, room.small_address, size)


def _write(moves: list[Move]) -> None:
    with written(moves):
        _call(_writev, moves[0].handle, _pieces(moves))


def check_offered(moves: Sequence[Move]) -> None:
    """Raises BufferDroppedError unless all buffers are offered now, by their marks; OwnerLostError without an owner."""
    for start in range(0, len(moves), _AT_ONCE):
        some = moves[start : start + _AT_ONCE]
        _call(_readv, some[0].handle, _marks(some))
        _compare(some)


@contextlib.contextmanager
def written(moves: Sequence[Move]) -> Iterator[None]:
    """A block that writes to buffers, whose memory stays meanwhile.

    Raises PermissionError for a read-only buffer, BufferDroppedError for one that is no longer offered.
    """
    for move in moves:
        if for_reading_only(move.handle.secret):
            raise PermissionError(f"{move.handle} is read-only")
    with _staying(moves) as stays:
        check_offered(moves)
        if not stays:
            raise _dropped(moves[0].handle)
        yield


@contextlib.contextmanager
def _staying(moves: Sequence[Move]) -> Iterator[bool]:
    """A block during which the memory of buffers stays; yields False if a buffer is being released."""
    first = moves[0].handle
    with contextlib.ExitStack() as stack:
        try:
            guard = writing(first.identity.pid, first.guard, [move.handle.number for move in moves])
            stays = stack.enter_context(guard)
        except FileNotFoundError:
            raise owner_lost(first, f"process {first.identity.pid} has ended") from None
        except OSError as error:
            raise CannotReachError(f"the kernel lets nobody write to its memory ({error.strerror})") from None
        yield stays


def check_identity(handle: BufferHandle) -> None:
    """Raises CannotReachError unless the owner's memory can be read by the kernel's calls."""
    if _readv is None or _writev is None:
        raise CannotReachError("this system has no process_vm_readv")
    mine = own_identity()
    if not mine.same_machine(handle.identity):
        raise CannotReachError("it is on another machine")
    if not mine.same_namespace(handle.identity):
        raise CannotReachError("it is in another container (another namespace of process ids)")


def _check_host(moves: Sequence[Move]) -> None:
    if not is_of_host(moves):
        raise CannotReachError  # without a text: the mover of GPUs has the reason
    check_identity(moves[0].handle)


def _pieces(moves: list[Move]) -> list[_Piece]:
    return [(move.local.address, move.handle.address + move.offset, move.local.size) for move in moves]


def _marks(moves: Sequence[Move]) -> list[_Piece]:
    room = _vectors.marks_address
    return [(room + index * MARK, move.handle.mark, MARK) for index, move in enumerate(moves)]


def _compare(moves: Sequence[Move]) -> None:
    marks = ctypes.string_at(_vectors.marks_address, MARK * len(moves))
    for index, move in enumerate(moves):
        if marks[index * MARK : (index + 1) * MARK] != move.handle.secret:
            raise _dropped(move.handle)


@functools.cache
def _processors() -> int:
    return len(os.sched_getaffinity(0))


@functools.cache
def _form(number: int) -> struct.Struct:
    return struct.Struct(f"={2 * number}Q")


def _call(function: "Callable[..., int] | None", handle: BufferHandle, pieces: list[_Piece]) -> None:
    """Copies pieces in one system call."""
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
    assert function is not None
    count = function(handle.identity.pid, room.local_address, number, room.remote_address, number, 0)
    if count == total:
        return
    code = ctypes.get_errno() if count < 0 else errno.EFAULT
    if code == errno.ESRCH:
        raise owner_lost(handle, f"process {handle.identity.pid} has ended")
    if code == errno.EFAULT:  # memory that was given back to the system, after a drop
        raise _dropped(handle)
    if code in (errno.EPERM, errno.EACCES, errno.ENOSYS):
        raise CannotReachError(f"the kernel forbids reaching its memory ({os.strerror(code)}; yama, seccomp or user)")
    raise OSError(code, f"{handle} could not be moved: {os.strerror(code)}")


def _dropped(handle: BufferHandle) -> BufferDroppedError:
    return BufferDroppedError(f"{handle} was dropped, or its process has ended: nobody offers that memory any more")
