"""Host meshes: where processes can be spawned."""

import asyncio
import os
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self, cast

from monarch_nb.host.command import BootstrapCommand, launches
from monarch_nb.mesh.devices import environments
from monarch_nb.mesh.proc import ProcMesh
from monarch_nb.mesh.spawning import spawn_proc_mesh
from monarch_nb.runtime import Future, runtime
from monarch_nb.shape import Extent, MeshTrait, NDSlice, Point, Region


class HostMesh(MeshTrait):
    """A mesh of hosts, or a slice of one."""

    def __init__(
        self,
        name: str,
        hosts: "Sequence[str] | Future[tuple[str, ...]]",
        region: Region,
        *,
        python: str | None = None,
        owned: bool = False,
        ended: list[str] | None = None,
        identity: str = "",
    ) -> None:
        self._name = name
        self._found = hosts if isinstance(hosts, Future) else Future._resolved(tuple(hosts))
        self.__region = region
        self._python = python
        self._owned = owned
        self._ended = [] if ended is None else ended  # shared with slices: why it cannot be used any more
        self._identity = identity or uuid.uuid4().hex  # of the whole mesh, for its slices and references as well

    @property
    def _hosts(self) -> tuple[str, ...]:
        """Host ids by base rank. Blocks while hosts that are being attached have not told theirs."""
        return self._found.get()

    @classmethod
    def of_host(cls, host: str) -> "HostMesh":
        """One host, without dimensions."""
        return cls(host, (host,), Region((), NDSlice(0, (), ())))

    @property
    def _region(self) -> Region:
        return self.__region

    @property
    def region(self) -> Region:
        """The labels, sizes and ranks of the hosts."""
        return self.__region

    @property
    def is_fake_in_process(self) -> bool:
        """Whether the host is this process itself, which no host mesh of ours is."""
        return False

    @property
    def stream_logs(self) -> bool:
        """Whether what processes here write is sent to who spawned them, which it always is; see logging_option."""
        return True

    def _new_with_region(self, region: Region) -> Self:
        return type(self)(
            self._name, self._found, region, python=self._python, ended=self._ended, identity=self._identity
        )

    @property
    def _inner_host_mesh(self) -> "HostMesh | None":
        """None once it was shut down: torchmonarch's programs look there."""
        return None if self._ended else self

    def _usable(self) -> None:
        if self._ended:
            raise RuntimeError(f"HostMesh has already been {self._ended[0]}")

    def _mine(self, what: str) -> None:
        self._usable()
        if not self._owned:
            raise RuntimeError(f"only the owner of a host mesh can {what} it, not a slice or a reference")

    def spawn_procs(
        self,
        per_host: Mapping[str, int] | None = None,
        bootstrap: Callable[[], Any] | None = None,
        name: str | None = None,
        proc_bind: list[dict[str, str]] | None = None,
        bootstrap_command: BootstrapCommand | Callable[[Point], BootstrapCommand] | None = None,
        *,
        setup: str | None = None,
        setup_filename: str = "<set-up>",
        env: Mapping[str, str | None] | None = None,
    ) -> ProcMesh:
        """Spawns processes on each host, in a mesh with the hosts' dimensions and then those of `per_host`.

        Does not block, unless the hosts are still being attached. `bootstrap`, or the source `setup`, runs on each
        process's main thread before any actor is made there. `proc_bind` holds, for each process of a host, what it is
        bound to: numactl's cpunodebind, membind, physcpubind, or cpus. `bootstrap_command`, or what it returns for the
        place of a process, is run in place of the default command.
        Raises ValueError for dimensions that clash or sizes that are not positive.
        """
        self._usable()
        dims = dict(per_host or {})
        for label, size in dims.items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"per_host: {label}={size!r} must be a whole number of at least 1")
        clash = [label for label in dims if label in self._region.labels]
        if clash:
            raise ValueError(
                f"per_host: {', '.join(clash)} is a dimension of the hosts already ({', '.join(self._region.labels)}); "
                f"use another name, or rename the host mesh's"
            )
        extent = Extent((*self._region.labels, *dims), (*self._region.ndslice.sizes, *dims.values()))
        per = Extent(tuple(dims), tuple(dims.values())).nelements
        if proc_bind is not None and len(proc_bind) != per:
            raise ValueError(f"proc_bind has {len(proc_bind)} entries, but there are {per} processes on a host")
        return spawn_proc_mesh(
            hosts=tuple(self._hosts[rank] for rank in self._region.ranks()),
            per_host=per,
            extent=extent,
            name=name or "anon",
            bootstrap=bootstrap,
            setup=(() if setup is None else ((setup, setup_filename),)),
            proc_bind=tuple(proc_bind or ()),
            launch=launches(bootstrap_command, extent),
            python=self._python,
            env=environments(dims, dict(env or {})),
            host_mesh=self._identity,
        )

    def with_python_executable(self, python_executable: str) -> "HostMesh":
        """The same hosts, whose processes run another interpreter."""
        if not os.access(python_executable, os.X_OK):
            raise ValueError(f"{python_executable!r} is not an executable file")
        python = os.path.abspath(python_executable)
        return HostMesh(
            self._name, self._found, self._region, python=python, owned=self._owned, ended=self._ended,
            identity=self._identity,
        )  # fmt: skip

    @property
    def initialized(self) -> Future[Literal[True]]:
        """Resolves when every host's agent has answered."""
        from monarch_nb.mesh.controller import hosts_answer

        answered: Future[Literal[True]] = Future._make(story=lambda: f"the hosts of {self._name} have not all answered")

        def settle(future: "Future[Any]") -> None:
            error = future.exception(0)
            answered._set(True) if error is None else answered._fail(error)

        def ask(future: "Future[tuple[str, ...]]") -> None:
            if future.exception(0) is None:
                hosts_answer([self._hosts[rank] for rank in self._region.ranks()])._on_done(settle)
            else:
                settle(future)

        self._found._on_done(ask)
        return answered

    def shutdown(self) -> Future[None]:
        """Ends the host agents of this mesh and all processes on them. Only for the whole mesh, by its owner."""
        from monarch_nb.mesh.controller import shutdown_hosts

        self._mine("shut down")
        hosts = self._hosts
        self._ended.append("shut down")
        return shutdown_hosts(hosts)

    def stop(self) -> Future[None]:
        """Stops all processes that this process has spawned on this host mesh; the agents stay, for what comes next.

        What was spawned on another host mesh of the same hosts lives on. Resolves when they are gone.
        Only for the whole mesh, by its owner.
        """
        from monarch_nb.mesh.controller import stop_hosts

        self._mine("stop")
        return stop_hosts(self._hosts, identity=self._identity)

    async def sync_workspace(self, workspace: Any, conda: bool = False, auto_reload: bool = False) -> None:
        """Brings edited code to these hosts: `workspace` is a folder, several, or an object with such `dirs`.

        Hosts that do not share this machine's files get a copy, of which only what differs is sent. The folders come
        first on `sys.path` of all processes there. With `auto_reload` edited modules are loaded again, here and in
        these processes, and living actors take their new classes over between messages; where one cannot, a warning
        says so. Raises RuntimeError for a slice or a reference, SyntaxError before anything has changed.
        """
        from monarch_nb.mesh.workspace import sync

        self._usable()
        if conda:
            raise NotImplementedError(
                "sync_workspace(conda=True) is not supported yet: install the environment on the hosts, and choose its "
                "Python with with_python_executable"
            )
        if not self._owned and not self._is_own_host():
            raise RuntimeError("sync_workspace: only for a whole host mesh, by its owner, not a slice or a reference")
        report = await asyncio.to_thread(sync, self, workspace, auto_reload)
        for note in report.notes:
            warnings.warn(note, stacklevel=2)

    def _is_own_host(self) -> bool:
        """Whether it is this_host() of the controller."""
        engine = runtime()
        return engine.keeper._mesh is None and self._hosts == (engine.host,) and not self._region.labels

    async def __aenter__(self) -> Self:
        self._usable()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._ended:
            await self.shutdown()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HostMesh) and self._hosts == other._hosts and self._region == other._region

    def __hash__(self) -> int:
        return hash((self._hosts, self._region))

    def __reduce__(self) -> Any:
        from monarch_nb.mesh.reference import reduce_host_mesh

        return reduce_host_mesh(self)

    def __repr__(self) -> str:
        dims = ", ".join(f"{label}={size}" for label, size in self.extent.items())
        return f"<HostMesh {self._name!r} {{{dims}}}>"


def this_host() -> HostMesh:
    """The host this process runs on, without dimensions."""
    from monarch_nb.mesh.controller import ensure_host

    engine = runtime()
    ensure_host(engine)
    mesh = HostMesh.of_host(engine.host)
    mesh._python = engine.keeper.python
    return mesh


def this_proc() -> ProcMesh:
    """This process, as a ProcMesh of one: actors spawned on it live here."""
    return cast(ProcMesh, runtime().this_proc())


def host_labels(hosts: Sequence[str]) -> Region:
    """The region of a one-dimensional host mesh."""
    return Region(("hosts",), NDSlice(0, (len(hosts),), (1,)))
