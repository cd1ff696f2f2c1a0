"""The meshes that a process knows, the status of their ranks, and the owners of meshes with failures to handle.

Ranks that never failed take no space.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

import msgspec
from msgspec import Struct, field

from monarch_nb.runtime import Cause, stop_cause
from monarch_nb.wire.header import Layout

from .failure import MeshFailure
from .ranks import Extent, RankIncarnation, Selection, label, selects

State = Literal["alive", "failed", "healing", "stopped"]
MeshKind = Literal["procs", "actors"]


class RankStatus(Struct, frozen=True):
    """The status of one rank: since `cause.at` if it is not alive."""

    state: State = "alive"
    incarnation: int = 0
    cause: Cause | None = None
    failure_id: int = 0


ALIVE = RankStatus()


class MeshSpec(Struct, frozen=True, kw_only=True):
    """A mesh as it was spawned. `ranks` are proc ranks in its own row-major order; `on` is the uid of its procs."""

    uid: str
    name: str
    kind: MeshKind
    ranks: Sequence[int]
    extent: Extent = ((), ())
    on: str | None = None
    layout: Layout | None = None
    lineage: str = ""  # of its actors, as `<root>.<module.Class `, which a name and `>` complete; "" if not known here


class MeshRecord(Struct, eq=False):
    """One mesh, and the status of its ranks."""

    spec: MeshSpec
    owner: str | None = None  # an actor of this process; None: an owner elsewhere, whose mesh is only referred to
    process: str = ""  # that of the owner, if elsewhere
    ended: Cause | None = None
    odd: dict[int, RankStatus] = field(default_factory=dict)
    down: int = 0  # the number of these that are not alive
    since: dict[int, int] = field(default_factory=dict)  # of healed ranks, the last loss of their host before
    uid: str = ""
    name: str = ""
    on: str | None = None
    former: dict[int, str] = field(default_factory=dict)  # ranks that it had before it shrank, with their names
    _indices: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.uid, self.name, self.on = self.spec.uid, self.spec.name, self.spec.on

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks of its procs."""
        return self.spec.ranks

    @property
    def is_procs(self) -> bool:
        """True for a proc mesh."""
        return self.spec.kind == "procs"

    def __contains__(self, rank: int) -> bool:
        return self._has(rank) or rank in self.former

    def _has(self, rank: int) -> bool:
        return rank in self.ranks if isinstance(self.ranks, range) else rank in self._index_by_rank()

    def _index_by_rank(self) -> dict[int, int]:
        if not self._indices and self.ranks:
            self._indices = {rank: index for index, rank in enumerate(self.ranks)}
        return self._indices

    def index_of(self, rank: int) -> int:
        """Returns the row-major index of `rank` in this mesh."""
        return self.ranks.index(rank) if isinstance(self.ranks, range) else self._index_by_rank()[rank]

    def at(self, rank: int) -> RankStatus:
        """Returns the status of a rank."""
        status = self.odd.get(rank, ALIVE)
        if self.ended is None:
            return status
        state: State = "stopped" if self.ended.kind in ("stopped", "left", "taken") else "failed"
        return RankStatus(state, status.incarnation, self.ended)

    def is_current(self, rank: int, incarnation: int) -> bool:
        """Returns whether an event of this incarnation of a rank still matters."""
        status = self.at(rank)
        return rank in self and status.state in ("alive", "healing") and status.incarnation == incarnation

    def begin(self, incarnations: Mapping[int, int]) -> None:
        """Notes ranks that were healed before this process knew of the mesh."""
        for rank, incarnation in incarnations.items():
            if incarnation and rank in self:
                self.put(rank, "alive", incarnation)

    def learn(self, rank: int, incarnation: int, *, back: bool = False) -> bool:
        """Notes that another owner has healed a rank of a mesh that is only referred to here.

        With `back` its owner reports this incarnation as present, which overrides an earlier conclusion that it was
        never started.
        """
        status = self.odd.get(rank, ALIVE)
        missed = back and status.state == "failed" and status.cause is not None and status.cause.kind == "spawn"
        is_news = self.owner is None and rank in self and incarnation >= status.incarnation + (not missed)
        if is_news:
            self.put(rank, "alive", incarnation)
        return is_news

    def put(self, rank: int, state: State, incarnation: int, cause: Cause | None = None, failure_id: int = 0) -> None:
        """Sets the status of a rank."""
        if rank not in self.former:
            self.down += (state != "alive") - (self.odd.get(rank, ALIVE).state != "alive")
        self.odd[rank] = RankStatus(state, incarnation, cause, failure_id)

    def failed(self, selection: Selection = None) -> list[int]:
        """Returns selected ranks that have failed or are being healed, in rank order."""
        return sorted(
            rank
            for rank, status in self.odd.items()
            if status.state in ("failed", "healing") and selects(selection, rank)
        )

    def incarnations(self, ranks: Iterable[int]) -> tuple[RankIncarnation, ...]:
        """Returns ranks with their incarnations."""
        return tuple((rank, self.odd.get(rank, ALIVE).incarnation) for rank in ranks)

    def ranks_on(self, host: str) -> Iterator[int]:
        """Yields the ranks whose procs are on a host."""
        layout = self.spec.layout
        return iter(()) if layout is None else (rank for rank in layout.ranks_on(host) if rank in self)

    def label(self, rank: int) -> str:
        """Returns the label of a rank."""
        return self.former.get(rank) or self.name + label(self.spec.extent, self.index_of(rank))

    def reshape(self, spec: MeshSpec) -> list[int]:
        """Replaces its ranks, or hosts; returns the ranks that are no longer part of it."""
        before, self._indices = {rank: self.label(rank) for rank in self.ranks}, {}
        self.spec = spec
        self.former = {rank: name for rank, name in {**self.former, **before}.items() if not self._has(rank)}
        self.down = sum(status.state != "alive" for rank, status in self.odd.items() if rank not in self.former)
        return [rank for rank in before if rank in self.former]

    def failure(
        self, ranks: Sequence[int], cause: Cause, failure_id: int = 0, also: tuple[str, ...] = (), healing: bool = False
    ) -> MeshFailure:
        """Returns the failure of some ranks, for display."""
        if not cause.actor:
            name = self.label(ranks[0]) if len(ranks) == 1 else self.name
            lineage = self.spec.lineage
            cause = msgspec.structs.replace(cause, actor=f"{lineage}{name}>" if lineage else name)
        return MeshFailure(
            mesh_name=self.name,
            cause=cause,
            failure_id=failure_id,
            mesh_uid=self.uid,
            procs=self.is_procs,
            extent=self.spec.extent,
            places=tuple(self.index_of(rank) for rank in ranks if rank not in self.former),
            also=also,
            healing=healing,
            left=len(self.ranks)
            - self.down
            - sum(self.odd.get(rank, ALIVE).state == "alive" for rank in ranks if rank not in self.former),
        )


