"""`RDMABuffer`: names memory of one process that others read and write without its help. `RDMAAction`: many of these
transfers as one."""

import functools
import operator
import threading
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from typing import Self, TypeVar

from monarch_nb.rdma import verbs
from monarch_nb.rdma.errors import BufferDroppedError, Limit, TransferCancelledError, side_by_side
from monarch_nb.rdma.fabric import verbs_available
from monarch_nb.rdma.memory import Memory, Ranges, memory_of
from monarch_nb.rdma.movers import Move
from monarch_nb.rdma.movers.messages import checked
from monarch_nb.rdma.service import ATOMIC_SIZE, RDMA, RdmaService
from monarch_nb.rdma.verbs import BufferHandle
from monarch_nb.runtime import (
    Future,
    cancel_with,
    current_runtime,
    fail_future,
    give_up,
    hand_out,
    pending_future,
    resolve_future,
    resolved_future,
)
from monarch_nb.wire import kind_of

_INLINE = 128 << 10  # bytes; a smaller copy ends before another thread would begin it
_INLINE_ON_DEVICE = 4 << 30  # bytes, between memory of one GPU: three milliseconds
_TIMEOUT_S = 60.0
T = TypeVar("T")
_Step = Callable[[RdmaService, Limit], None]


def service() -> RdmaService:
    """Returns the data plane of this process; makes the process a controller if it is in no cluster."""
    return current_runtime().feature(RDMA)


class RDMABuffer:
    """Memory of this process that any process of the cluster can read and write: send the buffer, not the bytes.

    `data` is a contiguous tensor, array, bytearray or memoryview of any shape with at least one byte; it is not copied,
    and is kept until `drop()` or the end of the actor that made the buffer. A tensor cannot be resized from then on.
    With `readonly` others only read it. The constructor sends nothing. Raises ValueError for memory with gaps, on
    another device or of no bytes.

    A transfer that ends with an error, a time-out or a cancellation has written only some of its bytes; each byte
    of the target is an old or a new one. A read during writes returns a mixture.
    """

    __slots__ = ("_handle",)
    _handle: BufferHandle

    def __init__(self, data: object, *, readonly: bool = False) -> None:
        memory = memory_of(data)
        if not memory.size:
            raise ValueError("an RDMABuffer has at least one byte; the data has none")
        memory.fix()
        runtime = current_runtime()
        self._handle = service().offer(memory, runtime.context().actor_instance, readonly=readonly or memory.readonly)

    @property
    def owner(self) -> str:
        """The actor that made the buffer."""
        return self._handle.owner

    @property
    def backend(self) -> str:
        """The mover between the buffer and this process, such as "cross-memory"; "" before the first transfer."""
        return service().routes.of(self._handle.process).mover

    @property
    def readonly(self) -> bool:
        """True if the buffer can only be read."""
        return self._handle.readonly

    @property
    def handle(self) -> BufferHandle:
        """Reference to the buffer for messages."""
        return self._handle

    def size(self) -> int:
        """Returns the size in bytes."""
        return self._handle.size

    def read_into(self, dst: object, *, offset: int = 0, timeout: float = _TIMEOUT_S) -> Future[None]:
        """Copies its bytes, from `offset` on, into `dst`: contiguous memory of this process, at least as large.

        Raises ValueError at once where `dst` does not fit. The future fails with BufferDroppedError, OwnerLostError or
        another RDMAError, and with TimeoutError after `timeout` seconds; the class describes what `dst` contains then.
        """
        target = memory_of(dst, writable=True, what="dst")
        size = self._handle.size - _offset(offset, self._handle)
        if target.size < size:
            raise ValueError(f"dst has {target.size:,} bytes, and must have at least the {size:,} of the buffer")
        return transfer([Move(self._handle, offset, target.part(0, size))], timeout, write=False)

    def write_from(self, src: object, *, offset: int = 0, timeout: float = _TIMEOUT_S) -> Future[None]:
        """Copies `src`, contiguous memory of this process, into the buffer from `offset` on.

        Raises ValueError at once where `src` has more bytes than the buffer has from there on, PermissionError where
        the buffer is read-only. The future fails as that of `read_into`.
        """
        source = memory_of(src, what="src")
        if self._handle.readonly:
            raise PermissionError(f"{self._handle} is read-only")
        room = self._handle.size - _offset(offset, self._handle)
        if source.size > room:
            raise ValueError(f"src has {source.size:,} bytes, and the buffer has room for {room:,}")
        return transfer([Move(self._handle, offset, source)], timeout, write=True)

    def drop(self) -> Future[None]:
        """Ends the offer, from any process: the memory is released and later transfers fail. Idempotent."""
        mine, handle = service(), self._handle
        if handle.process == mine.runtime.address:
            mine.withdraw(handle.number)
            return resolved_future(None)

        def work(limit: Limit) -> None:
            question = verbs.DropBuffer(handle.number, handle.secret)
            try:
                checked(handle, mine.ask(handle, verbs.DROP, question)(limit))
            except BufferDroppedError:
                pass

        return aside(work, Limit(_TIMEOUT_S, "dropping", handle))

    def __repr__(self) -> str:
        handle = self._handle
        only = ", read-only" if handle.readonly else ""
        return f"<RDMABuffer {handle.number} of {handle.owner}, {handle.size:,} bytes{only}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RDMABuffer) and self._handle == other._handle

    def __hash__(self) -> int:
        return hash((self._handle.process, self._handle.number))

    def __getstate__(self) -> BufferHandle:
        return self._handle

    def __setstate__(self, handle: BufferHandle) -> None:
        self._handle = handle


