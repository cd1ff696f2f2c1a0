"""The last resort: bytes in runtime messages, which work wherever calls work and are encrypted like them."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import msgspec

from monarch_nb.rdma.errors import BufferDroppedError, Limit, RDMAError, owner_lost
from monarch_nb.rdma.movers import Move
from monarch_nb.rdma.verbs import READ, WRITE, BufferHandle, ReadRequest, TransferOutcome, WriteRequest
from monarch_nb.wire import Verb

_PIECE = 1 << 20  # bytes in one message
_UNDER_WAY = 4  # pieces in flight

Q = TypeVar("Q", bound=msgspec.Struct)


class AskOwner(Protocol):
    """Sends a request to the owner of a buffer; the returned function waits for the reply."""

    def __call__(
        self, handle: BufferHandle, verb: Verb[Q, TransferOutcome], question: Q
    ) -> Callable[[Limit], TransferOutcome]:
        """Does not block."""


class Messages:
    """Moves bytes of every process that calls reach."""

    alone = False

    def __init__(self, ask: AskOwner) -> None:
        self._ask = ask

    def read(self, moves: Sequence[Move], limit: Limit) -> None:
        """Requests bytes from the owner, a few pieces ahead."""
        waiting: deque[tuple[BufferHandle, memoryview, Callable[[Limit], TransferOutcome]]] = deque()

        def settle() -> None:
            handle, target, wait = waiting.popleft()
            data = checked(handle, wait(limit)).data
            if len(data) != len(target):
                raise RDMAError(f"{handle} answered with {len(data):,} bytes in place of {len(target):,}")
            target[:] = data

        for move in moves:
            view, handle = move.local.view(), move.handle
            for start in range(0, move.local.size, _PIECE):
                target = view[start : start + _PIECE]
                limit.remaining()
                question = ReadRequest(handle.number, handle.secret, move.offset + start, len(target))
                waiting.append((handle, target, self._ask(handle, READ, question)))
                if len(waiting) >= _UNDER_WAY:
                    settle()
        while waiting:
            settle()

    def write(self, moves: Sequence[Move], limit: Limit) -> None:
        """Sends bytes to the owner, a few pieces ahead."""
        waiting: deque[tuple[BufferHandle, Callable[[Limit], TransferOutcome]]] = deque()
        for move in moves:
            view, handle = move.local.view(), move.handle
            for start in range(0, move.local.size, _PIECE):
                limit.remaining()
                data = bytes(view[start : start + _PIECE])
                message = WriteRequest(handle.number, handle.secret, move.offset + start, data)
                waiting.append((handle, self._ask(handle, WRITE, message)))
                if len(waiting) >= _UNDER_WAY:
                    checked(*_answer(waiting, limit))
        while waiting:
            checked(*_answer(waiting, limit))

    def close(self) -> None:
        """Does nothing: there are no resources."""


def _answer(
    waiting: "deque[tuple[BufferHandle, Callable[[Limit], TransferOutcome]]]", limit: Limit
) -> tuple[BufferHandle, TransferOutcome]:
    handle, wait = waiting.popleft()
    return handle, wait(limit)


def checked(handle: BufferHandle, outcome: TransferOutcome) -> TransferOutcome:
    """Returns an outcome that is "done"; raises the error of any other."""
    if outcome.how == "done":
        return outcome
    if outcome.how == "dropped":
        raise BufferDroppedError(f"{handle} was dropped; its owner offers it no longer ({outcome.text})")
    if outcome.how == "lost":
        raise owner_lost(handle, outcome.text)
    raise RDMAError(f"{handle}: {outcome.text}")