def _alike(first: RankStatus, second: RankStatus) -> bool:
    if first.cause is second.cause:
        return True
    return first.cause is not None and second.cause is not None and first.cause.likeness == second.cause.likeness


class MeshRecords:
    """All meshes by uid, and the actor meshes on each proc mesh in the order they were spawned."""

    def __init__(self) -> None:
        self.meshes: dict[str, MeshRecord] = {}
        self._on: dict[str, list[str]] = {}
        self.losses: dict[str, int] = {}  # the number of the last loss of each host, if any

    def add(self, mesh: MeshRecord) -> None:
        """Adds a mesh, and its procs if they belong to another owner."""
        earlier = self.meshes.get(mesh.uid)
        if earlier is not None:  # procs that were first seen through actors on them
            incarnations = mesh.incarnations(mesh.odd)
            mesh.odd, mesh.down, mesh.ended, mesh.since = earlier.odd, earlier.down, earlier.ended, earlier.since
            for rank, incarnation in incarnations:
                if incarnation > mesh.odd.get(rank, ALIVE).incarnation:
                    mesh.put(rank, "alive", incarnation)
        self.meshes[mesh.uid] = mesh
        if mesh.on is None or earlier is not None:
            return
        self._on.setdefault(mesh.on, []).append(mesh.uid)
        if mesh.on not in self.meshes:
            layout = mesh.spec.layout
            size = layout.size if layout else max(mesh.ranks, default=-1) + 1
            spec = MeshSpec(
                uid=mesh.on,
                name=f"the procs of {mesh.name}",
                kind="procs",
                ranks=range(size),
                extent=(("procs",), (size,)),
                layout=layout,
            )
            self.meshes[mesh.on] = MeshRecord(spec)

    def procs_of(self, uid: str) -> str:
        """Returns the uid of a mesh's procs, or its own if it is a proc mesh."""
        mesh = self.meshes.get(uid)
        return uid if mesh is None or mesh.on is None else mesh.on

    def remove(self, uid: str) -> None:
        """Removes a mesh, and procs of another owner that were known only through it."""
        mesh = self.meshes.pop(uid, None)
        if mesh is None or mesh.on is None:
            return
        siblings = self._on[mesh.on]
        siblings.remove(uid)
        procs = self.meshes.get(mesh.on)
        if not siblings:
            del self._on[mesh.on]
            if procs is not None and procs.owner is None and not procs.process:
                del self.meshes[mesh.on]

    def lost_with(self, procs: MeshRecord, host: str, loss: int) -> list[tuple[MeshRecord, int]]:
        """Returns the ranks lost with a host, without those healed after that loss, however late its report is."""
        lost = self.hit_with(procs, procs.ranks_on(host))
        return [(mesh, rank) for mesh, rank in lost if not 0 < loss <= self.since(mesh, rank)]

    def since(self, mesh: MeshRecord, rank: int) -> int:
        """Returns the number of the host's last loss before a rank was healed; 0 if there was none."""
        procs = None if mesh.on is None else self.meshes.get(mesh.on)
        return max(mesh.since.get(rank, 0), 0 if procs is None else procs.since.get(rank, 0))

    def comes(self, procs: MeshRecord, rank: int) -> None:
        """Notes that a rank is being healed: losses of its host known by now do not affect it."""
        layout = procs.spec.layout
        loss = 0 if layout is None or not self.losses else self.losses.get(layout.host_of(rank), 0)
        if loss:
            procs.since[rank] = loss

    def leave(self, uid: str, cause: Cause) -> list[MeshRecord]:
        """Gives up the ownership of procs and all actors on them; returns the meshes that had not ended before."""
        mesh = self.meshes.get(uid)
        members = [member for member in (self.family(mesh) if mesh is not None else ()) if member.ended is None]
        for member in members:
            member.ended = cause
        return members

    def on(self, proc_mesh_uid: str) -> list[MeshRecord]:
        """Returns the actor meshes on some procs, in the order of their spawns."""
        return [self.meshes[uid] for uid in self._on.get(proc_mesh_uid, ())]

    def family(self, mesh: MeshRecord) -> list[MeshRecord]:
        """Returns the procs and all actor meshes on them, in the order of their spawns."""
        root = mesh if mesh.on is None else self.meshes[mesh.on]
        return [root, *self.on(root.uid)]

    def hit_with(self, mesh: MeshRecord, ranks: Iterable[int]) -> list[tuple[MeshRecord, int]]:
        """Returns the ranks that are lost with some of a mesh: living ones, and for procs the actors on them."""
        hits: list[tuple[MeshRecord, int]] = []
        for rank in ranks:
            for member in (mesh, *self.on(mesh.uid)):
                if rank in member and member.at(rank).state in ("alive", "healing"):
                    hits.append((member, rank))
        return hits

    def broken(self, mesh: MeshRecord, selection: Selection) -> MeshFailure | None:
        """Returns the failure with which calls on these ranks are answered; None if all of them take calls."""
        if mesh.ended is not None:
            return mesh.failure((), mesh.ended)
        bad = [rank for rank, status in mesh.odd.items() if status.state != "alive" and selects(selection, rank)]
        if not bad:
            return None
        first = mesh.odd[min(bad, key=lambda rank: (mesh.odd[rank].failure_id, rank))]
        cause = first.cause or stop_cause(f"{mesh.name} is {first.state}")
        ranks = [rank for rank in bad if _alike(mesh.odd[rank], first)]  # others have failed for another reason
        return mesh.failure(sorted(ranks), cause, first.failure_id, healing=first.state == "healing")

    def status(self, uid: str) -> Mapping[int, RankStatus]:
        """Returns the status of each rank, in the mesh's order. Raises KeyError for an unknown mesh."""
        mesh = self.meshes[uid]
        return {rank: mesh.at(rank) for rank in mesh.ranks}


