"""Cancelled calls: dropped on the ranks that have not answered, or ended there where that can be done."""

import asyncio
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

from monarch_nb.runtime.meshes import ActorState
from monarch_nb.runtime.verbs import CANCEL, Cancel
from monarch_nb.wire import Asker

if TYPE_CHECKING:
    from monarch_nb.runtime.process import Runtime

REMEMBERED = 4096  # cancelled calls whose messages may still be waiting, or on their way
OWN_THREAD = 256  # ranks from which on a separate thread sends to them


class CancelledCalls:
    """The ids of the latest cancelled calls."""

    def __init__(self) -> None:
        self._calls: OrderedDict[str, None] = OrderedDict()

    def __contains__(self, call: str) -> bool:
        return call in self._calls

    def add(self, call: str) -> None:
        """Keeps a call that has not begun here from beginning; its message may still arrive, by another route."""
        self._calls[call] = None
        while len(self._calls) > REMEMBERED:
            self._calls.popitem(last=False)


def not_run() -> asyncio.CancelledError:
    """Returns the answer to a message that is never run, so that agents stop waiting for its answer."""
    return asyncio.CancelledError("the call was cancelled before it ran")


class Cancellation:
    """Requests that other processes cancel calls of this one, and executes such requests of others.

    Calls that an endpoint itself waits for are cancelled with it, and so on: an `async def` is cancelled, a `def` sees
    the call that it waits for end with a CancelledError.
    """

    def __init__(self, runtime: "Runtime") -> None:
        self._runtime = runtime

    def send(self, call: str, mesh: str, ranks: list[int]) -> None:
        """Sends a request to each of `ranks` once, without retries: dead ones have nothing to cancel. Never blocks."""
        runtime = self._runtime
        state = runtime.meshes.get(mesh)
        if not isinstance(state, ActorState):
            return
        procs = state.procs

        def send() -> None:
            for rank in ranks:
                try:
                    runtime.post(procs.address(rank), CANCEL, Cancel(call, mesh, rank))
                except Exception:  # ended, or unreachable: its supervision handles that
                    continue

        if len(ranks) < OWN_THREAD:
            send()
        else:
            threading.Thread(target=send, name="monarch-cancel", daemon=True).start()

    def arrive(self, cancel: Cancel, asker: Asker[None]) -> None:
        """Cancels a call to an actor of this process (reading thread)."""
        runtime = self._runtime
        runtime.cancelled.add(cancel.call)
        cell = runtime.cells.get((cancel.mesh, cancel.rank))
        if cell is None:
            return

        def cancel_nested() -> None:
            for nested in tuple(runtime.calls.values()):
                made_by = nested.caller
                if made_by.call == cancel.call and made_by.actor_instance.cell is cell:
                    nested.cancel()

        cell.cancel(cancel.call, cancel_nested)
