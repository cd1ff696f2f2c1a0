"""Host meshes: where processes can be spawned."""

import contextlib
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self, cast

from monarch_nb._deferred import asyncio
from monarch_nb.host.command import BootstrapCommand, check_environment, launches
from monarch_nb.mesh.handle import ProcsWanted, operations, state_of
from monarch_nb.mesh.host_record import GROW_S, HostRecord, HostSource
from monarch_nb.mesh.proc import ProcMesh
from monarch_nb.runtime import Future, current_runtime, fail_future, pending_future, resolve_future, when_done
from monarch_nb.shape import Extent, MeshTrait, NDSlice, Point, Region, check_sizes
from monarch_nb.supervision import Driver
from monarch_nb.transport import UnreachableError
from monarch_nb.wire import counted

if TYPE_CHECKING:
    from monarch_nb.mesh.host_record import Resized

MOST_PROCS = 100_000  # on a host; a mistyped size would take all memory of this process before any host refuses it


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
        source: HostSource | None = None,
    ) -> None:
        self._take(HostRecord(name, hosts, region, ended, identity, source), None, python, owned)

    def _take(self, record: HostRecord, region: Region | None, python: str | None, owned: bool) -> Self:
        self._record = record  # shared with slices
        self.__region = region  # of a slice; None for the whole mesh, which follows the record
        self._python = python
        self._owned = owned
        return self

    @classmethod
    def _of(cls, record: HostRecord, region: Region | None, python: str | None, owned: bool) -> Self:
        return cls.__new__(cls)._take(record, region, python, owned)

    @property
    def name(self) -> str:
        """Its name."""
        return self._record.name

    @property
    def record(self) -> HostRecord:
        """The record that all its handles share."""
        return self._record

    @property
    def host_ids(self) -> tuple[str, ...]:
        """Host ids by base rank. Blocks until all hosts that are being attached have sent theirs."""
        return self._record.ids.get()

    def _used_hosts(self) -> tuple[str, ...]:
        """Returns the ids of the hosts of this slice."""
        hosts = self.host_ids
        return tuple(hosts[rank] for rank in self._region.ranks())

    @classmethod
    def of_host(cls, host: str, *, python: str | None = None) -> "HostMesh":
        """Makes a mesh of one host, without dimensions."""
        return cls(host, (host,), Region((), NDSlice(0, (), ())), python=python)

    @property
    def _region(self) -> Region:
        return self._record.region if self.__region is None else self.__region

    @property
    def spares(self) -> tuple[str, ...]:
        """The ids of spare hosts, which have joined and can replace a lost host; see `Role`."""
        source = self._record.source
        return () if source is None or self._record.ended else source.waiting

    @property
    def region(self) -> Region:
        """The labels, sizes and ranks of the hosts."""
        return self._region

    @property
    def is_fake_in_process(self) -> bool:
        """Always False: no host mesh here consists of the process itself."""
        return False

    @property
    def stream_logs(self) -> bool:
        """Always False, as no mesh of torchmonarch is made with it: output is sent to the spawner all the same."""
        return False

    def _new_with_region(self, region: Region) -> Self:
        return self._of(self._record, region, self._python, owned=False)

    @property
    def _inner_host_mesh(self) -> "HostMesh | None":
        """None after a shutdown: torchmonarch's programs read this."""
        return None if self._record.ended else self

    @property
    def _hy_host_mesh(self) -> object:
        return operations().shared(self, self.initialized)  # torchmonarch's programs look there

    @property
    def python(self) -> str | None:
        """The interpreter of its processes; None means the interpreter of this process."""
        return self._python

    def _check_usable(self) -> None:
        if self._record.ended:
            raise RuntimeError(f"HostMesh has already been {self._record.ended[0]}")

    def _check_owned(self, operation: str) -> None:
        self._check_usable()
        if not self._owned:
            raise RuntimeError(
                f"cannot {operation} `HostMesh` that is a reference instead of owned: call this on the whole mesh, "
                f"where it was attached or came from a job, and not on a slice or a received mesh"
            )

    def spawn_procs(
        self,
        per_host: Mapping[str, int] | None = None,
        bootstrap: Callable[[], object] | None = None,
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
        process's main thread before any actor is made there. `proc_bind` holds, for each process of a host, its
        bindings: numactl's cpunodebind, membind, physcpubind, or cpus. `bootstrap_command`, or what it returns for the
        place of a process, is run in place of the default command.
        Raises ValueError for dimensions that clash and for sizes that are not positive or far too large, TypeError for
        an environment that is not all text.
        """
        self._check_usable()
        dims = dict(per_host or {})
        check_sizes(dims, "per_host: ")
        clash = [label for label in dims if label in self._region.labels]
        if clash:
            raise ValueError(
                f"per_host: {', '.join(clash)} is a dimension of the hosts already ({', '.join(self._region.labels)}); "
                f"use another name, or rename the host mesh's"
            )
        check_environment(env or {}, "spawn_procs(env=...)")
        extent = Extent((*self._region.labels, *dims), (*self._region.ndslice.sizes, *dims.values()))
        procs = Extent(tuple(dims), tuple(dims.values())).nelements
        if procs > MOST_PROCS:
            raise ValueError(f"per_host: {procs} processes are more than a host can run: write {MOST_PROCS} at most")
        if proc_bind is not None and len(proc_bind) != procs:
            raise ValueError(
                f"proc_bind length ({len(proc_bind)}) must equal procs_per_host ({procs}), an entry for each"
            )
        request = ProcsWanted(
            name=name or "anon",
            hosts=self._used_hosts(),
            per_host=dims,
            extent=extent,
            env=dict(env or {}),
            bootstrap=bootstrap,
            setup=() if setup is None else ((setup, setup_filename),),
            proc_bind=tuple(proc_bind or ()),
            launch=launches(bootstrap_command, extent),
            python=self._python,
            record=self._record,
        )
        return cast(ProcMesh, operations().spawn_procs(request))

    def with_python_executable(self, python_executable: str) -> "HostMesh":
        """Returns the same hosts with another interpreter for their processes: a file on these hosts.

        Raises ValueError for a file that this machine lacks, on this machine's own host or with a relative path.
        """
        if not os.access(python_executable, os.X_OK) and (not os.path.isabs(python_executable) or self._is_own_host()):
            raise ValueError(f"{python_executable!r} is not an executable file")
        python = os.path.abspath(python_executable)
        return self._of(self._record, self.__region, python, self._owned)

    @property
    def initialized(self) -> Future[Literal[True]]:
        """Resolves when every host's agent has answered."""
        result: Future[Literal[True]] = pending_future(
            describe=lambda: f"the hosts of {self._record.name} have not all answered"
        )

        def settle(future: "Future[object]") -> None:
            error = future.exception(0)
            resolve_future(result, True) if error is None else fail_future(result, error)

        def ask(future: "Future[tuple[str, ...]]") -> None:
            if future.exception(0) is None:
                when_done(operations().hosts_answer(self._used_hosts()), settle)
            else:
                settle(future)

        when_done(self._record.ids, ask)
        return result

    def shutdown(self) -> Future[None]:
        """Ends the host agents of this mesh and all processes on them. Only for the whole mesh, by its owner."""
        self._check_owned("shut down")
        hosts = self._used_hosts()
        self._record.ended.append("shut down")
        return operations().shut_down_hosts(hosts)

    def stop(self) -> Future[None]:
        """Stops all processes that this process has spawned on this host mesh; the agents stay, for later meshes.

        Processes spawned on another host mesh of the same hosts live on. Resolves when all have ended.
        Only for the whole mesh, by its owner.
        """
        self._check_owned("stop")
        return operations().stop_on_hosts(self._used_hosts(), self._record.identity)

    def grow(self, *, timeout: float = GROW_S, **more: "int | Sequence[str]") -> "Resized":
        """Requests more hosts from the job of this mesh: `hosts.grow(hosts=2)`, or machines by name, `hosts=["node7"]`.

        Blocks until they can be used. Meshes spawned from then on include them; existing meshes of processes grow by
        `ProcMesh.grow`. Slices mean the same hosts as before. Raises NoMoreHostsError if not all have arrived within
        `timeout` seconds, or no job provides any: then nothing has changed. Only for the whole mesh, by its owner.
        """
        self._check_owned("grow")
        return operations().grow_hosts(self._record, more, timeout)

    def shrink(self, **fewer: "int | Sequence[int | str]") -> "Resized":
        """Gives hosts back to the job: `hosts.shrink(hosts=-1)` the last one, `hosts=[1]` that one, or by their ids.

        Meshes of processes there shrink first, by `ProcMesh.shrink`, and those that have no other hosts are stopped.
        Blocks until all processes there have ended. Only for the whole mesh, by its owner.
        """
        self._check_owned("shrink")
        return operations().shrink_hosts(self._record, fewer)

    def rotate_key(
        self, key: "str | os.PathLike[str] | None" = None, *, force: bool = False, timeout: float = 30.0
    ) -> None:
        """Changes the key of these hosts, while they work: programs that have only the former key are cut off.

        The new key is written to the file `key` here, by default that of the hosts' job, and by each agent to its own
        key file. All attached hosts that have the same key change together, those of other meshes too. Connections are
        made anew; calls under way go on. Blocks until all have it, at most `timeout` seconds: a host that becomes
        unreachable meanwhile gets it when it returns. Raises ValueError for hosts without a key, or with different
        keys, and TrustError if an agent does not agree, if the file cannot be written, or, unless `force`, if other
        programs use a host and would be cut off, if an agent cannot write its key file, or if hosts of the job have
        not joined yet: all have the former key then. Only for the whole mesh, by its owner.
        """
        self._check_owned("change the key of")
        hosts, source = self._used_hosts(), self._record.source
        file = source.key_file(force) if source is not None else None
        if file is not None and key is not None:
            raise ValueError(f"{self.name}: the key of its job is in {file}: call rotate_key() without a file")
        file = Path(key) if key is not None else file
        if file is None:
            text = "the hosts of its job are reached without a key, and have none to change"
            text = "name the file on this machine that gets the key: rotate_key('job.key')" if source is None else text
            raise ValueError(f"{self.name}: {text}")
        operations().rotate_key(self.name, hosts, file, force, timeout)
        if source is not None:
            source.key_changed()

    def detach(self, lease: str | float = "1h") -> None:
        """Detaches all meshes that this process has spawned on this host mesh, as `ProcMesh.detach` does. Blocks."""
        self._check_usable()
        operations().detach_hosts(self._used_hosts(), self._record.identity, lease)

    async def sync_workspace(self, workspace: object, conda: bool = False, auto_reload: bool = False) -> None:
        """Copies edited code to these hosts: `workspace` is a folder, several, or an object with such `dirs`.

        Hosts that do not share this machine's files get a copy, of which only what differs is sent. The folders come
        first on `sys.path` of all processes there. With `auto_reload` edited modules are loaded again, here and in
        these processes, and living actors switch to their new classes between messages; where one cannot, a warning
        says so. Raises RuntimeError for a slice or a reference, SyntaxError before anything has changed.
        """
        self._check_usable()
        if conda:
            raise NotImplementedError(
                "sync_workspace(conda=True) is not supported yet: install the environment on the hosts, and choose its "
                "Python with with_python_executable"
            )
        if not self._owned and not self._is_own_host():
            raise RuntimeError("sync_workspace: only for a whole host mesh, by its owner, not a slice or a reference")
        notes = await asyncio.to_thread(
            operations().sync_workspace, self._record.name, self._used_hosts(), self._python, workspace, auto_reload
        )
        for note in notes:
            warnings.warn(note, stacklevel=2)

    def _is_own_host(self) -> bool:
        """Returns whether the mesh is this_host() of the controller."""
        return len(self.host_ids) == 1 and not self._region.labels and operations().is_own_host(self.host_ids[0])

    async def __aenter__(self) -> Self:
        self._check_usable()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._record.ended:
            await self.shutdown()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, HostMesh):
            return NotImplemented
        return self.extent == other.extent and self._used_hosts() == other._used_hosts()

    def __hash__(self) -> int:
        return hash(self._used_hosts()[:1])  # it may grow

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuilt, (self._record.name, self.host_ids, self._region, self._python, self._record.identity)

    def __repr__(self) -> str:
        dims = ", ".join(f"{label}={size}" for label, size in self.extent.items())
        spares = len(self.spares)
        more = f" and {counted(spares, 'spare')}" if spares else ""
        return f"<HostMesh {self._record.name!r} {{{dims}}}{more}>"


