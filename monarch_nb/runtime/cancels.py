"""Cancelled calls: told to the ranks that have not answered, and there dropped, or ended where that can be done."""

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

from monarch_nb.runtime.actors.cell import ActorCell
from monarch_nb.runtime.actors.roles import Messenger
from monarch_nb.runtime.cancelled import CancelledCalls
from monarch_nb.runtime.meshes import ActorState, MeshState
from monarch_nb.runtime.verbs import CANCEL, Cancel
from monarch_nb.wire import Asker

if TYPE_CHECKING:
    from monarch_nb.runtime.calls import PendingCall

ASIDE = 256  # ranks from which on a thread of its own tells them


class Cancels:
    """Tells others that a call of this process is cancelled, and cancels here what others have cancelled.

    What an endpoint itself waits for is cancelled with it, and so on: an `async def` is cancelled, a `def` sees the
    call that it waits for end with a CancelledError.
    """

    def __init__(
        self,
        messenger: Messenger,
        cancelled: CancelledCalls,
        *,
        meshes: Mapping[str, MeshState],
        cells: Mapping[tuple[str, int], ActorCell],
        calls: "Mapping[str, PendingCall]",
    ) -> None:
        self._messenger = messenger
        self._cancelled = cancelled
        self._meshes, self._cells, self._calls = meshes, cells, calls

    def send(self, call: str, mesh: str, ranks: list[int]) -> None:
        """Tells `ranks`, each once and without a promise: who is gone has nothing to cancel. Does not block."""
        state = self._meshes.get(mesh)
        if not isinstance(state, ActorState):
            return
        procs = state.procs

        def tell() -> None:
            for rank in ranks:
                try:
                    self._messenger.tell(procs.address(rank), CANCEL, Cancel(call, mesh, rank))
                except Exception:  # gone, or not to be reached: its supervision knows
                    continue

        if len(ranks) < ASIDE:
            tell()
        else:
            threading.Thread(target=tell, name="monarch-cancel", daemon=True).start()

    def arrive(self, cancel: Cancel, asker: Asker[None]) -> None:
        """Somebody has cancelled a call to an actor of this process (reading thread)."""
        self._cancelled.add(cancel.call)
        cell = self._cells.get((cancel.mesh, cancel.rank))
        if cell is None:
            return

        def cancel_nested() -> None:
            for nested in tuple(self._calls.values()):
                made_by = nested.caller
                if made_by.call == cancel.call and made_by.actor_instance.cell is cell:
                    nested.cancel()

        cell.cancel(cancel.call, cancel_nested)
