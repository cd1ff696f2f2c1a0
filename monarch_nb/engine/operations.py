"""Operations that handles request and packages above them execute; each package is loaded when it is first needed."""

import socket
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from monarch_nb import code, connect, lifecycle, logs
from monarch_nb._package import refuse_old_torch
from monarch_nb.connect.mesh_detach import Detacher
from monarch_nb.connect.routes import HostRoutes
from monarch_nb.lifecycle.actor_spawn import tensor_engine_of
from monarch_nb.lifecycle.stopping import MeshStopper
from monarch_nb.lifecycle.watching import HostNotices
from monarch_nb.logs import MeshLogs
from monarch_nb.logs.mesh_logs import LogOption, set_level
from monarch_nb.mesh.console import console_of
from monarch_nb.mesh.handle import Handle, ProcsWanted, region_of, state_of
from monarch_nb.mesh.host import HostMesh
from monarch_nb.mesh.host_record import HostRecord, HostSource
from monarch_nb.mesh.proc import ProcMesh
from monarch_nb.mesh.registry import MeshRegistry
from monarch_nb.mesh.sending import LentFrames
from monarch_nb.runtime import ActorState, Future, Instance, MeshState, ProcState, Runtime
from monarch_nb.runtime.context import running_actor
from monarch_nb.settings import parse_duration
from monarch_nb.shape import NDSlice, Region
from monarch_nb.wire import OutFrame

if TYPE_CHECKING:
    from monarch_nb.mesh.host_record import Resized


