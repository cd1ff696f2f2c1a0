"""Programs written for torchrun, on a proc mesh: run as torchrun runs them, or only given its environment."""

import contextlib
import importlib.util
import os
import socket
import sys
import time
import tokenize
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from monarch_nb.actor import Actor, Future, Point, ProcMesh, current_rank, endpoint, heal_mesh, this_host
from monarch_nb.collectives.environment import free_port, fresh_number, of_rank
from monarch_nb.collectives.groups import PROCESS_GROUPS
from monarch_nb.compat.network import AddrType, get_ipaddr
from monarch_nb.host.gpus import devices
from monarch_nb.host.procs.proc_main import reseed
from monarch_nb.mesh import ValueMesh, region_of, state_of
from monarch_nb.mesh.console import remember_source
from monarch_nb.mesh.handle import operations
from monarch_nb.runtime.output.displays import open_figures, show_figures
from monarch_nb.telemetry.trainers import show_tables
from monarch_nb.wire import is_users_file

__all__ = [
    "AddrType",
    "SPMDActor",
    "SPMDProgram",
    "begin",
    "machine_size",
    "prepare",
    "run",
    "setup_torch_elastic_env",
    "setup_torch_elastic_env_async",
]

_NAME = "_SPMDActor"
_MOST_ON_CPU = 8  # processes of a program on this machine, unless a number is given
_began = 0.0  # wall clock: when the last program began in this process
_own: list[ProcMesh] = []  # the mesh of programs that name none and are run by a script


class WorldPosition(Struct, frozen=True):
    """The position of a process in a mesh, as torchrun counts: the last dimension is the processes of a host."""

    rank: int
    size: int
    local_rank: int
    local_size: int

    @classmethod
    def of(cls, point: Point) -> "WorldPosition":
        """Returns the position of a point of a mesh."""
        labels = point.extent.labels
        local = (point[labels[-1]], point.extent[labels[-1]]) if labels else (0, 1)
        return cls(point.rank, point.extent.nelements, *local)

    def set(self, master: tuple[str, int], number: int) -> None:
        """Sets torchrun's environment; abandons earlier process groups. New ones have names from `number` on.

        Frameworks that cache the environment for the life of a process read it again.
        """
        PROCESS_GROUPS.give_up(number, everything=True)
        variables = of_rank(self.rank, self.size, self.local_rank, self.local_size, master)
        PROCESS_GROUPS.set_environment(variables, forced=True)
        _reset_frameworks()


class SPMDProgram(Struct, frozen=True):
    """A script or a module, with its arguments. `source` is the script's text; None for a module."""

    words: tuple[str, ...]  # the script's file, or the module's name, and its arguments
    source: str | None = None

    @classmethod
    def read(cls, words: Sequence[str]) -> "SPMDProgram":
        """Reads `[path, ...]` or `["-m", module, ...]`.

        Raises ValueError without a script, FileNotFoundError, OSError, and SyntaxError of the script.
        """
        if not words or list(words) == ["-m"]:
            raise ValueError("neither a script nor a module is given, such as ['train.py'] or ['-m', 'train']")
        if words[0] == "-m":
            return cls(tuple(words[1:]))
        file = Path(words[0]).expanduser()
        if not file.is_file():
            raise FileNotFoundError(f"there is no script {words[0]} in {os.getcwd()}")
        with tokenize.open(file) as text:  # uses the encoding that the file declares
            source = text.read()
        name = str(file.absolute())
        compile(source, name, "exec", dont_inherit=True)
        return cls((name, *words[1:]), source)

    def __str__(self) -> str:
        return " ".join(self.words if self.source is not None else ("-m", *self.words))

    def run(self) -> None:
        """Runs the program in this process, in a `__main__` of its own, whose names are available to later cells.

        Raises the program's errors, and RuntimeError for an exit status other than 0.
        """
        global _began
        figures, console = open_figures(), sys.modules["__main__"]
        argv, path = sys.argv, sys.path[:]
        streams = {name: getattr(sys, name) for name in ("stdin", "stdout", "stderr")}
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            folder = os.getcwd() if self.source is None else os.path.dirname(self.words[0])
            sys.argv, sys.path[:0] = list(self.words), [folder]
            _forget_edited(folder)
            _renew_arguments()
            reseed()
            _began = time.time()
            self._execute(main)
        except SystemExit as end:
            if end.code not in (None, 0):
                raise RuntimeError(f"{self} ended with status {end.code}") from end
        finally:
            sys.argv, sys.path[:] = argv, path
            for name, stream in streams.items():
                _restore(name, stream)
            sys.modules["__main__"] = console
            vars(console).update({name: value for name, value in vars(main).items() if not name.startswith("__")})
            show_figures(figures)

    def _execute(self, main: types.ModuleType) -> None:
        if self.source is not None:
            file = self.words[0]
            if not os.path.exists(file):  # missing on other machines
                remember_source(file, self.source)
            vars(main).update(__file__=file, __builtins__=__builtins__)
            exec(compile(self.source, file, "exec", dont_inherit=True), vars(main))
            return
        name = self.words[0]  # as with `python -m`
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
        code = None if spec is None else getattr(spec.loader, "get_code", lambda _: None)(spec.name)
        if spec is None or code is None:
            raise ModuleNotFoundError(f"the ranks find no module {name} that can be run", name=name)
        sys.argv[0] = spec.origin or name
        vars(main).update(__file__=spec.origin, __spec__=spec, __package__=spec.parent, __loader__=spec.loader)
        exec(code, vars(main))