def this_host() -> HostMesh:
    """Returns the host this process runs on, without dimensions."""
    host, python = operations().own_host()
    return HostMesh.of_host(host, python=python)


def spawn_helpers(hosts: HostMesh, name: str, per_host: Mapping[str, int] | None = None) -> ProcMesh:
    """Spawns processes for a task of the library: calls of these raise their failures, which do not end a script."""
    procs = hosts.spawn_procs(per_host=per_host, name=name)
    current_runtime().part(Driver).raised_in_use(state_of(procs).uid)
    return procs


def this_proc() -> ProcMesh:
    """Returns this process, as a ProcMesh of one: actors spawned on it live here."""
    return cast(ProcMesh, current_runtime().this_proc())


def host_labels(hosts: Sequence[str]) -> Region:
    """Returns the region of a one-dimensional host mesh."""
    return Region(("hosts",), NDSlice(0, (len(hosts),), (1,)))


def _rebuilt(name: str, hosts: tuple[str, ...], region: Region, python: str | None, identity: str) -> HostMesh:
    """Returns the unpickled form of a host mesh: a reference, which cannot shut its hosts down."""
    with contextlib.suppress(UnreachableError):  # its use raises an error
        operations().reach(hosts, name)
    return HostMesh(name, hosts, region, python=python, owned=False, identity=identity)


def give_up(mesh: HostMesh, reason: str) -> None:
    """Counts processes of a mesh's hosts as stopped, not failed, as the hosts' starter is about to kill these.

    Does not block. Later uses of the mesh are refused, as of one that was shut down.
    """
    record = mesh._record
    if record.ended:
        return
    record.ended.append("shut down")
    if record.ids.done() and record.ids.exception(0) is None:
        operations().give_up_hosts(record.hosts, reason)
