"""Meshes as the variables of a notebook name them, and the table of them that %meshes shows."""

import contextlib
import gc
from collections.abc import Iterator
from typing import Any, Literal

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from msgspec import Struct

from monarch_nb.mesh import ActorMesh, ProcMesh, region_of, state_of
from monarch_nb.runtime import ActorState, MeshState, ProcState, current_runtime
from monarch_nb.shape import MeshTrait
from monarch_nb.store import MeshView, describe
from monarch_nb.wire import kind_of, text_table

Mesh = ProcMesh | ActorMesh[Any]
HEADINGS = ("mesh", "kind", "shape", "ranks", "hosts", "variables")


class MeshRow(Struct, frozen=True):
    """A mesh in the table of %meshes."""

    view: MeshView
    variables: tuple[str, ...]
    used: bool  # something refers to it, if only from inside another object


class Namespace:
    """Finds meshes by variables that hold them, and by the names that they were spawned with."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell

    def meshes(self) -> dict[str, MeshState]:
        """Meshes that are not stopped, by uid, in the order they were spawned. The kernel itself is none."""
        runtime = current_runtime()
        return {
            uid: state
            for uid, state in tuple(runtime.meshes.items())
            if state.stopped is None and state.owner_process == runtime.address and state.spawn_spec is not None
        }

    def names(self, kind: Literal["all", "procs", "actors"] = "all") -> list[str]:
        """Names that %on, %heal and %stop accept: variables that hold meshes, and names of meshes."""
        bindings = [(name, state_of(mesh)) for name, mesh in self._variables()]
        states = [(name, state) for name, state in bindings if state.stopped is None]
        states += [(state.name, state) for state in self.meshes().values() if not state.inner]
        cls = {"all": MeshState, "procs": ProcState, "actors": ActorState}[kind]
        return list(dict.fromkeys(name for name, state in states if isinstance(state, cls)))

    def find(self, name: str) -> Mesh:
        """Returns the mesh that a variable holds, or else the one that was spawned under a name. Raises UsageError.

        A mesh that has ended is returned only if no living one has the name.
        """
        value = self.value(name)
        mesh = mesh_in(value)
        states = [state for state in self.meshes().values() if state.name == name]
        if mesh is not None and (state_of(mesh).stopped is None or not states):
            return mesh
        if states:
            return whole_mesh(states[-1])
        names = ", ".join(self.names()) or "none yet; make one with %mesh workers gpus=4"
        if value is not None:
            raise UsageError(f"{name} is {kind_of(value)}, not a mesh of processes or actors; meshes: {names}")
        raise UsageError(f"there is no mesh {name!r}; meshes: {names}")

    def word(self, uid: str) -> str:
        """Returns a name by which `find` returns that mesh; "" if there is none."""
        state = current_runtime().meshes[uid]
        names = [name for name, mesh in self._variables() if state_of(mesh).uid == uid]
        for name in (*names, state.name):
            with contextlib.suppress(UsageError):
                if state_of(self.find(name)).uid == uid:
                    return name
        return ""

    def value(self, path: str) -> Any:
        """Returns the value of a variable, or of an attribute of one: `job.workers`; None if there is none."""
        name, *attributes = path.split(".")
        value = self._shell.user_ns.get(name)
        for attribute in attributes:
            value = getattr(value, attribute, None)
        return value

    def bind(self, name: str, mesh: Mesh) -> bool:
        """Assigns a mesh to a variable, unless it holds something other than an ended mesh; True if assigned."""
        current = mesh_in(self._shell.user_ns.get(name))
        free = name not in self._shell.user_ns or (current is not None and state_of(current).stopped is not None)
        mine = current is not None and state_of(current).uid == state_of(mesh).uid
        if free or mine:
            self._shell.user_ns[name] = mesh
        return free or mine

    def variables(self) -> dict[str, str]:
        """Uids of whole meshes, by the variables that hold them."""
        bindings = ((name, mesh, state_of(mesh)) for name, mesh in self._variables())
        return {name: state.uid for name, mesh, state in bindings if region_of(mesh) == state.region}

    def parts(self) -> dict[str, Mesh]:
        """Slices of meshes, and meshes in another shape, by the variables that hold them."""
        values = tuple(self._shell.user_ns.items())
        meshes = {
            name: value
            for name, value in values
            if isinstance(value, (ProcMesh, ActorMesh)) and not is_hidden(self._shell, name)
        }
        return {name: mesh for name, mesh in meshes.items() if region_of(mesh) != state_of(mesh).region}

    def rows(self) -> list[MeshRow]:
        """Returns all meshes that are not stopped, with the variables that refer to them."""
        variables: dict[str, list[str]] = {}
        for name, mesh in self._variables():
            variables.setdefault(state_of(mesh).uid, []).append(name)
        in_use = self._in_use()
        rows = []
        for uid, state in self.meshes().items():
            if state.inner:
                continue
            names = tuple(dict.fromkeys(variables.get(uid, ())))
            actors = list(state.actors) if isinstance(state, ProcState) else []
            used = bool(names) or uid in in_use or any(variables.get(actor) or actor in in_use for actor in actors)
            rows.append(MeshRow(describe(state), names, used))
        return rows

    def _variables(self) -> Iterator[tuple[str, Mesh]]:
        for name, value in tuple(self._shell.user_ns.items()):
            if is_hidden(self._shell, name):
                continue
            mesh = mesh_in(value)
            if mesh is not None:
                yield name, mesh
                continue
            members = tuple(value.values()) if isinstance(value, dict) else value
            if isinstance(members, (list, tuple, set, frozenset)):
                yield from ((name, member) for member in tuple(members) if isinstance(member, (ProcMesh, ActorMesh)))

    def _in_use(self) -> set[str]:
        """Uids of meshes that any object refers to, however indirectly, except stored outputs of IPython."""
        gc.collect()  # a mesh and its endpoints refer to each other
        outputs = {id(value) for value in self._shell.user_ns.get("_oh", {}).values()}
        return {uid for uid, state in self.meshes().items() if not outputs.issuperset(map(id, state.handles.values()))}


def mesh_in(value: object) -> Mesh | None:
    """Returns the value if it is a mesh, the mesh of its processes if it is a mesh of tensors; otherwise None."""
    if isinstance(value, (ProcMesh, ActorMesh)):
        return value
    procs = getattr(value, "procs", None) if isinstance(value, MeshTrait) else None
    return procs if isinstance(procs, ProcMesh) else None


def whole_mesh(state: MeshState) -> Mesh:
    """Returns a reference to a whole mesh."""
    if isinstance(state, ProcState):
        return ProcMesh(state, state.region)
    assert isinstance(state, ActorState)
    return ActorMesh(state, state.region)


def is_hidden(shell: InteractiveShell, name: str) -> bool:
    """Returns whether a variable is IPython's own: stored outputs do not count as references."""
    return name in shell.user_ns_hidden or (name.startswith("_") and name.strip("_oihdut0123456789") == "")