def _restore(name: str, stream: Any) -> None:
    """Makes a standard stream again what it was before a program that may have replaced it."""
    program = getattr(sys, name)
    if program is not stream:
        setattr(sys, name, stream)
        with contextlib.suppress(ValueError):  # it is detached or closed
            if getattr(program, "buffer", None) is getattr(stream, "buffer", stream):
                program.detach()  # its end would close the buffer


def _forget_edited(folder: str) -> None:
    """Makes the modules of a program's folder imported again, if one was edited since the last program began."""
    prefix = os.path.join(folder, "")
    mine = {}
    for name, module in tuple(sys.modules.copy().items()):  # other threads import, and `copy` is atomic
        file = getattr(module, "__file__", None)
        if name != "__main__" and isinstance(file, str) and file.startswith(prefix) and is_users_file(file):
            mine[name] = file
    if any(_edited_at(file) >= _began for file in mine.values()):
        for name in mine:
            del sys.modules[name]
        importlib.invalidate_caches()


def _edited_at(file: str) -> float:
    try:
        return os.stat(file).st_mtime
    except OSError:
        return 0.0


def _reset_frameworks() -> None:
    """Resets Accelerate's cache of the environment, which it reads once in the life of a process."""
    state = sys.modules.get("accelerate.state")
    with contextlib.suppress(AttributeError):
        if state is not None:
            state.AcceleratorState._reset_state(reset_partial_state=True)
            state.GradientState._reset_state()


def _renew_arguments() -> None:
    """Makes torchtitan read the command line again: its parser caches that of its first import."""
    manager = sys.modules.get("torchtitan.config.manager")
    with contextlib.suppress(AttributeError):
        if manager is not None:
            manager.ConfigManager.parse_args.__defaults__ = (sys.argv[1:],)


def _host_port() -> tuple[str, int]:
    """Returns this host's name, and a TCP port that is free now."""
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except socket.gaierror:  # its own name has no address: only this machine can be meant
        name = "localhost"
    return name, free_port()


def _begin_here(master: tuple[str, int], number: int, tables: bool) -> None:
    WorldPosition.of(current_rank()).set(master, number)
    show_tables(tables)


def prepare(mesh: ProcMesh, *, tables: bool = False) -> None:
    """Prepares the processes of a mesh, or slice, as torchrun: sets its environment, ends process groups. Blocks.

    A slice is a world of its own. With `tables` the first rank shows displays as in a notebook. Raises
    SupervisionError if a process is lost.
    """
    mesh.run(_begin_here, _master(mesh), fresh_number(), tables).get()


def _master(mesh: ProcMesh) -> tuple[str, int]:
    """Returns the address at which ranks meet: on the first one's host, reachable by all as far as known."""
    layout, ranks = state_of(mesh).layout, region_of(mesh).ranks()
    hosts = tuple(dict.fromkeys(map(layout.host_of, ranks)))
    [(name, port)] = mesh.slice(**dict.fromkeys(mesh.extent, 0)).run(_host_port).get().values()
    address = operations().meeting_point(hosts)
    if len(hosts) > 1 and (not address or address.startswith("127.")):  # this process reaches it through a tunnel
        address = name
    return address, port


def begin(program: SPMDProgram, mesh: ProcMesh, *, tables: bool = False) -> Future[ValueMesh[None]]:
    """Runs a program on the main thread of each process, as torchrun does; blocks until it begins.

    `tables` is as for `prepare`. The future has None for each rank, or raises the errors of ranks.
    """
    prepare(mesh, tables=tables)
    return mesh.run(program.run)


