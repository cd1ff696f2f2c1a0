"""Cancelled calls: told to the ranks that have not answered, and there dropped, or ended where that can be done."""

import asyncio
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import msgspec

from monarch_nb.wire import Header

if TYPE_CHECKING:
    from monarch_nb.runtime.calls import PendingCall
    from monarch_nb.runtime.process import Runtime
    from monarch_nb.transport import Parcel

CANCEL = "call.cancel"
REMEMBERED = 4096  # cancelled calls whose messages may still be waiting, or on their way
ASIDE = 256  # ranks from which on a thread of its own tells them


class Cancel(msgspec.Struct, array_like=True, frozen=True):
    """One rank is not to answer a call any more."""

    call: str
    mesh: str
    rank: int


class Cancels:
    """Sends the word that a call is cancelled, and remembers those that have come.

    What an endpoint itself waits for is cancelled with it, and so on: an `async def` is cancelled, a `def` sees the
    call that it waits for end with a CancelledError.
    """

    def __init__(self, runtime: "Runtime") -> None:
        self._runtime = runtime
        self._cancelled: OrderedDict[str, None] = OrderedDict()
        runtime.controls[CANCEL] = self._arrive

    def __contains__(self, call: str) -> bool:
        return call in self._cancelled

    def send(self, call: "PendingCall", ranks: list[int]) -> None:
        """Tells `ranks`, each once and without a promise: who is gone has nothing to cancel. Does not block."""
        procs: Any = getattr(self._runtime.meshes.get(call.mesh), "procs", None)
        if procs is None or self._runtime.closed:
            return

        def tell() -> None:
            for rank in ranks:
                try:
                    self._runtime.control(procs.address(rank), CANCEL, Cancel(call.call, call.mesh, rank))
                except Exception:  # gone, or not to be reached: its supervision knows
                    continue

        if len(ranks) < ASIDE:
            tell()
        else:
            threading.Thread(target=tell, name="monarch-cancel", daemon=True).start()

    def drop(self, call: str) -> None:
        """A call that has not begun here never will; its message may yet come, as control goes a way of its own."""
        self._cancelled[call] = None
        while len(self._cancelled) > REMEMBERED:
            self._cancelled.popitem(last=False)

    def _arrive(self, header: Header, parcel: "Parcel") -> None:
        word = msgspec.msgpack.decode(parcel.frames[0], type=Cancel)
        self.drop(word.call)
        cell = self._runtime.cells.get((word.mesh, word.rank))
        if cell is None:
            return

        def cancel_nested() -> None:
            for nested in tuple(self._runtime.calls.values()):
                made_by = nested.caller
                if made_by.call == word.call and made_by.actor_instance.cell is cell:
                    nested.cancel()

        cell.cancel(word.call, cancel_nested)


def dropped() -> asyncio.CancelledError:
    """What a message that is never run is answered with, so that agents stop waiting for its answer."""
    return asyncio.CancelledError("the call was cancelled before it ran")
