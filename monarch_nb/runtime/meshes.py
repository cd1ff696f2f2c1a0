"""Records of meshes in a process: one per mesh, shared by all its slices and references."""

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol
from weakref import WeakValueDictionary

from msgspec import Struct, field

from monarch_nb.runtime.actors.actor import Kind as ActorKind
from monarch_nb.runtime.context import Instance
from monarch_nb.runtime.future import Future
from monarch_nb.shape import Region, runs
from monarch_nb.wire import Layout, Run, name_text

if TYPE_CHECKING:
    from monarch_nb.runtime.stored_answers import UnreadCalls


class SpawnSpec(Protocol):
    """The specification with which a mesh was spawned, kept by its owner to start ranks again."""

    instance: Instance  # its owner

    @property
    def initialized(self) -> Future[object]:
        """Resolves once its set-up has run."""

    def release(self) -> None:
        """Releases resources for heals, once the mesh has stopped."""


class ActorsSpawnSpec(SpawnSpec, Protocol):
    """The specification with which a mesh of actors was spawned."""

    cls: type  # the class of its actors

    def newest(self) -> type:
        """Returns the current definition of the class."""


def ranks_of(region: Region) -> Sequence[int]:
    """Returns the base ranks of a region in its order; a range if they are consecutive."""
    pieces = runs(region)
    if len(pieces) == 1 and pieces[0].stride == 1:
        return range(pieces[0].rank, pieces[0].rank + pieces[0].count)
    return region.ranks()


class MeshState(Struct, eq=False):
    """The record of one mesh in this process; `owner_process` is always right."""

    uid: str
    name: str
    region: Region  # the whole mesh, over base ranks of its proc mesh
    owner_process: str
    incarnations: dict[int, int] = field(default_factory=dict)  # only ranks that were healed
    version: int = 0  # grows with each heal, and each change of its extent; older updates are ignored
    stopped: str | None = None  # the reason, once it is stopped
    detached: bool = False  # `stopped` holds for its handles here alone: it runs without this process
    resized: bool = False  # its region, or its hosts, have changed since it was spawned
    pending_region: Region | None = None  # the region that it is growing to
    lock: threading.Lock = field(default_factory=threading.Lock)
    spawn_spec: SpawnSpec | None = None  # how it was spawned; stored by the owner for heals
    handles: WeakValueDictionary[int, object] = field(default_factory=WeakValueDictionary)  # in this process, by id

    def __post_init__(self) -> None:
        self.name = name_text(self.name)

    @property
    def end_text(self) -> str:
        """Says why it cannot be used here any more, and what to do."""
        if self.detached:
            again = f"monarch.attach({self.name!r}) comes back to it"
            return f"{self.name} runs without this program ({self.stopped}): {again}"
        return f"{self.name} was stopped ({self.stopped}): spawn a new one"

    @property
    def ranks(self) -> Sequence[int]:
        """Its base ranks, in the order of its region; a range if they are consecutive."""
        return ranks_of(self.region)

    @property
    def inner(self) -> bool:
        """True if the library has spawned it to serve another mesh; displays then show only that mesh."""
        return False

    def incarnation(self, rank: int) -> int:
        """Returns the current incarnation of a rank."""
        return self.incarnations.get(rank, 0)

    def renew(self, incarnations: dict[int, int], version: int, region: Region | None = None) -> bool:
        """Takes over the changes of a heal, or of its extent to `region`; returns whether they were new."""
        with self.lock:
            if version <= self.version:
                return False
            self.incarnations = dict(incarnations)
            self.version = version
            if region is not None:
                self.region, self.resized = region, True
            return True


class ProcState(MeshState, eq=False):
    """A mesh of processes."""

    layout: Layout = Layout("", (), 1)
    unread: "UnreadCalls | None" = (
        None  # calls from here whose answers ranks store; None unless it outlives this process
    )
    actors: "dict[str, ActorState]" = field(default_factory=dict)  # actor meshes spawned on it from this process

    @property
    def hosts(self) -> tuple[str, ...]:
        """Its current hosts, in its order; its layout may name others, which it had before it shrank."""
        layout = self.layout
        if self.ranks == range(layout.size):
            return layout.hosts
        return tuple(layout.hosts[number] for number in dict.fromkeys(rank // layout.per_host for rank in self.ranks))

    def address(self, rank: int) -> str:
        """Returns the address of a rank's current process."""
        return self.layout.address(rank, self.incarnation(rank))


def proc_state_of(state: MeshState) -> ProcState:
    """Returns the record of the processes of a mesh: its own, or those in which its actors live."""
    procs = state.procs if isinstance(state, ActorState) else state
    assert isinstance(procs, ProcState)
    return procs


class ActorState(MeshState, eq=False, kw_only=True):
    """A mesh of actors; a rank lives in the process of the same rank."""

    procs: ProcState
    spawn_spec: ActorsSpawnSpec | None = None
    cls: type = object
    kind: ActorKind = "async"
    edition: int = 0  # grows when its class is replaced

    @property
    def inner(self) -> bool:
        """True if its class has `__inner__ = True`."""
        return bool(getattr(self.cls, "__inner__", False))

    @property
    def lineage(self) -> str:
        """The start of its actors' ids, up to the name of the mesh; "" where another process has spawned it."""
        spec = self.spawn_spec
        return "" if spec is None else f"{spec.instance}.<{spec.cls.__module__}.{spec.cls.__qualname__} "

    def runs(self, region: Region) -> Sequence[Run]:
        """Returns the ranks of a slice, run-length encoded, each with both its incarnations."""
        plain = runs(region)
        if not (self.incarnations or self.procs.incarnations):
            return plain
        healed = self._healed()
        return [part for run in plain for part in self._split(run, healed)]

    def _healed(self) -> set[int]:
        return self.incarnations.keys() | self.procs.incarnations.keys()

    def _split(self, run: Run, healed: set[int]) -> list[Run]:
        positions = sorted(
            (rank - run.rank) // run.stride
            for rank in healed
            if (rank == run.rank or (run.stride and (rank - run.rank) % run.stride == 0))
            and 0 <= (rank - run.rank) // (run.stride or 1) < run.count
        )
        parts, start = [], 0
        for position in positions:
            if position > start:
                parts.append(self._part(run, start, position - start))
            parts.append(self._part(run, position, 1))
            start = position + 1
        if start < run.count:
            parts.append(self._part(run, start, run.count - start))
        return parts

    def _part(self, run: Run, start: int, count: int) -> Run:
        rank = run.rank + start * run.stride
        return Run(
            rank=rank,
            count=count,
            stride=run.stride,
            proc_incarnation=self.procs.incarnation(rank),
            incarnation=self.incarnation(rank),
            seq=run.seq,
            index=run.index + start * run.index_stride,
            index_stride=run.index_stride,
        )