class ProcessOperations:
    """The operations of one process."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        # Simulated meshes in place of those of processes, by the actor that has activated them.
        self._simulated: weakref.WeakKeyDictionary[Instance, dict[Region, object]] = weakref.WeakKeyDictionary()

    def spawn_actors(
        self, procs: Handle[ProcState], name: str, cls: type, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> Handle[ActorState]:
        """Spawns one actor on each process. Does not block."""
        return lifecycle.spawn_actors(procs, name, cls, args, kwargs)

    def host_mesh(self, host: str) -> HostMesh:
        """Returns a mesh of one host, without dimensions."""
        return HostMesh.of_host(host)

    def spawn_procs(self, request: ProcsWanted) -> Handle[ProcState]:
        """Spawns processes. Does not block."""
        return lifecycle.spawn_procs(request)

    def stop(self, state: MeshState, reason: str, region: Region) -> Future[None]:
        """Stops ranks of a mesh; resolves once they have ended and their output is shown."""
        stopped = self._runtime.part(MeshStopper).stop(state, reason, region)
        return self._runtime.part(MeshLogs).shown(stopped) if isinstance(state, ProcState) else stopped

    def grow_procs(self, procs: Handle[ProcState], more: Mapping[str, object], timeout: float) -> "Resized":
        """Extends a mesh of processes to more hosts. Blocks."""
        return lifecycle.grow_procs(procs, more, timeout)

    def shrink_procs(self, procs: Handle[ProcState], fewer: Mapping[str, object]) -> "Resized":
        """Removes hosts from a mesh of processes. Blocks until its processes there have ended."""
        return lifecycle.shrink_procs(procs, fewer)

    def grow_hosts(self, record: HostRecord, more: Mapping[str, object], timeout: float) -> "Resized":
        """Has a job add hosts to a host mesh. Blocks."""
        return lifecycle.grow_hosts(record, more, timeout)

    def shrink_hosts(self, record: HostRecord, fewer: Mapping[str, object]) -> "Resized":
        """Gives hosts back to their job, after their processes have ended. Blocks."""
        return lifecycle.shrink_hosts(record, fewer)

    def detach(self, state: ProcState, lease: object) -> None:
        """Detaches a mesh of processes with all on it; blocks until its hosts have taken it over."""
        self._runtime.part(Detacher).detach(state, parse_duration(lease) / 1e9)

    def detach_hosts(self, hosts: Sequence[str], host_mesh: str, lease: object) -> None:
        """Detaches all meshes that were spawned from here on a host mesh."""
        self._runtime.part(Detacher).detach_on(hosts, host_mesh, parse_duration(lease) / 1e9)

    def rotate_key(self, name: str, hosts: Sequence[str], file: Path, force: bool, timeout: float) -> None:
        """Changes the key of hosts, and writes it to a file here. Blocks."""
        connect.rotate_key(self._runtime, name, hosts, file, force=force, timeout=timeout)

    def source_of(self, written: str) -> HostSource:
        """Returns the source of hosts that another process has serialized. Blocks. Raises NoMoreHostsError."""
        from monarch_nb.job.named import hosts_again

        return hosts_again(written)

    def refer(self, state: MeshState) -> None:
        """Subscribes to failures, heals and the end of a mesh that is owned elsewhere, when a reference arrives."""
        self._runtime.part(MeshRegistry).subscribe(state)

    def reach(self, hosts: Iterable[str], name: str) -> None:
        """Registers hosts of this machine that a reference names. Raises UnreachableError for others."""
        if self._runtime.is_worker:  # its agent knows how every host is reached
            return
        connect.connect_named_hosts(self._runtime, hosts, name)

    def own_host(self) -> tuple[str, str | None]:
        """Returns the id of this process's host, whose agent is started if need be, and the interpreter there."""
        connect.ensure_host(self._runtime)
        return self._runtime.host, self._runtime.part(MeshRegistry).python

    def is_own_host(self, host: str) -> bool:
        """Returns whether this process is the controller, and `host` its host."""
        return host == self._runtime.host and not self._runtime.is_worker

    def hosts_answer(self, hosts: Sequence[str]) -> Future[object]:
        """Resolves when the agents of all these hosts have answered."""
        return connect.hosts_answer(hosts)

    def preempted(self, hosts: Collection[str]) -> dict[str, float | None]:
        """Returns the hosts among `hosts` that are about to be ended, and the seconds that each has left, if known."""
        now, notices = time.time(), self._runtime.part(HostNotices).of(sorted(hosts))
        return {notice.host: None if notice.until is None else max(0.0, notice.until - now) for notice in notices}

    def lost_hosts(self, hosts: Collection[str]) -> dict[str, str]:
        """Returns the hosts known as unreachable, and why; a worker attaches none and knows none."""
        routes = self._runtime.part(HostRoutes)
        if self._runtime.is_worker:
            return {}
        attached = {*routes.attached, *routes.local, *self._runtime.local_hosts}
        lost = {host: routes.attached[host].lost for host in hosts if host in routes.attached}
        absent = dict.fromkeys((host for host in hosts if host not in attached), "it is not attached any more")
        return absent | {host: reason for host, reason in lost.items() if reason}

    def outage(self, host: str) -> str:
        """Returns since when and why a host cannot be reached; "" for one that can, or that is not known here."""
        attached = self._runtime.part(HostRoutes).attached.get(host)
        return "" if attached is None else attached.outage()

    def meeting_point(self, hosts: Sequence[str]) -> str:
        """Returns the name or address by which all of these hosts reach the first; "" where that is not known."""
        routes = self._runtime.part(HostRoutes)
        remote = [host for host in hosts if host in routes.attached and not routes.attached[host].is_local]
        if len(hosts) == 1 or not remote:
            return "localhost"
        if hosts[0] not in remote:
            return socket.gethostname()
        scheme, _, rest = routes.attached[hosts[0]].endpoint.partition("://")
        return (
            rest.rpartition(":")[0].strip("[]") if scheme == "tcp" and not routes.attached[hosts[0]].via_gateway else ""
        )

    def shut_down_hosts(self, hosts: Sequence[str]) -> Future[None]:
        """Ends these hosts' agents and all processes there."""
        return connect.shutdown_hosts(hosts)

    def give_up_hosts(self, hosts: Sequence[str], reason: str) -> None:
        """Counts processes on hosts as stopped, since their starter is about to kill these. Does not block."""
        connect.give_up_hosts(hosts, reason)

    def stop_on_hosts(self, hosts: Sequence[str], host_mesh: str) -> Future[None]:
        """Stops the processes that were spawned from here on a host mesh; the agents stay."""
        return connect.stop_hosts(hosts, identity=host_mesh)

    def sync_workspace(
        self, name: str, hosts: Sequence[str], python: str | None, workspace: object, auto_reload: bool
    ) -> Sequence[str]:
        """Copies folders to hosts; returns warnings. Blocks."""
        routes = self._runtime.part(HostRoutes)

        def shares_files(host: str) -> bool:
            return host == self._runtime.host or host in routes.local or routes.attached[host].is_local

        return code.sync(name, hosts, python, workspace, auto_reload, shares_files).notes

    def logs(self, mesh: Handle[MeshState]) -> Callable[..., object]:
        """Returns the function that returns the last lines of a mesh's processes: `logs_of` for that mesh."""
        return partial(logs.logs_of, mesh)

    def show_output(self, procs: Handle[ProcState], stream: bool | None, window: float | None, level: int) -> None:
        """Sets how the output of processes is shown here. Blocks until they know the level."""
        state, region = state_of(procs), region_of(procs)
        self._runtime.part(MeshLogs).set_option(state.uid, LogOption(stream, window, level))
        console_of(state, region).run.call(set_level, (level,), {}).get()

    def put(self, value: object) -> Any:
        """Returns a reference to a value that many may read: a `monarch.rdma.Put`."""
        from monarch_nb.rdma import put

        return put(value)

    def simulated_mesh(self, procs: Handle[ProcState]) -> Any:
        """Returns a mesh of simulated ranks, with the dimensions of these processes."""
        from monarch_nb.tensor.simulated.simulator import simulated_engine

        return simulated_engine(region_of(procs).extent)

    def tensor_mesh(self, procs: Handle[ProcState]) -> Any:
        """Returns a `monarch.distributed.Mesh` for tensors of these processes' own values. The first use blocks."""
        mesh = ProcMesh(state_of(procs), region_of(procs))
        actor = running_actor()
        engine = None if actor is None else tensor_engine_of(actor.class_name)
        if actor is None or engine is None:
            return self._tensors().Mesh.for_ranks(mesh)
        meshes = self._simulated.setdefault(actor, {})
        region = region_of(procs)
        if region not in meshes:
            meshes[region] = engine(mesh)
        return meshes[region]

    @staticmethod
    def _tensors() -> ModuleType:
        try:
            from monarch_nb.tensor.ranks import arguments
        except ImportError as error:
            refuse_old_torch(error)
            raise
        return arguments

    def lent_frames(
        self, actors: Handle[ActorState], title: str, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> LentFrames:
        """Returns the body of a call with tensors of the ranks' own values among its arguments."""
        frames: LentFrames = self._tensors().lent_frames(actors, title, args, kwargs)
        return frames

    def frames_by_rank(
        self, procs: Handle[ProcState], title: str, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> list[OutFrame]:
        """Returns the body of arguments with such tensors, for actors that are spawned: each gets a copy."""
        frames: list[OutFrame] = self._tensors().frames_by_rank(procs, title, args, kwargs)
        return frames

    def tensors_of(
        self,
        actors: Handle[ActorState],
        title: str,
        propagate: object,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        post: Callable[[Sequence[OutFrame]], str],
    ) -> Any:
        """Calls an endpoint by `post`, which sends a body and returns the call's id; see `Endpoint.rref`."""
        return self._tensors().tensors_of(actors, title, propagate, args, kwargs, post)

    def metrics(self, mesh: Handle[MeshState]) -> Any:
        """Returns the values that actors have logged with `monarch.telemetry.log`."""
        from monarch_nb.telemetry.points import METRICS

        return self._runtime.feature(METRICS).of_mesh(mesh)

    def procs_of(self, actors: Handle[ActorState]) -> Handle[ProcState]:
        """Returns the processes in which the actors of a mesh, or of a slice, live."""
        return ProcMesh(state_of(actors).procs, region_of(actors))

    def shared(self, mesh: object, initialized: Future[object]) -> object:
        """Returns the wrapper of torchmonarch's programs; `block_on` and `poll` return the mesh once initialized."""
        from monarch_nb.compat.tasks import shared_when

        return shared_when(mesh, initialized)


def set_log_level(state: ProcState, rank: int, level: int) -> None:
    """Sets the level from which one process of a mesh writes records of `logging`. Does not block."""
    console_of(state, Region((), NDSlice(rank, (), ()))).run.call(set_level, (level,), {})
