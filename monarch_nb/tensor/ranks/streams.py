"""Streams of operations on values of ranks' own, and tensors that one of them borrows from another."""

import contextlib
import threading
import warnings
import weakref
from collections.abc import Iterator
from itertools import count
from types import TracebackType
from typing import TYPE_CHECKING, Self, cast

from monarch_nb.runtime import unretrieved
from monarch_nb.tensor.commands import Await, GiveBack, Send, Take
from monarch_nb.tensor.errors import CallSite, RankTensorError, call_site, origin_of
from monarch_nb.tensor.handle import MeshTensor, current
from monarch_nb.tensor.lanes import ACTIVE, MemoryLoans, check_lane
from monarch_nb.tensor.propagation import Meta, own_values
from monarch_nb.tensor.references import DroppedReference, LogicalMemory
from monarch_nb.wire import kind_of

if TYPE_CHECKING:
    from monarch_nb.shape import Region
    from monarch_nb.tensor.mesh import Mesh
    from monarch_nb.tensor.ranks.tensor import RankTensor
    from monarch_nb.tensor.stream import Stream as CommandStream

_tags = count(-1, -1)  # tags of tensors that move count up
_numbers = count()
_open: "weakref.WeakValueDictionary[int, Borrow]" = weakref.WeakValueDictionary()  # by tag


class Stream:
    """A sequence of operations: tensors that are made while it is active belong to it.

    Ranks execute each stream on a thread of its own. Commands of several streams are executed at the same time, except
    exchanges between ranks, which are done one after the other, in the order in which they were sent.
    """

    def __init__(self, name: str) -> None:
        self.name, self.number = name, next(_numbers)  # 0 for the main one
        self.meshes: dict[tuple[str, Region], Mesh] = {}  # by proc mesh and part of it

    @contextlib.contextmanager
    def activate(self) -> Iterator[Self]:
        """Makes it the active stream of this thread in a `with` block."""
        with on_lane(_lane(self)):
            yield self

    def borrow(self, t: "RankTensor", mutable: bool = False) -> "tuple[RankTensor, Borrow]":
        """Returns a tensor of this stream with the same memory, and the borrow, which must be dropped.

        Until then both streams may read it; with `mutable` only this one may use it. Does not block. Raises
        RankTensorError where another borrow forbids it.
        """
        if not isinstance(t, MeshTensor) or not t.meta.is_own:
            raise RankTensorError("LOCAL_TENSOR", f"borrow: {kind_of(t)} is no tensor of the ranks' own values")
        reference, site = t.reference, call_site()
        source, borrower = reference.stream, t.mesh.on(self).stream
        if borrower is source:
            raise RankTensorError("WRONG_STREAM", f"borrow: the tensor is on stream {self.name!r} already")
        with on_lane(source.lane):
            check_lane(source, "borrow", (reference,), (0,) if mutable else ())
        if reference.memory is None:
            reference.memory = LogicalMemory()
        memory, tag, members = reference.memory, next(_tags), t.mesh.members
        source.issue_object(Send(current(t), tuple((member,) for member in members), tag, lends=True))
        source.flush()
        operations = source.sent()
        meta = Meta.of(borrower.layout, t.meta.shape, t.meta.dtype, own_values(borrower.layout), stride=t.meta.stride)
        alias = borrower.hold(meta, site)
        alias.memory = LogicalMemory()
        borrower.issue_object(Await(source.number, operations))
        borrower.issue_object(Take(meta, members, tag, alias.number, lends=True))
        memory.loans = memory.loans or MemoryLoans()
        memory.loans.lent[tag] = mutable, site
        alias.memory.loans = MemoryLoans(("write" if mutable else "read", site))
        source.held.has_lent = borrower.held.has_lent = True
        tensor = cast("RankTensor", MeshTensor(meta, alias))
        return tensor, Borrow(tensor, source, memory, site, tag)

    def __repr__(self) -> str:
        return f"<stream {self.name!r}>"


MAIN = Stream("main")


def _lane(stream: Stream) -> Stream | None:
    return None if stream is MAIN else stream


@contextlib.contextmanager
def on_lane(lane: Stream | None) -> Iterator[None]:
    """Makes a stream the active one of this thread in a `with` block; None for the main one."""
    before, ACTIVE.stream = ACTIVE.stream, lane
    try:
        yield
    finally:
        ACTIVE.stream = before


def get_active_stream() -> Stream:
    """Returns the stream that this thread has activated; the main one without."""
    return ACTIVE.stream or MAIN


class Borrow:
    """A tensor that a stream has borrowed; `drop()`, or the end of a `with` block, gives it back."""

    def __init__(
        self, tensor: "RankTensor", lender: "CommandStream", memory: LogicalMemory, site: CallSite | None, tag: int
    ) -> None:
        self._tensor, self._memory, self._own_memory = tensor, memory, tensor.reference.memory
        self._borrower, self._lender = tensor.reference.stream, lender
        self._site, self._tag = site, tag
        self._dropped, self._thread = False, threading.get_ident()
        _open[tag] = self

    def drop(self) -> None:
        """Gives the memory back: the borrowed tensor cannot be used any more. Does not wait for the ranks.

        Borrows that other streams have made of the borrowed tensor end with it.
        """
        if self._dropped:
            return
        self._dropped = True
        assert self._own_memory is not None
        loans = self._own_memory.loans
        assert loans is not None
        for tag in tuple(loans.lent):
            if (borrow := _open.get(tag)) is not None:
                borrow.drop()
        loans.borrow = "ended", call_site()
        if self._memory.loans is not None:
            self._memory.loans.lent.pop(self._tag, None)
        try:
            if self._borrower.lost is None:
                self._borrower.issue_object(GiveBack(self._tag))
                self._borrower.flush()  # before the lender uses the memory
            if self._borrower.lost is None and self._lender.lost is None:
                self._lender.issue_object(Await(self._borrower.number, self._borrower.sent()))
        finally:
            self._tensor.reference = DroppedReference(self._borrower, call_site())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.drop()

    def __del__(self) -> None:
        if not self._dropped:
            warnings.warn(
                f"a borrow was not dropped, and is now: borrow.drop(), or `with borrow:`. It was made at "
                f"{origin_of(self._site)}",
                UserWarning,
                stacklevel=2,
            )
            if threading.get_ident() == self._thread:
                self._drop_late()
            else:  # a collection of garbage, maybe on a thread that the streams wait for
                unretrieved.forget(self._drop_late)

    def _drop_late(self) -> None:
        with contextlib.suppress(Exception):  # the mesh may have ended
            self.drop()
