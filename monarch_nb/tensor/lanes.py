"""Streams of a program: which of them is active in a thread, and what memory one has borrowed from another."""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from monarch_nb.tensor.errors import RankTensorError
from monarch_nb.tensor.origin import CallSite, origin_of

if TYPE_CHECKING:
    from monarch_nb.tensor.ranks.streams import Stream
    from monarch_nb.tensor.references import Reference
    from monarch_nb.tensor.stream import Stream as CommandStream

READ, WRITTEN, ENDED = "read", "written", "ended"  # by the borrower; or the borrow has ended


class _Active(threading.local):
    """The stream that this thread has activated; None for the main one.

    `coalesced` are the command streams to which a block of this thread has issued what is sent at its end.
    """

    stream: "Stream | None" = None
    coalesced: "set[CommandStream] | None" = None


ACTIVE = _Active()


@contextlib.contextmanager
def coalescing() -> Iterator[None]:
    """Sends what this thread issues in a `with` block at its end, in one message. Values cannot be fetched meanwhile.

    What does not fit into one, such as a large tensor of the program, goes out before.
    """
    if ACTIVE.coalesced is not None:
        yield
        return
    streams: set[CommandStream] = set()
    ACTIVE.coalesced = streams
    try:
        yield
    finally:
        ACTIVE.coalesced = None
        for stream in streams:
            stream.coalesces = False
        for stream in streams:
            stream.flush()


class TensorLoan:
    """A borrow as one of its two streams sees it: what may not be done to the memory there."""

    __slots__ = ("is_lender", "kind", "where")

    def __init__(self, kind: str, where: CallSite | None, *, is_lender: bool) -> None:
        self.kind, self.where, self.is_lender = kind, where, is_lender

    def refused(self, *, writes: bool) -> str:
        """The code of the error for a use; "" where it is allowed."""
        if self.kind == ENDED:
            return "DROPPED"
        if self.kind == WRITTEN:
            return "BORROWED" if self.is_lender else ""
        return "MUTATING_BORROW" if writes else ""


_WHY = {
    "BORROWED": "another stream has borrowed it, and may write to it: drop the borrow first",
    "MUTATING_BORROW": "it is borrowed, and may only be read: drop the borrow first",
    "DROPPED": "its borrow was dropped",
}


def check_lane(
    stream: "CommandStream", operation: str, references: "Sequence[Reference]", writes: Sequence[int]
) -> None:
    """Raises RankTensorError for tensors of another stream than the active one, and for uses that a borrow forbids."""
    if stream.lane is not ACTIVE.stream:
        raise RankTensorError(
            "WRONG_STREAM",
            f"{operation}: the tensor is on stream {lane_name(stream.lane)!r}, and {lane_name(ACTIVE.stream)!r} is "
            "active. Use `with stream.activate():`, or stream.borrow(tensor)",
        )
    for at, reference in enumerate(references if stream.held.loans else ()):
        loan = None if reference.memory is None else stream.held.loans.get(reference.memory)
        code = "" if loan is None else loan.refused(writes=at in writes)
        if code and loan is not None:
            raise RankTensorError(code, f"{operation}: {_WHY[code]}. It was borrowed at {origin_of(loan.where)}")


def check_fetching() -> None:
    """Raises NotImplementedError inside of `coalescing`, where what a value depends on is not sent yet."""
    if ACTIVE.coalesced is not None:
        raise NotImplementedError(
            "values cannot be fetched inside `with monarch.coalescing():`, which sends all at its end"
        )


def lane_name(stream: "Stream | None") -> str:
    """The name of a stream."""
    return "main" if stream is None else stream.name
