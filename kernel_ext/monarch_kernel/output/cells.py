"""Maps output to cells of the notebook: calls are numbered, and each cell stores the number of its first call."""

import bisect
from typing import Any

from monarch_nb.logs import mesh_of
from monarch_nb.mesh.mesh_events import Event, MeshEvents, MeshSpawned, MeshStopped
from monarch_nb.runtime import ProcState, Runtime

from ..front import Front

MOST_CELLS = 2000  # cells


class CallCells:
    """Maps numbers of calls to cells. One thread begins cells; any thread may ask."""

    def __init__(self, cell: Any) -> None:
        self._starts: tuple[list[int], list[object]] = ([0], [cell])  # first calls, and cells; replaced, not changed

    def begin(self, call: int, cell: object) -> None:
        """Starts a cell: this call and later ones belong to it."""
        calls, cells = self._starts
        self._starts = [*calls[1 - MOST_CELLS :], call], [*cells[1 - MOST_CELLS :], cell]

    def of(self, call: int) -> object:
        """Returns the cell of a call; the oldest stored cell for earlier calls."""
        calls, cells = self._starts
        return cells[max(0, bisect.bisect_right(calls, call) - 1)]


class Cells:
    """Maps output to cells. Cells begin on the kernel's thread; `of` is for any thread."""

    def __init__(self, front: Front, runtime: Runtime) -> None:
        self._front = front
        self._runtime = runtime
        self._events = runtime.part(MeshEvents)
        self._prefix = f"{runtime.address}:"
        self._calls = CallCells(front.parent)
        self._spawned: dict[str, object] = {}  # by mesh: the cell in which it was spawned
        front.beginning.append(self._begin)
        self._events.listeners.append(self._on_event)

    def close(self) -> None:
        """Stops listening."""
        if self._begin in self._front.beginning:
            self._front.beginning.remove(self._begin)
        if self._on_event in self._events.listeners:
            self._events.listeners.remove(self._on_event)

    def _begin(self) -> None:
        self._calls.begin(int(self._runtime.new_call().removeprefix(self._prefix)), self._front.parent)

    def _on_event(self, event: Event) -> None:
        match event:
            case MeshSpawned(ProcState(uid=uid)):
                self._spawned[uid] = self._front.parent
            case MeshStopped(ProcState(uid=uid)):
                self._spawned.pop(uid, None)
            case _:
                return

    def of(self, address: str, call: str) -> object:
        """Returns the cell of the lines of a process and a call; None if only the logs have them."""
        if not self._front.has_displays:
            return self._front.parent
        number = call.removeprefix(self._prefix)
        if number != call and number.isdecimal():
            return self._calls.of(int(number))
        state = self._runtime.meshes.get(mesh_of(address))
        if state is None or state.stopped is not None:  # its last words
            return self._front.parent
        initialized = getattr(state.spawn_spec, "initialized", None)
        if initialized is not None and not initialized.done():  # before the first call
            return self._spawned.get(state.uid)
        return None
