"""`RDMAAction`: many reads and writes as one."""

import functools
from collections.abc import Callable
from typing import Self

from monarch_nb.rdma import verbs
from monarch_nb.rdma.buffer import RDMABuffer, aside, service
from monarch_nb.rdma.limits import Limit, side_by_side
from monarch_nb.rdma.memory import Memory, Ranges, memory_of
from monarch_nb.rdma.movers import Move
from monarch_nb.rdma.movers.messages import checked
from monarch_nb.rdma.service import ATOMIC_SIZE, RdmaService
from monarch_nb.runtime import Future, resolved_future

_TIMEOUT_S = 60.0
_Step = Callable[[RdmaService, Limit], None]


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
        if target.size < buf.size():
            raise ValueError(f"dst has {target.size:,} bytes, and must have at least the {buf.size():,} of the buffer")
        return self._add("read", Move(buf.handle, 0, target.part(0, buf.size())), fills=True)

    def write_remote(self, buf: RDMABuffer, src: object) -> Self:
        """Adds a write of `src` into the beginning of a buffer. Raises ValueError, PermissionError as `write_from`."""
        source = memory_of(src, what="src")
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
