"""The meshes of one notebook: made by name, found by name, reused, replaced, stopped. What the magics call."""

import gc
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from IPython.core.error import UsageError
from msgspec import Struct

from monarch_nb.code import Report, local_modules, owned_actors, reload_code, reload_each
from monarch_nb.lifecycle import heal_mesh
from monarch_nb.mesh import ActorMesh, HostMesh, ProcMesh, local_hosts, this_host
from monarch_nb.mesh.interrupts import interrupted
from monarch_nb.runtime import ActorState, MeshState, ProcState, runtime
from monarch_nb.store import MeshView, describe

from .files import cell_name
from .reactions import at, ended, stuck

Mesh = ProcMesh | ActorMesh[Any]


class _Made(Struct, frozen=True):
    """What a %mesh line asked for, and the uid of what it got."""

    uid: str
    dims: tuple[tuple[str, int], ...]
    setup: str


class Row(Struct, frozen=True):
    """One mesh in the table of %meshes."""

    view: MeshView
    variables: tuple[str, ...]
    used: bool  # something refers to it, if only from inside another object


class Session:
    """The meshes that the cells of one notebook make and name."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._made: dict[str, _Made] = {}
        self._hosts: dict[int, HostMesh] = {}

    # -- finding ----------------------------------------------------------------------------------------------------

    def meshes(self) -> dict[str, MeshState]:
        """Meshes that are not stopped, by uid, in the order they were spawned. The kernel itself is none."""
        engine = runtime()
        return {
            uid: state
            for uid, state in tuple(engine.meshes.items())
            if state.stopped is None and state.home == engine.address and state.born is not None
        }

    def names(self, kind: Literal["all", "procs", "actors"] = "all") -> list[str]:
        """What %on, %heal and %stop understand: variables that hold meshes, and names of meshes."""
        states = [(name, value._state) for name, value in self._variables() if value._state.stopped is None]
        states += [(state.name, state) for state in self.meshes().values()]
        wanted = {"all": MeshState, "procs": ProcState, "actors": ActorState}[kind]
        return list(dict.fromkeys(name for name, state in states if isinstance(state, wanted)))

    def find(self, name: str) -> Mesh:
        """The mesh that a variable holds, or else the one that was spawned under a name. Raises UsageError."""
        value = self._value(name)
        if isinstance(value, (ProcMesh, ActorMesh)):
            return value
        called = [state for state in self.meshes().values() if state.name == name]
        if called:
            newest = called[-1]
            kind = ProcMesh if isinstance(newest, ProcState) else ActorMesh
            return kind(newest, newest.region)  # type: ignore[arg-type]
        known = ", ".join(self.names()) or "none yet; make one with %mesh workers gpus=4"
        if value is not None:
            raise UsageError(f"{name} is a {type(value).__name__}, not a mesh of processes or actors; meshes: {known}")
        raise UsageError(f"there is no mesh {name!r}; meshes: {known}")

    def _value(self, path: str) -> Any:
        name, *attributes = path.split(".")
        value = self._shell.user_ns.get(name)
        for attribute in attributes:
            value = getattr(value, attribute, None)
        return value

    def variables(self) -> dict[str, str]:
        """Uids of whole meshes, by the variables that hold them."""
        return {name: value._state.uid for name, value in self._variables() if value._region == value._state.region}

    def _variables(self) -> Iterator[tuple[str, Any]]:
        for name, value in tuple(self._shell.user_ns.items()):
            if is_hidden(self._shell, name):
                continue
            if isinstance(value, (ProcMesh, ActorMesh)):
                yield name, value
            elif isinstance(value, (list, tuple, set, frozenset)):
                yield from ((name, one) for one in tuple(value) if isinstance(one, (ProcMesh, ActorMesh)))
            elif isinstance(value, dict):
                yield from ((name, one) for one in tuple(value.values()) if isinstance(one, (ProcMesh, ActorMesh)))

    # -- making -----------------------------------------------------------------------------------------------------

    def mesh(
        self, name: str, dims: Mapping[str, int], setup: str = "", *, setup_filename: str = "", fresh: bool = False
    ) -> tuple[ProcMesh, str]:
        """A proc mesh of that shape, bound to a variable of that name; and what is to be said about it, "" mostly.

        One with the same name, shape and set-up is reused unless `fresh`; another one of that name is stopped first.
        Blocks until the processes are ready. Raises UsageError, or what the set-up raised.
        """
        bound = self._value(name)
        if bound is not None and not isinstance(bound, ProcMesh):
            raise UsageError(f"%mesh: {name} is a {type(bound).__name__} already; choose another name, or del {name}")
        made = self._made.get(name)
        state = self.meshes().get(made.uid) if made is not None else None
        wish = tuple(dims.items())
        told = ""
        if made is not None and isinstance(state, ProcState):
            differs = _difference(made, wish, setup)
            if not fresh and (not dims or not differs):
                mesh = ProcMesh(state, state.region)
                self._shell.user_ns[name] = mesh
                return mesh, _reused(name, describe(mesh))
            told = f"{name} is replaced: {differs or '--fresh was asked for'}"
            actors = describe(state).actors
            if actors:
                told += f"; its actors are gone: {', '.join(actors)}"
            ProcMesh(state, state.region).stop("replaced by %mesh").get()
        if not dims:
            raise UsageError(f"%mesh: how large? For four processes write %mesh {name} gpus=4")
        mesh = self._spawn(name, dict(dims), setup, setup_filename)
        self._made[name] = _Made(mesh._state.uid, wish, setup)
        self._shell.user_ns[name] = mesh
        return mesh, told

    def _spawn(self, name: str, dims: dict[str, int], setup: str, filename: str) -> ProcMesh:
        count = dims.pop("hosts", None)
        if count is None:
            hosts = this_host()
        else:
            if count not in self._hosts:
                self._hosts[count] = local_hosts(count)
            hosts = self._hosts[count]
        mesh = hosts.spawn_procs(
            per_host=dims or {"gpus": 1}, name=name, setup=setup or None, setup_filename=filename or "<set-up>"
        )
        try:
            mesh.initialized.get()
        except BaseException:
            mesh.stop("its set-up failed").get(30)
            raise
        return mesh

    # -- ending and healing -----------------------------------------------------------------------------------------

    def stop(self, name: str) -> str:
        """Stops a mesh; gives a line about it."""
        return self._stop(self.find(name)._state)

    def stop_all(self) -> list[str]:
        """Stops all meshes; gives a line about each."""
        return self._stop_each(list(self.meshes().values()))

    def stop_unused(self) -> list[str]:
        """Stops the meshes nothing refers to any more; gives a line about each."""
        unused = {row.view.uid for row in self.rows() if not row.used}
        return self._stop_each([state for uid, state in self.meshes().items() if uid in unused])

    def _stop_each(self, states: list[MeshState]) -> list[str]:
        # Processes end their actors, in bounded time; so those are not stopped one by one before.
        told = [self._stop(state) for state in states if isinstance(state, ProcState)]
        return told + [self._stop(state) for state in states if state.stopped is None]

    def _stop(self, state: MeshState) -> str:
        if state.stopped is not None:
            return f"{state.name} has been stopped already ({state.stopped})"
        kind = ProcMesh if isinstance(state, ProcState) else ActorMesh
        actors = describe(state).actors
        whole: Any = kind(state, state.region)  # type: ignore[arg-type]
        whole.stop("stopped by %stop").get()
        what = _count(len(state.region), "proc" if kind is ProcMesh else "actor")
        return f"stopped {state.name}: {what}" + (f", and with them {', '.join(actors)}" if actors else "")

    def heal(self, name: str, mesh: Mesh, *, kill: bool = False) -> str:
        """Heals a mesh of that name, or a part of it, and everything on its processes; gives a line about it.

        Blocks until it is whole. With `kill` the processes that live are killed first.
        """
        stopped = mesh._state.stopped
        if stopped is not None:
            raise UsageError(f"%heal: {name} is not broken, it was stopped ({stopped}); make a new one")
        broken = describe(mesh).having("failed")
        heal_mesh(mesh, kill=kill)
        what = "proc" if isinstance(mesh, ProcMesh) else "actor"
        if kill:
            return f"killed {_count(len(mesh) - len(broken), what)} of {name} and healed {len(mesh)}"
        return (
            f"healed {_count(len(broken), what)} of {name}"
            if broken
            else f"{name} has not failed: there is nothing to heal"
        )

    def reload(self, names: Sequence[str]) -> Report:
        """Loads edited modules again and gives living actors their newest classes; all of them, or what is named.

        Names are those of actor meshes and of modules. Blocks. Raises UsageError, and what the modules raise.
        """
        roots, also, states = [], [], []
        for name in names:
            module = sys.modules.get(name)
            if module is not None and name not in self.names("actors"):
                if name not in local_modules():
                    raise UsageError(
                        f"%reload: {name} is an installed package; %reload loads modules of your own again"
                    )
                also.append(name)
                roots.append(_folder(module))
                continue
            state: Any = self.find(name)._state
            if not isinstance(state, ActorState):
                raise UsageError(f"%reload: {name} is a mesh of processes; name a mesh of actors, or a module")
            cls = state.cls
            if cls.__module__ == "__main__":
                states.append(state)
            else:
                roots.append(_folder(sys.modules[cls.__module__]))
        if not names:
            mains = [state for state in owned_actors() if state.cls.__module__ == "__main__"]
            states = [state for state in mains if state.born.newest() is not state.cls]
        report = reload_code(roots, also=also) if roots or not names else Report()
        reload_each(states, report)
        return report

    def interrupt(self, mesh: Mesh) -> str:
        """Interrupts what runs on the ranks of a mesh, or of a part of it; says what has ended and what has not."""
        reactions = interrupted(mesh._state, mesh._region.ranks())
        lines = ended(mesh._state, reactions) + stuck(mesh._state, reactions, lambda file: cell_name(self._shell, file))
        return "\n".join(lines) or f"nothing runs on {at(mesh._state, mesh._region.ranks())}"

    # -- looking ----------------------------------------------------------------------------------------------------

    def rows(self) -> list[Row]:
        """All meshes that are not stopped, with the variables that refer to them."""
        variables: dict[str, list[str]] = {}
        for name, value in self._variables():
            variables.setdefault(value._state.uid, []).append(name)
        held = self._held()
        rows = []
        for uid, state in self.meshes().items():
            named = tuple(dict.fromkeys(variables.get(uid, ())))
            actors = list(state.actors) if isinstance(state, ProcState) else []
            used = bool(named) or uid in held or any(variables.get(one) or one in held for one in actors)
            rows.append(Row(describe(state), named, used))
        return rows

    def _held(self) -> set[str]:
        """Meshes that some object holds, however deep inside others; what IPython keeps of past outputs aside."""
        gc.collect()  # a mesh and its endpoints refer to each other
        outputs = {id(value) for value in self._shell.user_ns.get("_oh", {}).values()}
        found = (value for value in gc.get_objects() if type(value) in (ProcMesh, ActorMesh))
        return {value._state.uid for value in found if id(value) not in outputs}


def is_hidden(shell: Any, name: str) -> bool:
    """Whether a variable is IPython's own: what it keeps of past outputs is nobody's reference."""
    return name in shell.user_ns_hidden or (name.startswith("_") and name.strip("_oihdut0123456789") == "")


def _folder(module: ModuleType) -> str:
    """The folder that a module's package, or the module itself, is found in."""
    path = Path(str(module.__file__))
    depth = module.__name__.count(".") + (path.name == "__init__.py")
    return str(path.parents[depth])


def _difference(made: _Made, dims: tuple[tuple[str, int], ...], setup: str) -> str:
    if made.dims != dims:
        before, now = (" ".join(f"{label}={size}" for label, size in shape) for shape in (made.dims, dims))
        return f"it was {before}, now {now}"
    return "its set-up has changed" if made.setup.partition("\n")[2] != setup.partition("\n")[2] else ""


def _reused(name: str, view: MeshView) -> str:
    failed = view.counts.get("failed", 0)
    if failed:
        return f"{name} is reused, but {_count(failed, 'rank')} failed: %heal {name} starts what is lost again"
    return f"{name} is reused; --fresh starts new processes"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