def run(script: str, *arguments: str, on: ProcMesh | None = None, procs: int | None = None) -> None:
    """Runs a script on all processes of a mesh as torchrun does, and blocks until it has ended on all of them.

    `run("train.py", "--epochs", "3", on=workers)`, or `run("-m", "package.train")`. Each process runs it on its main
    thread, with torchrun's environment, in a `__main__` of its own. Process groups of an earlier program are abandoned,
    generators of random numbers are seeded as in a fresh process, and edited modules beside the script are imported
    again, so that each run is like the first. Without `on` it runs on `procs` processes of this machine, by default
    `machine_size()`, which stay for the next run. Raises ActorError with errors of ranks, or with an exit status other
    than 0; ValueError and FileNotFoundError.
    """
    program = SPMDProgram.read([script, *arguments])
    begin(program, own_mesh(procs) if on is None else on).get()


def machine_size() -> int:
    """Returns the default number of processes of a program on this machine: its GPUs, else its cores, at most 8."""
    if gpus := len(devices()):
        return gpus
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, _MOST_ON_CPU)


def own_mesh(procs: int | None) -> ProcMesh:
    """Returns the mesh of this machine for programs that name none; heals lost processes."""
    count = machine_size() if procs is None else procs
    living = [mesh for mesh in _own if state_of(mesh).stopped is None]
    if [len(mesh) for mesh in living] == [count]:
        return heal_mesh(living[0])
    for mesh in living:
        mesh.stop().get()
    _own[:] = [this_host().spawn_procs(per_host={"gpus": count}, name="spmd")]
    return _own[0]


class SPMDActor(Actor):
    """Sets torchrun's environment by its place in the mesh, and runs scripts; see `setup_torch_elastic_env`.

    The last dimension of the mesh counts the processes of a host.
    """

    def __init__(self) -> None:
        position = self._position = WorldPosition.of(current_rank())
        self.rank, self.world_size, self.local_rank = position.rank, position.size, position.local_rank
        self.local_world_size = self.nproc_per_node = position.local_size
        self.group_rank = self.rank // self.local_world_size
        self.group_world_size = -(-self.world_size // self.local_world_size)

    @endpoint
    def get_host_port(self, use_ipaddr: AddrType | None = None) -> tuple[str, int]:
        """Returns this host's name, or its IP address, and a TCP port that is free now."""
        if use_ipaddr is not None:
            return get_ipaddr(socket.gethostname(), 0, use_ipaddr), free_port()
        return _host_port()

    @endpoint
    def setup_env(self, master_addr: str, master_port: int, number: int = 0) -> None:
        """Sets the environment; abandons earlier process groups, since they may have dead members.

        Names of new groups begin at `number`, if given: a store that was used before may have others.
        """
        self._position.set((master_addr, master_port), number or master_port)

    @endpoint
    def main(self, master_addr: str, master_port: int, script_args: Sequence[str]) -> bool:
        """Runs a script as torchrun would: `["-m", module, ...]` or `[path, ...]`. Returns True after a normal end.

        Raises ValueError without a script, and the script's errors; sys.exit(0) is a normal end.
        """
        program = SPMDProgram.read(script_args)
        self._position.set((master_addr, master_port), master_port)
        program.run()
        return True


def _checked(mesh: ProcMesh, master_addr: str | None, master_port: int | None) -> Any:
    if (master_addr is None) != (master_port is None):
        raise ValueError("give both master_addr and master_port, or neither: then the first process is the master")
    return mesh.spawn(_NAME, SPMDActor)


def _first(actors: Any) -> Any:
    return actors.slice(**dict.fromkeys(actors.extent, 0))


def setup_torch_elastic_env(
    proc_mesh: ProcMesh,
    master_addr: str | None = None,
    master_port: int | None = None,
    use_ipaddr: AddrType | None = None,
) -> None:
    """Sets torchrun's variables in each process: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT...

    The first process is the master by default. To be called again after a heal: earlier groups are abandoned
    everywhere, and `init_process_group` makes new ones of all living processes. Blocks.
    Raises ValueError for half a master, SupervisionError when a process is lost.
    """
    actors = _checked(proc_mesh, master_addr, master_port)
    try:
        if master_addr is None:
            master_addr, master_port = _first(actors).get_host_port.call_one(use_ipaddr).get()
        actors.setup_env.call(master_addr, master_port, fresh_number()).get()
    finally:
        actors.stop()


async def setup_torch_elastic_env_async(
    proc_mesh: ProcMesh,
    master_addr: str | None = None,
    master_port: int | None = None,
    use_ipaddr: AddrType | None = None,
) -> None:
    """As `setup_torch_elastic_env`, without blocking the event loop."""
    actors = _checked(proc_mesh, master_addr, master_port)
    try:
        if master_addr is None:
            master_addr, master_port = await _first(actors).get_host_port.call_one(use_ipaddr)
        await actors.setup_env.call(master_addr, master_port, fresh_number())
    finally:
        actors.stop()