def _offset(offset: int, handle: BufferHandle) -> int:
    if not 0 <= operator.index(offset) < handle.size:
        raise ValueError(f"offset {offset:,} is outside of the buffer, which has {handle.size:,} bytes")
    return offset


def transfer(moves: Sequence[Move], timeout: float, *, write: bool) -> Future[None]:
    """Transfers bytes from or to buffers of one process; small transfers without another thread are done on return."""
    mine = service()
    first = moves[0].handle
    limit = Limit(timeout, "writing" if write else "reading", first)
    on_device = first.device is not None and all(None not in (move.handle.device, move.local.device) for move in moves)
    most = _INLINE_ON_DEVICE if on_device else _INLINE
    if sum(move.local.size for move in moves) <= most and mine.routes.quick(first.process, on_device=on_device):
        done: Future[None] = pending_future()
        try:
            mine.routes.transfer(moves, limit, write=write, quick=True)
        except Exception as error:
            hand_out(done)
            fail_future(done, error)
        else:
            resolve_future(done, None)
        return done
    return aside(lambda limit: mine.routes.transfer(moves, limit, write=write), limit)


def aside(work: Callable[[Limit], T], limit: Limit) -> Future[T]:
    """Runs work on a new thread; cancelling the future ends it at the next piece."""
    future: Future[T] = pending_future(describe=lambda: f"{limit.title} is under way")
    hand_out(future)

    def cancel(_: object) -> bool:
        limit.cancel()
        return give_up(future)

    cancel_with(future, cancel)

    def run() -> None:
        try:
            result = work(limit)
        except TransferCancelledError as error:
            fail_future(future, CancelledError(str(error)))
        except BaseException as error:
            fail_future(future, error)
        else:
            resolve_future(future, result)

    threading.Thread(target=run, name="monarch-rdma", daemon=True).start()
    return future


def is_ibverbs_available() -> bool:
    """Returns whether this process can use an RDMA device: it has access to one, and NIXL is installed."""
    return verbs_available()


def is_rdma_available() -> bool:
    """Always true, since RDMABuffer always works. Deprecated in torchmonarch, where it reports ibverbs."""
    warnings.warn(
        "is_rdma_available() is deprecated: RDMABuffer always works; get_rdma_backend() says how",
        DeprecationWarning,
        stacklevel=2,
    )
    return True


def get_rdma_backend() -> str:
    """ "ibverbs", "tcp" or "none", in torchmonarch's terms: "tcp" is every way that needs no verbs."""
    return "ibverbs" if verbs_available() else "tcp"


