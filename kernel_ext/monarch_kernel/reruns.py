"""Leftovers of a cell that is run again: actors of the earlier class, and meshes that had the name before."""

from collections import Counter
from types import CodeType
from typing import TYPE_CHECKING

from monarch_nb.mesh.mesh_events import Event, MeshEvents, MeshStarting, MeshStopped
from monarch_nb.runtime import ActorState, EndpointProperty, MeshState, Runtime

from .front import Front
from .jupyter import cell_name
from .session import Session

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


class Reruns:
    """Reports once, at the next call, that actors run an older class; and leftovers at the end of a cell."""

    def __init__(self, shell: "InteractiveShell", front: Front, session: Session, runtime: Runtime) -> None:
        self._shell = shell
        self._front = front
        self._session = session
        self._runtime = runtime
        self._mentioned: dict[str, type] = {}  # by mesh, the newest class that a notice has named
        self._replaced: set[str] = set()  # meshes whose name another one has taken over in this cell
        runtime.on_call.append(self._on_call)
        runtime.part(MeshEvents).listeners.append(self._on_event)
        front.ending.append(self._on_cell_end)

    def close(self) -> None:
        """Stops listening."""
        self._runtime.on_call.remove(self._on_call)
        self._runtime.part(MeshEvents).listeners.remove(self._on_event)
        self._front.ending.remove(self._on_cell_end)

    # -- classes ----------------------------------------------------------------------------------------------------

    def _on_call(self, state: ActorState) -> None:
        if state.cls.__module__ != "__main__" or state.spawn_spec is None or not self._front.in_cell:
            return
        newest = state.spawn_spec.newest()
        if newest is state.cls or self._mentioned.get(state.uid) is newest:
            return
        self._mentioned[state.uid] = newest
        if _codes(newest) == _codes(state.cls):
            return  # the cell was run again unchanged
        self._front.write(
            f"{state.name} runs {state.cls.__name__} as of {self._cell(state.cls)}; "
            f"%reload {state.name} brings the one of {self._cell(newest)}\n"
        )

    def _cell(self, cls: type) -> str:
        for code in _codes(cls).values():
            return cell_name(self._shell, code.co_filename).removeprefix("Cell ") or "an earlier cell"
        return "an earlier cell"

    # -- meshes -----------------------------------------------------------------------------------------------------

    def _on_event(self, event: Event) -> None:
        match event:
            case MeshStopped(mesh):
                self._mentioned.pop(mesh.uid, None)
            case MeshStarting(mesh) if self._front.in_cell:
                states = (state for state in self._session.meshes().values() if state.uid != mesh.uid)
                self._replaced.update(state.uid for state in states if _same_name(state, mesh))
            case _:
                return

    def _on_cell_end(self) -> None:
        if not self._replaced:
            return
        replaced, self._replaced = self._replaced, set()
        rows = self._session.rows()
        for row in rows:
            if row.view.uid in replaced and row.used:
                holders = f", held by {', '.join(row.variables)}" if row.variables else ""
                self._front.write(
                    f"another mesh named {row.view.name} runs already{holders}: give one of them another name, so that "
                    "what they print and magics can distinguish them\n"
                )
        counts = Counter(row.view.name for row in rows if row.view.uid in replaced and not row.used)
        for name, count in counts.items():
            subject, pronoun = ("an earlier mesh", "it") if count == 1 else (f"{count} earlier meshes", "them")
            still = f"{subject} of that name still run{'s' if count == 1 else ''}"
            self._front.write(
                f"{name} is new; {still}, though no variable refers to {pronoun}: %stop --unused ends {pronoun}\n"
            )


def _same_name(state: MeshState, earlier: MeshState) -> bool:
    return type(state) is type(earlier) and state.name == earlier.name


def _codes(cls: type) -> dict[str, CodeType]:
    """Returns the code of the methods of a class; equal for a cell that was run twice."""
    codes = {}
    for name, value in vars(cls).items():
        method = value.method if isinstance(value, EndpointProperty) else value
        code = getattr(method, "__code__", None)
        if isinstance(code, CodeType):
            codes[name] = code
    return codes
