"""The base of references to proc and actor meshes, and the operations that these need of the layers above."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar

from msgspec import Struct

from monarch_nb.host.protocol import Launch
from monarch_nb.mesh.host_record import HostRecord, HostSource
from monarch_nb.mesh.sending import LentFrames
from monarch_nb.runtime import ActorState, Future, MeshState, ProcState, current_runtime
from monarch_nb.shape import Extent, MeshTrait, Region
from monarch_nb.wire import OutFrame

if TYPE_CHECKING:
    from monarch_nb.mesh.host import HostMesh
    from monarch_nb.mesh.host_record import Resized

S = TypeVar("S", bound=MeshState, covariant=True)
H = TypeVar("H", bound=MeshTrait)


class Handle(MeshTrait, Generic[S]):
    """A reference to a mesh, or to a slice of one. Cheap to copy and to send; all handles of a mesh share its record.

    Engines use it through `state_of` and `region_of`: the endpoints of actors are attributes of handles, so these
    have as few names of their own as possible.
    """

    _state: S

    def __init__(self, state: S, region: Region) -> None:
        """With the record's own region, the handle means the whole mesh, also after it has grown or shrunk."""
        self._state = state
        state.handles[id(self)] = self
        self.__region = None if region is state.region else region

    @property
    def _region(self) -> Region:
        return self._state.region if self.__region is None else self.__region

    @property
    def _fixed(self) -> Region | None:
        """The ranks of a slice; None for the whole mesh, whose ranks may change."""
        return self.__region

    def _new_with_region(self, region: Region) -> Self:
        return type(self)(self._state, region)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and self._state.uid == other._state.uid and self._region == other._region

    def __hash__(self) -> int:
        return hash(self._state.uid)  # a mesh may grow

    def _shown(self) -> str:
        """Returns the mesh's name and sizes, and why it was stopped if it was."""
        sizes = ", ".join(f"{label}={size}" for label, size in self.extent.items())
        stopped = f", stopped: {self._state.stopped}" if self._state.stopped else ""
        return f"{self._state.name!r} {{{sizes}}}{stopped}"


def state_of(mesh: Handle[S]) -> S:
    """Returns the record of the whole mesh that a handle, or a slice, refers to."""
    return mesh._state


def form_of(mesh: Handle[MeshState]) -> Region | None:
    """Returns the ranks of a handle in messages: None for the whole mesh."""
    return mesh._fixed


def region_of(mesh: Handle[MeshState]) -> Region:
    """Returns the ranks that a handle means, and how they are arranged."""
    return mesh._region


def part_of(mesh: H, region: Region) -> H:
    """Returns a reference to some of the ranks of a mesh."""
    return mesh._new_with_region(region)


def as_it_is(mesh: H) -> H:
    """Returns a reference to the ranks that a mesh has now, and to no others when it grows or shrinks."""
    return mesh._new_with_region(mesh._region.sliced())


class ProcsWanted(Struct, frozen=True):
    """A proc mesh that is to be spawned: `per_host` processes on each host, row-major with the hosts outside."""

    name: str
    hosts: tuple[str, ...]
    per_host: Mapping[str, int]
    extent: Extent  # of the hosts, then of `per_host`
    env: Mapping[str, str | None]
    bootstrap: Callable[[], object] | None
    setup: tuple[tuple[str, str], ...]  # sources of set-up cells, and their names in tracebacks
    proc_bind: tuple[dict[str, str], ...]  # by process of a host; or empty
    launch: tuple[Launch, ...]  # by rank, if not the default command
    python: str | None
    record: HostRecord  # of the host mesh