class RoutedFailure(Struct, frozen=True):
    """A failure on its way to an owner."""

    failure: MeshFailure
    awaited: bool  # a call that depends on the failed ranks is awaited


class Owner(Struct):
    """An actor of this process that owns meshes."""

    actor: str
    name: str
    mesh_uid: str | None = None  # the mesh of which it is a member, if known here
    incarnation: RankIncarnation | None = None
    owned: dict[str, None] = field(default_factory=dict)  # in the order of their spawns
    queue: deque[RoutedFailure] = field(default_factory=deque)
    current: RoutedFailure | None = None


class Tree:
    """The owners of this process."""

    def __init__(self) -> None:
        self._owners: dict[str, Owner] = {}
        self._ended: set[str] = set()

    def join(
        self, actor: str, name: str = "", mesh_uid: str | None = None, incarnation: RankIncarnation | None = None
    ) -> Owner | None:
        """Returns the record of an owner, created at first use; None if the owner has ended."""
        if actor in self._ended:
            return None
        owner = self._owners.setdefault(actor, Owner(actor, name or actor))
        if name:
            owner.name = name
        if mesh_uid is not None:
            owner.mesh_uid, owner.incarnation = mesh_uid, incarnation
        return owner

    def get(self, actor: str) -> Owner | None:
        """Returns the record of an owner, if it has one."""
        return self._owners.get(actor)

    def members(self, mesh_uid: str, incarnation: RankIncarnation | None = None) -> Iterator[str]:
        """Yields owners that are members of a mesh, or the one with this incarnation in it."""
        owners = [o for o in self._owners.values() if o.mesh_uid == mesh_uid and incarnation in (None, o.incarnation)]
        yield from (owner.actor for owner in owners)

    def end(self, actor: str) -> list[str]:
        """Removes an owner, with failures that are on their way to it. Returns its meshes, the newest first."""
        self._ended.add(actor)
        owner = self._owners.pop(actor, None)
        return list(reversed(owner.owned)) if owner else []

    def push(self, actor: str, entry: RoutedFailure) -> RoutedFailure | None:
        """Queues a failure for an owner; returns the entry if it is to be handled now."""
        owner = self._owners.get(actor)
        if owner is None:
            return None
        owner.queue.append(entry)
        return self.advance(owner)

    def advance(self, owner: Owner) -> RoutedFailure | None:
        """Returns the owner's next failure, unless one is being handled or none waits."""
        if owner.current is not None or not owner.queue:
            return None
        owner.current = owner.queue.popleft()
        return owner.current

    def finish(self, failure_id: int) -> tuple[Owner, RoutedFailure] | None:
        """Ends an owner's handling of a failure; returns both, None if the failure is no longer of interest."""
        for owner in self._owners.values():
            entry = owner.current
            if entry is not None and entry.failure.failure_id == failure_id:
                owner.current = None
                return owner, entry
        return None
