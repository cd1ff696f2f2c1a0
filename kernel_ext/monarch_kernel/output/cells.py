"""Which cell of the notebook a call belongs to: calls are numbered, and each cell knows the first one of its own."""

import bisect
from typing import Any

from monarch_nb.logs import mesh_of
from monarch_nb.mesh.mesh_events import Event, MeshEvents, MeshSpawned, MeshStopped
from monarch_nb.runtime import ProcState

from ..front import Front

KEPT = 2000  # cells


class Cells:
    """Finds the cell that output belongs to. Cells begin on the kernel's thread; `of` is for any."""

    def __init__(self, front: Front, engine: Any) -> None:
        self._front = front
        self._engine = engine
        self._prefix = f"{engine.address}:"
        self._begun: tuple[list[int], list[Any]] = (
            [0],
            [front.parent],
        )  # first calls, and cells; replaced, not changed
        self._homes: dict[str, Any] = {}  # cells in which meshes were spawned
        front.beginning.append(self._begin)
        engine.part(MeshEvents).listeners.append(self._happened)

    def close(self) -> None:
        """Look no longer."""
        if self._begin in self._front.beginning:
            self._front.beginning.remove(self._begin)
        if self._happened in self._engine.part(MeshEvents).listeners:
            self._engine.part(MeshEvents).listeners.remove(self._happened)

    def _begin(self) -> None:
        first = int(self._engine.new_call().removeprefix(self._prefix))
        firsts, cells = self._begun
        self._begun = [*firsts[-KEPT:], first], [*cells[-KEPT:], self._front.parent]

    def _happened(self, event: Event) -> None:
        match event:
            case MeshSpawned(ProcState(uid=uid)):
                self._homes[uid] = self._front.parent
            case MeshStopped(ProcState(uid=uid)):
                self._homes.pop(uid, None)
            case _:
                return

    def of(self, address: str, call: str) -> Any:
        """The cell that lines of a process and a call belong to; None for none: then only the logs have them."""
        if not self._front.has_displays:
            return self._front.parent
        number = call.removeprefix(self._prefix)
        if number != call and number.isdecimal():
            firsts, cells = self._begun
            return cells[max(0, bisect.bisect_right(firsts, int(number)) - 1)]
        state = self._engine.meshes.get(mesh_of(address))
        if state is None or state.stopped is not None:  # its last words
            return self._front.parent
        born = getattr(state.born, "initialized", None)
        if born is not None and not born.done():  # before there was any call
            return self._homes.get(state.uid)
        return None