class Overview:
    """All meshes, one per row, as text; the HTML form is registered with the other displays."""

    def __init__(self, rows: list[MeshRow]) -> None:
        self.rows = rows

    def cells(self) -> list[tuple[str, ...]]:
        """Returns the table as text: name, kind, shape, state, where, variables."""
        return [
            (row.view.name, kind(row.view), shape(row.view), states(row.view), hosts(row.view), refers(row))
            for row in self.rows
        ]

    @property
    def unused(self) -> int:
        """Number of meshes that nothing refers to any more."""
        return sum(not row.used for row in self.rows)

    @property
    def advice(self) -> str:
        """Advice about unused meshes."""
        if self.unused == 1:
            return "No variable refers to one of these meshes any more. %stop --unused stops it."
        return f"No variable refers to {self.unused} of these meshes any more. %stop --unused stops them."

    def __repr__(self) -> str:
        if not self.rows:
            return "There are no meshes yet. %mesh workers gpus=4 makes one."
        table = text_table([HEADINGS, *self.cells()])
        return f"{table}\n{self.advice}" if self.unused else table


def kind(view: MeshView) -> str:
    """Returns the kind of its members."""
    return view.actor_class or "procs"


def shape(view: MeshView) -> str:
    """Its dimensions."""
    return " ".join(f"{label}={size}" for label, size in zip(view.labels, view.sizes, strict=True)) or "one"


def states(view: MeshView) -> str:
    """Rank counts by state."""
    return ", ".join(f"{count} {state}" for state, count in view.counts.items())


def hosts(view: MeshView) -> str:
    """Its hosts."""
    hosts = view.hosts
    return ", ".join(hosts[:3]) + (f", … ({len(hosts)})" if len(hosts) > 3 else "")


def refers(row: MeshRow) -> str:
    """Variables that refer to it."""
    return ", ".join(row.variables) or ("(held by another object)" if row.used else "(nothing)")
