"""Host meshes: where processes can be spawned."""

import os
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self, cast

from monarch_nb.mesh.devices import environments
from monarch_nb.mesh.proc import ProcMesh
from monarch_nb.mesh.spawning import spawn_proc_mesh
from monarch_nb.runtime import Future, runtime
from monarch_nb.shape import Extent, MeshTrait, NDSlice, Region


class HostMesh(MeshTrait):
    """A mesh of hosts, or a slice of one."""

    def __init__(
        self, name: str, hosts: Sequence[str], region: Region, *, python: str | None = None, owned: bool = False
    ) -> None:
        self._name = name
        self._hosts = tuple(hosts)  # by base rank
        self.__region = region
        self._python = python
        self._owned = owned

    @classmethod
    def of_host(cls, host: str) -> "HostMesh":
        """One host, without dimensions."""
        return cls(host, (host,), Region((), NDSlice(0, (), ())))

    @property
    def _region(self) -> Region:
        return self.__region

    def _new_with_region(self, region: Region) -> Self:
        return type(self)(self._name, self._hosts, region, python=self._python)

    def spawn_procs(
        self,
        per_host: Mapping[str, int] | None = None,
        bootstrap: Callable[[], Any] | None = None,
        name: str | None = None,
        proc_bind: list[dict[str, str]] | None = None,
        bootstrap_command: Any = None,
        *,
        setup: str | None = None,
        setup_filename: str = "<set-up>",
        env: Mapping[str, str | None] | None = None,
    ) -> ProcMesh:
        """Spawns processes on each host, in a mesh with the hosts' dimensions and then those of `per_host`.

        Does not block. `bootstrap`, or the source `setup`, runs on each process's main thread before any actor is made
        there. Raises ValueError for dimensions that clash or sizes that are not positive.
        """
        if bootstrap_command is not None:
            raise NotImplementedError("bootstrap_command is not part of this version yet")
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
            python=self._python,
            env=environments(dims, dict(env or {})),
        )

    def with_python_executable(self, path: str) -> "HostMesh":
        """The same hosts, whose processes run another interpreter."""
        if not os.access(path, os.X_OK):
            raise ValueError(f"{path!r} is not an executable file")
        return HostMesh(self._name, self._hosts, self._region, python=os.path.abspath(path), owned=self._owned)

    @property
    def initialized(self) -> Future[Literal[True]]:
        """Resolves when every host's agent has answered."""
        from monarch_nb.mesh.controller import hosts_answer

        return hosts_answer([self._hosts[rank] for rank in self._region.ranks()])

    def shutdown(self) -> Future[None]:
        """Ends the host agents of this mesh and all processes on them. Only for the whole mesh, by its owner."""
        from monarch_nb.mesh.controller import shutdown_hosts

        if not self._owned:
            raise RuntimeError("only the owner of a host mesh can shut it down, not a slice or a reference")
        return shutdown_hosts(self._hosts)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
    return HostMesh.of_host(engine.host)


def this_proc() -> ProcMesh:
    """This process, as a ProcMesh of one: actors spawned on it live here."""
    return cast(ProcMesh, runtime().this_proc())


def host_labels(hosts: Sequence[str]) -> Region:
    """The region of a one-dimensional host mesh."""
    return Region(("hosts",), NDSlice(0, (len(hosts),), (1,)))