class RDMAAction:
    """Collects transfers for `submit()`, which merges those of one process.

    Transfers of different owners run concurrently, those of one owner in order. No two steps may use the same local
    bytes unless both only read them. Can be submitted any number of times.
    """

    def __init__(self) -> None:
        self._steps: list[tuple[str, str, Move | _Step]] = []  # process, kind, transfer
        self._filled = Ranges()  # local bytes that steps fill
        self._sources = Ranges()  # local bytes that steps read

    def read_remote(self, dst: object, buf: RDMABuffer) -> Self:
        """Adds a read of all of a buffer into `dst`. Raises ValueError where that does not fit."""
        target = memory_of(dst, writable=True, what="dst")
        _check_buffer(buf)
        if target.size < buf.size():
            raise ValueError(f"dst has {target.size:,} bytes, and must have at least the {buf.size():,} of the buffer")
        return self._add("read", Move(buf.handle, 0, target.part(0, buf.size())), fills=True)

    def write_remote(self, buf: RDMABuffer, src: object) -> Self:
        """Adds a write of `src` into the beginning of a buffer. Raises ValueError, PermissionError as `write_from`."""
        source = memory_of(src, what="src")
        _check_buffer(buf)
        if buf.readonly:
            raise PermissionError(f"{buf!r} is read-only")
        if source.size > buf.size():
            raise ValueError(f"src has {source.size:,} bytes, and the buffer has room for {buf.size():,}")
        return self._add("write", Move(buf.handle, 0, source), fills=False)

    def read_into(self, src: RDMABuffer, dst: object) -> Self:
        """As `read_remote`, with its older name and argument order."""
        return self.read_remote(dst, src)

    def write_from(self, src: RDMABuffer, dst: object) -> Self:
        """As `write_remote`, with its older name: `src` is the buffer, `dst` the local memory."""
        return self.write_remote(src, dst)

    def fetch_add(self, src: RDMABuffer, dst: object, add: int) -> Self:
        """Adds a step that atomically adds to the first 8 bytes of a buffer and puts their previous value into `dst`.

        They are a signed little-endian number that wraps around. It is atomic towards the other atomic steps on buffers
        of that process, not towards plain reads and writes.
        """
        return self._add_atomic(src, dst, add, None)

    def compare_and_swap(self, src: RDMABuffer, dst: object, compare: int, swap: int) -> Self:
        """Adds a step that sets the first 8 bytes of a buffer to `swap` if they are `compare`; `dst` as `fetch_add`."""
        return self._add_atomic(src, dst, swap, compare)

    def submit(self, timeout: float = _TIMEOUT_S) -> Future[None]:
        """Begins all steps. The future resolves when all are done, and fails with the first error of any."""
        mine = service()
        by_process: dict[str, list[tuple[str, Move | _Step]]] = {}
        for process, kind, step in self._steps:
            by_process.setdefault(process, []).append((kind, step))
        limit = Limit(timeout, f"{len(self._steps):,} transfers")

        def work(limit: Limit) -> None:
            side_by_side([functools.partial(_carry_out, mine, steps, limit) for steps in by_process.values()])

        return aside(work, limit) if by_process else resolved_future(None)

    def _add_atomic(self, buffer: RDMABuffer, dst: object, operand: int, expected: int | None) -> Self:
        target = memory_of(dst, writable=True, what="dst")
        _check_buffer(buffer)
        if buffer.readonly:
            raise PermissionError(f"{buffer!r} is read-only")
        if buffer.size() < ATOMIC_SIZE or target.size < ATOMIC_SIZE:
            raise ValueError(
                f"an atomic step takes {ATOMIC_SIZE} bytes: the buffer has {buffer.size():,}, dst {target.size:,}"
            )
        handle = buffer.handle

        def step(mine: RdmaService, limit: Limit) -> None:
            question = verbs.Atomic(handle.number, handle.secret, 0, operand, expected)
            outcome = checked(handle, mine.ask(handle, verbs.ATOMIC, question)(limit))
            target.part(0, ATOMIC_SIZE).write(outcome.data)

        self._reserve(target.part(0, ATOMIC_SIZE), fills=True)
        self._steps.append((handle.process, "atomic", step))
        return self

    def _add(self, kind: str, move: Move, *, fills: bool) -> Self:
        self._reserve(move.local, fills=fills)
        self._steps.append((move.handle.process, kind, move))
        return self

    def _reserve(self, memory: Memory, *, fills: bool) -> None:
        if self._filled.hits(memory) or (fills and self._sources.hits(memory)):
            raise ValueError(
                "two steps of one RDMAAction use the same local bytes, and one of them fills these: use two actions, "
                "one after the other"
            )
        (self._filled if fills else self._sources).add(memory)


def _check_buffer(buffer: object) -> None:
    if not isinstance(buffer, RDMABuffer):
        raise TypeError(f"a step of an RDMAAction takes an RDMABuffer, not {kind_of(buffer)}")


def _carry_out(mine: RdmaService, steps: "list[tuple[str, Move | _Step]]", limit: Limit) -> None:
    """Passes consecutive reads, or writes, to the mover together."""
    moves: list[Move] = []
    current = ""

    def flush() -> None:
        if moves:
            mine.routes.transfer(moves, limit, write=current == "write")
            moves.clear()

    for kind, step in steps:
        if kind != current:
            flush()
            current = kind
        if isinstance(step, Move):
            moves.append(step)
        else:
            step(mine, limit)
    flush()