class Operations(Protocol):
    """The operations of one process; the composition root makes them."""

    def spawn_actors(
        self, procs: Handle[ProcState], name: str, cls: type, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> Handle[ActorState]:
        """Spawns one actor on each process. Does not block."""

    def host_mesh(self, host: str) -> "HostMesh":
        """Returns a mesh of one host, without dimensions."""

    def spawn_procs(self, request: ProcsWanted) -> Handle[ProcState]:
        """Spawns processes. Does not block."""

    def stop(self, state: MeshState, reason: str, region: Region) -> Future[None]:
        """Stops ranks of a mesh; resolves when they have ended and their output is shown."""

    def grow_procs(self, procs: Handle[ProcState], more: Mapping[str, object], timeout: float) -> "Resized":
        """Extends a mesh of processes to more hosts. Blocks."""

    def shrink_procs(self, procs: Handle[ProcState], fewer: Mapping[str, object]) -> "Resized":
        """Removes hosts from a mesh of processes. Blocks until the processes there have ended."""

    def grow_hosts(self, record: HostRecord, more: Mapping[str, object], timeout: float) -> "Resized":
        """Has a job add hosts to a host mesh. Blocks."""

    def shrink_hosts(self, record: HostRecord, fewer: Mapping[str, object]) -> "Resized":
        """Gives hosts back to their job, after ending the processes there. Blocks."""

    def detach(self, state: ProcState, lease: object) -> None:
        """Detaches a mesh of processes with all on it; blocks until its hosts have taken it over."""

    def detach_hosts(self, hosts: Sequence[str], host_mesh: str, lease: object) -> None:
        """Detaches all meshes that were spawned from here on a host mesh, as `detach` does."""

    def source_of(self, written: str) -> HostSource:
        """Returns the source of hosts that another process has serialized. Blocks. Raises NoMoreHostsError."""

    def refer(self, state: MeshState) -> None:
        """Subscribes to failures, heals and the end of a mesh that is owned elsewhere and now referenced here."""

    def reach(self, hosts: Iterable[str], name: str) -> None:
        """Registers hosts of this machine that a reference names. Raises UnreachableError for others."""

    def own_host(self) -> tuple[str, str | None]:
        """The id of this process's host, whose agent is started if need be, and the interpreter for processes there."""

    def is_own_host(self, host: str) -> bool:
        """Returns whether this process is the controller, and `host` its host."""

    def hosts_answer(self, hosts: Sequence[str]) -> Future[object]:
        """Resolves when the agents of all these hosts have answered."""

    def preempted(self, hosts: Collection[str]) -> dict[str, float | None]:
        """Returns the hosts that are about to be ended, with the seconds that each has left, if known."""

    def lost_hosts(self, hosts: Collection[str]) -> dict[str, str]:
        """Returns the hosts known to be unreachable, and why."""

    def outage(self, host: str) -> str:
        """Returns since when and why a host cannot be reached; "" for one that can, or that is not known here."""

    def meeting_point(self, hosts: Sequence[str]) -> str:
        """Returns the name or address by which all of these hosts reach the first; "" where that is not known."""

    def shut_down_hosts(self, hosts: Sequence[str]) -> Future[None]:
        """Ends these hosts' agents and all processes there."""

    def give_up_hosts(self, hosts: Sequence[str], reason: str) -> None:
        """Counts processes on hosts as stopped, since their starter is about to kill these. Does not block."""

    def rotate_key(self, name: str, hosts: Sequence[str], file: Path, force: bool, timeout: float) -> None:
        """Changes the key of hosts, and writes it to a file here. Blocks."""

    def stop_on_hosts(self, hosts: Sequence[str], host_mesh: str) -> Future[None]:
        """Stops the processes that were spawned from here on a host mesh; the agents stay."""

    def sync_workspace(
        self, name: str, hosts: Sequence[str], python: str | None, workspace: object, auto_reload: bool
    ) -> Sequence[str]:
        """Copies folders to hosts; returns warnings. Blocks."""

    def logs(self, mesh: Handle[MeshState]) -> Callable[..., object]:
        """Returns the function that returns the last lines of a mesh's processes: `logs_of` for that mesh."""

    def show_output(self, procs: Handle[ProcState], stream: bool | None, window: float | None, level: int) -> None:
        """Sets how the output of processes is shown here. Blocks until they know the level."""

    def put(self, value: object) -> Any:
        """Returns a reference to a value stored for many calls: a `monarch.rdma.Put`."""

    def simulated_mesh(self, procs: Handle[ProcState]) -> Any:
        """Returns a mesh of simulated ranks, with the dimensions of these processes: a `monarch.distributed.Mesh`."""

    def tensor_mesh(self, procs: Handle[ProcState]) -> Any:
        """Returns the `monarch.distributed.Mesh` of tensors of these processes' own values. The first use blocks."""

    def lent_frames(
        self, actors: Handle[ActorState], title: str, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> LentFrames:
        """Returns the body of a call with tensors of the ranks' own values among its arguments.

        Raises ValueError for tensors that are not on the processes of these actors.
        """

    def frames_by_rank(
        self, procs: Handle[ProcState], title: str, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> list[OutFrame]:
        """Returns the body of arguments with such tensors among them, for actors that are spawned: each gets a copy."""

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

    def metrics(self, mesh: Handle[MeshState]) -> Any:
        """Returns the values that actors have logged by `monarch.telemetry.log`."""

    def procs_of(self, actors: Handle[ActorState]) -> Handle[ProcState]:
        """Returns the processes in which the actors of a mesh, or of a slice, live."""

    def shared(self, mesh: object, initialized: Future[object]) -> object:
        """Returns the wrapper of torchmonarch's programs; `block_on` and `poll` return the mesh once initialized."""


def operations() -> Operations:
    """Returns the operations of this process, which becomes a controller unless it has a role already."""
    return current_runtime().part(Operations)  # type: ignore[type-abstract]
