"""Streams of a program: the active one of a thread, and memory that one borrows from another."""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal

from monarch_nb.tensor.errors import CallSite, RankTensorError, origin_of

if TYPE_CHECKING:
    from monarch_nb.tensor.ranks.streams import Stream
    from monarch_nb.tensor.references import Reference
    from monarch_nb.tensor.stream import Stream as CommandStream


class _Active(threading.local):
    """The stream that this thread has activated; None for the main one. `has_mesh`: it has also activated a mesh.

    `coalesced` are the command streams whose commands are sent at the end of a block of this thread.
    """

    stream: "Stream | None" = None
    has_mesh = False
    coalesced: "set[CommandStream] | None" = None


ACTIVE = _Active()


@contextlib.contextmanager
def coalescing() -> Iterator[None]:
    """Sends operations issued in a `with` block at its end, in one message. Values cannot be fetched meanwhile.

    Commands that do not fit, such as a large tensor of the program, are sent earlier.
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


class MemoryLoans:
    """Loans of the memory of a stream's tensor, and the uses that they forbid.

    `borrow`: the stream has borrowed it to "read" or "write", or the borrow has "ended". `lent` are the borrows of
    other streams, by number, and whether they write; each with its call site.
    """

    __slots__ = ("borrow", "lent")

    def __init__(self, borrow: "tuple[Literal['read', 'write', 'ended'], CallSite | None] | None" = None) -> None:
        self.borrow = borrow
        self.lent: dict[int, tuple[bool, CallSite | None]] = {}

    def refusal(self, *, writes: bool) -> tuple[str, CallSite | None]:
        """Returns the error code of a forbidden use, and the call site of the borrow; "" for an allowed use."""
        use, site = self.borrow or ("", None)
        if use == "ended":
            return "DROPPED", site
        for mutable, loan_site in self.lent.values():
            if mutable or writes:
                return "BORROWED" if mutable else "MUTATING_BORROW", loan_site
        return ("MUTATING_BORROW" if writes and use == "read" else ""), site


_REASONS = {
    "BORROWED": "another stream has borrowed it, and may write to it: drop the borrow first",
    "MUTATING_BORROW": "it is borrowed for reading, and would be mutated: drop the borrow first",
    "DROPPED": "its borrow was dropped",
}


def check_lane(
    stream: "CommandStream", operation: str, references: "Sequence[Reference | None]", writes: Sequence[int]
) -> None:
    """Raises RankTensorError for tensors of another stream than the active one, and for uses that a borrow forbids."""
    if stream.lane is not ACTIVE.stream:
        raise RankTensorError(
            "WRONG_STREAM",
            f"{operation}: the tensor is on stream {lane_name(stream.lane)!r}, and {lane_name(ACTIVE.stream)!r} is "
            "active. Use `with stream.activate():`, or stream.borrow(tensor)",
        )
    check_loans(stream, operation, references, writes)


def check_loans(
    stream: "CommandStream",
    operation: str,
    references: "Sequence[Reference | None]",
    writes: Sequence[int],
    *,
    of_sharded: bool = False,
) -> None:
    """Raises RankTensorError for uses that a borrow forbids; `writes` are the indices of written tensors.

    Raises RuntimeError for sharded tensors, whose operators would hide a TypeError.
    """
    for index, reference in enumerate(references if stream.held.has_lent else ()):
        loans = None if reference is None or reference.memory is None else reference.memory.loans
        code, site = ("", None) if loans is None else loans.refusal(writes=index in writes)
        if code:
            error = RankTensorError(code, f"{operation}: {_REASONS[code]}. It was borrowed at {origin_of(site)}")
            raise RuntimeError(str(error)) if of_sharded else error


def check_fetching() -> None:
    """Raises NotImplementedError inside of `coalescing`, where the operations that make a value are not sent yet."""
    if ACTIVE.coalesced is not None:
        raise NotImplementedError(
            "values cannot be fetched inside `with monarch.coalescing():`, which sends all at its end"
        )


def lane_name(stream: "Stream | None") -> str:
    """Returns the name of a stream."""
    return "main" if stream is None else stream.name
