"""The meshes of one notebook: made by name, reused, replaced, healed, reloaded, stopped. Called by the magics."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics
from msgspec import Struct

from monarch_nb.code import Report, local_modules, owned_actors, reload_code, reload_each
from monarch_nb.connect import local_hosts
from monarch_nb.debug.render import short
from monarch_nb.lifecycle import heal_mesh, kill_mesh
from monarch_nb.lifecycle.interrupts import interrupted
from monarch_nb.mesh import HostMesh, ProcMesh, region_of, state_of, this_host
from monarch_nb.runtime import ActorState, MeshState, ProcState
from monarch_nb.store import MeshView, describe
from monarch_nb.wire import counted, kind_of

from .interrupted_calls import ended, ranks_text, stuck
from .jupyter import cell_name
from .namespace import Mesh, Namespace, whole_mesh
from .tensors import workers_on

if TYPE_CHECKING:
    from .jobs import Jobs


class SessionMagics(Magics):
    """Magics that use the session of their notebook."""

    shell: InteractiveShell

    def __init__(self, shell: InteractiveShell, session: "Session") -> None:
        super().__init__(shell)
        self._session = session


class MeshOrigin(Struct, frozen=True):
    """The arguments of a %mesh line, and the uid of its mesh."""

    uid: str
    dims: tuple[tuple[str, int], ...]
    setup: str
    job: str = ""  # " --job slurm partition=gpu"


class Session(Namespace):
    """The meshes that the cells of one notebook make and name."""

    def __init__(self, shell: InteractiveShell) -> None:
        super().__init__(shell)
        self._origins: dict[str, MeshOrigin] = {}
        self._hosts: dict[int, HostMesh] = {}
        self._jobs: Jobs | None = None  # from the first cell that needs one

    def origins(self) -> dict[str, MeshOrigin]:
        """Arguments of %mesh lines, by name."""
        return dict(self._origins)

    def remember(self, origins: Mapping[str, MeshOrigin]) -> None:
        """Records the origins of attached meshes, so that their %mesh lines find them again."""
        self._origins.update(origins)

    def file_name(self, file: str) -> str:
        """Display name of a file: `Cell In[3]`, `train.py`."""
        return cell_name(self._shell, file) or short(file)

    # -- making -----------------------------------------------------------------------------------------------------

    def mesh(
        self, name: str, dims: Mapping[str, int], setup: str = "", *, setup_filename: str = "", fresh: bool = False,
        job: str = "", arguments: Mapping[str, Any] | None = None,
    ) -> tuple[ProcMesh, str]:  # fmt: skip
        """Returns a proc mesh of that shape, bound to a variable of that name; and a notice about it, mostly "".

        One with the same name, shape and set-up is reused unless `fresh`; another one of that name is stopped first.
        Blocks until the processes are ready. Raises UsageError, or what the set-up raised.
        """
        bound = self.value(name)
        if bound is not None and not isinstance(bound, ProcMesh):
            raise UsageError(f"%mesh: {name} is {kind_of(bound)} already; choose another name, or del {name}")
        origin = self._origins.get(name)
        state = self.meshes().get(origin.uid) if origin is not None else None
        shape = tuple(dims.items())
        job_text = " ".join(
            ["", "--job", job, *(f"{key}={value}" for key, value in (arguments or {}).items())] if job else []
        )
        notice = ""
        if origin is not None and isinstance(state, ProcState):
            if fresh and not dims and not origin.job:
                dims, shape, setup = dict(origin.dims), origin.dims, setup or origin.setup
            differs = _difference(origin, shape, setup, job_text)
            if not fresh and ((not dims and not job) or not differs):
                mesh = ProcMesh(state, state.region)
                self._shell.user_ns[name] = mesh
                return mesh, _reused(name, describe(mesh))
            _check_dims(name, dims, job)
            notice = f"{name} is replaced: {differs or '--fresh was asked for'}"
            actors = describe(state).actors
            if actors:
                notice += f"; its actors are gone: {', '.join(actors)}"
            ProcMesh(state, state.region).stop("replaced by %mesh").get()
        _check_dims(name, dims, job)
        try:
            hosts = self._hosts_for(name, dims, job, arguments or {})
            mesh = self._spawn(hosts, name, dict(dims), setup, setup_filename)
        except BaseException:
            if notice:  # the mesh of before has ended all the same
                sys.stdout.write(f"{notice}\n")
            raise
        self._origins[name] = MeshOrigin(state_of(mesh).uid, shape, setup, job_text)
        self._shell.user_ns[name] = mesh
        return mesh, notice

    def _hosts_for(self, name: str, dims: Mapping[str, int], job: str, arguments: Mapping[str, object]) -> HostMesh:
        if job:
            from .jobs import Jobs

            self._jobs = self._jobs or Jobs()
            return self._jobs.hosts(name, job, dims, arguments)
        count = dims.get("hosts")
        if count is None:
            return this_host()
        if count not in self._hosts:
            self._hosts[count] = local_hosts(count)
        return self._hosts[count]

    def _spawn(self, hosts: HostMesh, name: str, dims: dict[str, int], setup: str, filename: str) -> ProcMesh:
        dims.pop("hosts", None)
        mesh = hosts.spawn_procs(
            per_host=dims or {"gpus": 1}, name=name, setup=setup or None, setup_filename=filename or "<set-up>"
        )
        try:
            mesh.initialized.get()
        except BaseException:
            mesh.stop("its set-up failed").get(30)
            raise
        return mesh

    def resize(self, name: str, label: str, by: int) -> tuple[ProcMesh, str]:
        """Grows a mesh of processes by some hosts, or shrinks it; the mesh, and a line about it. Blocks."""
        mesh = self.find(name)
        if not isinstance(mesh, ProcMesh):
            raise UsageError(f"%mesh: {name} is no mesh of processes: name the one that its actors are on")
        return mesh, resized(mesh, label, by)

    # -- ending and healing -----------------------------------------------------------------------------------------

    def stop(self, meshes: Sequence[Mesh]) -> list[str]:
        """Stops meshes, each once; gives a line about each."""
        return [self._stop(state) for state in {state.uid: state for state in map(state_of, meshes)}.values()]

    @staticmethod
    def stop_part(part: Mesh) -> str:
        """Stops some ranks of a mesh; gives a line about them."""
        part.stop("stopped by %stop").get()
        return f"stopped {_counted(part)} of {state_of(part).name}"

    @staticmethod
    def kill(part: Mesh) -> str:
        """Kills the processes of a mesh, or of a part of it; gives a line about them."""
        kill_mesh(part)
        return killed(part)

    def stop_all(self) -> list[str]:
        """Stops all meshes; gives a line about each."""
        return self._stop_each(list(self.meshes().values()))

    def stop_unused(self) -> list[str]:
        """Stops the meshes nothing refers to any more; gives a line about each."""
        unused = {row.view.uid for row in self.rows() if not row.used}
        return self._stop_each([state for uid, state in self.meshes().items() if uid in unused])

    def _stop_each(self, states: list[MeshState]) -> list[str]:
        # Processes end their actors, in bounded time, so that these need not be stopped one by one.
        lines = [self._stop(state) for state in states if isinstance(state, ProcState)]
        return lines + [self._stop(state) for state in states if state.stopped is None]

    def _stop(self, state: MeshState) -> str:
        if state.stopped is not None:
            return f"{state.name} has been stopped already ({state.stopped})"
        actors = describe(state).actors
        whole_mesh(state).stop("stopped by %stop").get()
        size = counted(len(state.region), "proc" if isinstance(state, ProcState) else "actor")
        return f"stopped {state.name}: {size}" + (f", and with them {', '.join(actors)}" if actors else "")

    def heal(self, name: str, mesh: Mesh, *, kill: bool = False, replace: bool | None = None) -> str:
        """Heals a mesh of that name, or a part of it, and everything on its processes; gives a line about it.

        Blocks until it is whole. With `kill` the processes that live are killed first; with `replace` another host
        takes the place of a lost one that may come back.
        """
        stopped = state_of(mesh).stopped
        if stopped is not None:
            raise UsageError(f"%heal: {name} is not broken, it was stopped ({stopped}); make a new one")
        broken = describe(mesh).having("failed")
        heal_mesh(mesh, kill=kill, replace=replace)
        noun = "proc" if isinstance(mesh, ProcMesh) else "actor"
        if kill:
            return f"killed {counted(len(mesh) - len(broken), noun)} of {name} and healed {len(mesh)}"
        return (
            f"healed {counted(len(broken), noun)} of {name}"
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
            try:
                state = state_of(self.find(name))
            except UsageError as error:
                raise UsageError(f"%reload: no module {name} is imported here, and {error}") from None
            if not isinstance(state, ActorState):
                raise UsageError(f"%reload: {name} is a mesh of processes; name a mesh of actors, or a module")
            cls = state.cls
            if cls.__module__ == "__main__":
                states.append(state)
            else:
                roots.append(_folder(sys.modules[cls.__module__]))
        if not names:
            mains = [state for state in owned_actors() if state.cls.__module__ == "__main__"]
            states = [state for state in mains if state.spawn_spec and state.spawn_spec.newest() is not state.cls]
        report = reload_code(roots, also=also) if roots or not names else Report()
        reload_each(states, report)
        return report

    def interrupt(self, mesh: Mesh) -> str:
        """Interrupts what runs on the ranks of a mesh, or of a part of it; says what has ended and what has not."""
        lines = []
        for part in (mesh, *workers_on(mesh)):
            state: MeshState = state_of(part)
            reactions = interrupted(state, region_of(part).ranks())
            lines += ended(state, reactions) + stuck(state, reactions, lambda file: cell_name(self._shell, file))
        return "\n".join(lines) or f"nothing runs on {ranks_text(state_of(mesh), region_of(mesh).ranks())}"


def resized(mesh: ProcMesh, label: str, by: int) -> str:
    """Grows a mesh of processes by some hosts, or, where `by` is negative, shrinks it; a line about it. Blocks."""
    change = mesh.grow(**{label: by}) if by > 0 else mesh.shrink(**{label: by})
    return str(change).strip("<>")


def killed(part: Mesh) -> str:
    """Returns a line about processes that were killed."""
    name = state_of(part).name
    return f"killed {counted(len(part), 'proc')} of {name}: %heal {name} starts what is lost again"


def _counted(mesh: Mesh) -> str:
    return counted(len(mesh), "proc" if isinstance(mesh, ProcMesh) else "actor")


def _folder(module: ModuleType) -> str:
    """Returns the folder that a module's package, or the module itself, is found in."""
    path = Path(str(module.__file__))
    depth = module.__name__.count(".") + (path.name == "__init__.py")
    return str(path.parents[depth])


def _check_dims(name: str, dims: Mapping[str, int], job: str) -> None:
    if not dims and not job:
        raise UsageError(f"%mesh: how large? For four processes write %mesh {name} gpus=4")


def _difference(origin: MeshOrigin, dims: tuple[tuple[str, int], ...], setup: str, job: str) -> str:
    if (origin.dims, origin.job) != (dims, job):
        before, now = (" ".join(f"{label}={size}" for label, size in sizes) for sizes in (origin.dims, dims))
        return f"it was {before}{origin.job}, now {now}{job}"
    return "its set-up has changed" if origin.setup.partition("\n")[2] != setup.partition("\n")[2] else ""


def _reused(name: str, view: MeshView) -> str:
    failed = view.counts.get("failed", 0)
    if failed:
        return f"{name} is reused, but {counted(failed, 'rank')} failed: %heal {name} starts what is lost again"
    return f"{name} is reused; --fresh starts new processes"
