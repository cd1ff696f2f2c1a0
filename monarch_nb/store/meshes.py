"""The meshes of the cluster: their descriptions, the reported facts and states of their ranks, and their end."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import msgspec

from monarch_nb.store import events as e
from monarch_nb.store.events import ActivityChanged, CallPending, Condition
from monarch_nb.store.records import Board, MeshFields, RankState
from monarch_nb.wire import host_name

_OPERATIONS = "operations on tensors"  # shown for the library's own actors, which users cannot name
_WHILE_IT_RUNS = ("state", "since", "endpoint", "queue", "rate", "cpu", "memory", "memory_kind", "gpu", "detail")


@dataclass(slots=True)
class Rank:
    """The facts about one rank of a mesh."""

    condition: Condition
    incarnation: int = 0
    since: float = 0.0  # of the condition
    unanswered: float | None = None  # procs: the time since which the process has not answered
    paused: float | None = None  # the time since which the debugger has held it
    doing: ActivityChanged | None = None  # reported by its process, with a small delay
    pending: CallPending | None = None  # a pending call of this process to the rank
    # Of procs: running calls of actors on it, by the uid of their mesh.
    busy: dict[str, ActivityChanged | CallPending] | None = None
    shown: RankState = "starting"  # in the document


class RankTable:
    """The ranks of one mesh by index. Ranks without reports share one record, as most of ten thousand do."""

    __slots__ = ("_count", "_own", "usual")

    def __init__(self, count: int, usual: Rank) -> None:
        self._count = count
        self.usual = usual
        self._own: dict[int, Rank] = {}

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Rank:
        """Returns a rank's record, for reading."""
        return self._own.get(index, self.usual)

    def __iter__(self) -> Iterator[Rank]:
        return map(self.__getitem__, range(self._count))

    def own(self, index: int) -> Rank:
        """Returns a rank's own record, for writing; created when needed."""
        rank = self._own.get(index)
        if rank is None:
            rank = self._own[index] = replace(self.usual)
        return rank

    def give(self, index: int, target: "RankTable", new_index: int) -> None:
        """Copies a rank's own record, if it has one, to another table."""
        if index in self._own:
            target._own[new_index] = self._own[index]

    def recorded(self) -> list[tuple[int, Rank]]:
        """Returns ranks with their own records."""
        return list(self._own.items())

    @property
    def silent(self) -> int:
        """The number of ranks without their own record."""
        return self._count - len(self._own)

    def records(self) -> list[Rank]:
        """Returns all records, the shared one included."""
        return [self.usual, *self._own.values()]


def working(rank: Rank) -> ActivityChanged | CallPending | None:
    """Returns the call that a rank runs, as far as known; None for none."""
    return rank.doing if rank.doing is not None and rank.doing.doing == "busy" else rank.pending


class ShownState(NamedTuple):
    """The state in the document, its beginning, and the running call of a busy rank."""

    state: RankState
    since: float
    running: ActivityChanged | CallPending | None = None


def rank_state(rank: Rank, proc: Rank | None) -> ShownState:
    """Returns the state of a rank; `proc` is the process of an actor, if known.

    The condition takes precedence, then causes that hold the rank up, then its activity.
    """
    if rank.condition != "alive":
        return ShownState(rank.condition, rank.since)
    if rank.paused is not None:
        return ShownState("paused", rank.paused)
    unanswered = rank.unanswered if proc is None else proc.unanswered
    if unanswered is not None:
        return ShownState("unresponsive", unanswered)
    if rank.doing is not None and rank.doing.doing != "idle":
        return ShownState(rank.doing.doing, rank.doing.since, rank.doing)
    if rank.pending is not None:
        return ShownState("busy", rank.pending.since, rank.pending)
    if rank.busy:
        running = next(iter(rank.busy.values()))
        return ShownState("busy", running.since, running)
    return ShownState("idle", rank.since)


@dataclass(slots=True)
class MeshEntry:
    """A mesh. Its ranks are in its own order, each given by the base rank of its proc."""

    event: e.MeshDescription
    default: RankState  # of ranks without their own record
    ranks: RankTable
    counts: dict[str, int] = field(default_factory=dict)
    on_it: list[str] = field(default_factory=list)  # uids of the actor meshes on these procs
    ended: bool = False
    _first: int = 0
    _index: dict[int, int] | None = None  # by base rank; None where base ranks are one range

    @classmethod
    def spawned(cls, event: e.MeshDescription) -> "MeshEntry":
        """Returns a mesh whose ranks are all in the same state."""
        default: RankState = "idle" if event.ready else "starting"
        condition: e.Condition = "alive" if event.ready else "starting"
        ranks = RankTable(len(event.ranks), Rank(condition, since=event.at, shown=default))
        mesh = cls(event, default, ranks, {default: len(ranks)})
        if isinstance(event.ranks, range) and event.ranks.step == 1:
            mesh._first = event.ranks.start
        else:
            mesh._index = {base: index for index, base in enumerate(event.ranks)}
        return mesh

    def index_of(self, base: int) -> int:
        """Returns the index of a base rank; -1 if the mesh does not contain it."""
        if self._index is not None:
            return self._index.get(base, -1)
        index = base - self._first
        return index if 0 <= index < len(self.ranks) else -1

    def record(self) -> MeshFields:
        """Returns its first record in the document."""
        event = self.event
        record: MeshFields = {
            "name": event.name,
            "kind": event.kind,
            "labels": list(event.labels),
            "sizes": list(event.sizes),
            "offset": event.offset,
            "strides": list(event.strides),
            "state": self.default,
            "born": event.at,
            "owner": event.owner,
            "mine": event.mine,
            "counts": dict(self.counts),
        }
        if event.picked:
            record["picked"] = list(event.picked)
        if event.kind == "procs":
            return {**record, "hosts": list(event.hosts), "per_host": event.per_host}
        record = {**record, "class": event.actor_class, "on": event.on}
        if event.inner:
            record["inner"] = True
        return record


class Meshes:
    """All meshes by uid; writes their records to the board."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._meshes: dict[str, MeshEntry] = {}
        self._recounted: set[str] = set()  # meshes whose counts must be written to the document

    # -- queries ----------------------------------------------------------------------------------------------------

    def get(self, uid: str) -> MeshEntry | None:
        """Returns a mesh, ended or not."""
        return self._meshes.get(uid)

    def find(self, uid: str, base: int) -> tuple[MeshEntry | None, int]:
        """Returns a mesh that has not ended, and the index of a base rank in it."""
        mesh = self._meshes.get(uid)
        if mesh is None or mesh.ended:
            return None, -1
        index = mesh.index_of(base)
        return (mesh, index) if index >= 0 else (None, -1)

    def above(self, procs: MeshEntry, base: int) -> Iterator[tuple[MeshEntry, int]]:
        """Yields the actors on a process."""
        for uid in procs.on_it:
            mesh, index = self.find(uid, base)
            if mesh is not None:
                yield mesh, index

    def below(self, mesh: MeshEntry, index: int) -> tuple[MeshEntry, int] | None:
        """Returns the process of an actor, if known."""
        procs = self._meshes.get(mesh.event.on)
        base = -1 if procs is None else procs.index_of(mesh.event.ranks[index])
        return None if procs is None or base < 0 else (procs, base)

    def __iter__(self) -> Iterator[MeshEntry]:
        return iter(self._meshes.values())

    # -- events of meshes -------------------------------------------------------------------------------------------

    def spawned(self, event: e.MeshDescription) -> None:
        """Adds a mesh that was spawned, or attached again after this process had left it."""
        before = self._meshes.get(event.uid)
        if before is not None:
            if not before.ended:
                return
            self.forgotten(e.MeshForgotten(event.uid))
        mesh = self._meshes[event.uid] = MeshEntry.spawned(event)
        procs = self._meshes.get(event.on)
        if procs is not None:
            procs.on_it.append(event.uid)
        for host in event.hosts:
            if host not in self._board.document["hosts"]:
                self._board.put("hosts", host, {"name": host_name(host), "state": "up"})
        self._board.put("meshes", event.uid, mesh.record())
        self._board.put("ranks", event.uid, {})
        for index in range(len(mesh.ranks)):  # its procs may have failed, or be stopped in the debugger
            proc = self.below(mesh, index)
            if proc is not None and proc[0].ranks[proc[1]].shown in ("paused", "unresponsive"):
                self.show(mesh, index)

    def resized(self, event: e.MeshRedescribed) -> None:
        """Gives a mesh its new extent: remaining ranks keep their records under their new indices."""
        before = self._meshes.get(event.mesh.uid)
        if before is None or before.ended:
            return
        uid = event.mesh.uid
        shown = {index: dict(record) for index, record in self._board.document["ranks"].get(uid, {}).items()}
        spawned = msgspec.structs.replace(event.mesh, at=before.event.at, ready=before.default != "starting")
        mesh = self._meshes[uid] = MeshEntry.spawned(spawned)
        mesh.on_it = before.on_it
        records: dict[str, dict[str, object]] = {}
        for index, base in enumerate(event.mesh.ranks):
            old = before.index_of(base)
            if old >= 0:
                before.ranks.give(old, mesh.ranks, index)
                records[str(index)] = dict(shown.get(str(old), {}))
        mesh.counts = dict(Counter(rank.shown for rank in mesh.ranks))
        for host in event.mesh.hosts:
            if host not in self._board.document["hosts"]:
                self._board.put("hosts", host, {"name": host_name(host), "state": "up"})
        self._board.put("meshes", uid, mesh.record())
        for key in {*shown, *records}:  # fields that no longer exist are set to None
            self._board.change_rank(uid, key, {**dict.fromkeys(shown.get(key, ())), **records.get(key, {})})

    def ready(self, event: e.MeshReady) -> None:
        """Notes that the start of a mesh is complete."""
        mesh = self._meshes.get(event.uid)
        if mesh is None or mesh.ended or mesh.default != "starting":
            return
        for rank in mesh.ranks.records():
            if rank.condition == "starting":
                rank.condition, rank.since = "alive", event.at
        self._settle_on(mesh, "idle")
        for index in range(len(mesh.ranks)):
            self.show(mesh, index)

    def unheld(self, event: e.MeshUnheld) -> None:
        """Notes that no variable refers to the mesh any more, or that one does again."""
        mesh = self._meshes.get(event.uid)
        if mesh is not None and not mesh.ended:
            self._board.change("meshes", event.uid, {"unheld": event.since})

    def ended(self, event: e.MeshEnded) -> None:
        """Notes that a mesh was stopped, or has lost its owner."""
        mesh = self._meshes.get(event.uid)
        if mesh is None or mesh.ended:
            return
        state: RankState = "failed" if event.failed else "stopped"
        mesh.ended = True
        for rank in mesh.ranks.records():
            rank.shown, rank.doing, rank.pending, rank.busy = state, None, None, None
        mesh.default = state
        mesh.counts = {state: len(mesh.ranks)}
        self._recounted.add(event.uid)
        self._board.change("meshes", event.uid, {"state": state, "stopped": event.why, "ended": event.at})
        for key in self._board.document["ranks"].get(event.uid, {}):
            self._board.change_rank(event.uid, key, dict.fromkeys(_WHILE_IT_RUNS))
        for index in range(len(mesh.ranks)):
            self.rests(mesh, index)

    def forgotten(self, event: e.MeshForgotten) -> None:
        """Removes an ended mesh from the state."""
        mesh = self._meshes.pop(event.uid, None)
        if mesh is None:
            return
        procs = self._meshes.get(mesh.event.on)
        if procs is not None and event.uid in procs.on_it:
            procs.on_it.remove(event.uid)
        self._board.put("meshes", event.uid, None)
        self._board.put("ranks", event.uid, None)

    # -- records of ranks -------------------------------------------------------------------------------------------

    def show(self, mesh: MeshEntry, index: int, more: Mapping[str, object] | None = None) -> None:
        """Computes the state of a rank and writes it, with the fields `more`."""
        if mesh.ended:
            return
        rank, uid = mesh.ranks[index], mesh.event.uid
        proc = self.below(mesh, index)
        state, since, running = rank_state(rank, None if proc is None else proc[0].ranks[proc[1]])
        if state != rank.shown:
            self._count(mesh, rank.shown, -1)
            self._count(mesh, state, 1)
            mesh.ranks.own(index).shown = state
        own = None if state == mesh.default else state
        fields: dict[str, object] = {
            "state": own,
            "since": None if state == "idle" and own is None else since,
            "endpoint": self._endpoint(mesh, running) if state == "busy" and running is not None else None,
        }
        self._board.change_rank(uid, str(index), {**more, **fields} if more else fields)

    def show_with_actors(self, mesh: MeshEntry, index: int) -> None:
        """Shows a process and the actors on it."""
        self.show(mesh, index)
        for actors, above in self.above(mesh, mesh.event.ranks[index]):
            self.show(actors, above)

    def rests(self, mesh: MeshEntry, index: int) -> None:
        """Notes that an actor has ended its call: its process is no longer busy with it."""
        proc = self.below(mesh, index)
        if proc is not None:
            busy = proc[0].ranks[proc[1]].busy
            if busy and busy.pop(mesh.event.uid, None) is not None:
                self.show(*proc)

    def write(self) -> None:
        """Writes changed counts to the document, once for many events."""
        for uid in self._recounted:
            mesh = self._meshes.get(uid)
            if mesh is not None:
                counts = self._board.document["meshes"][uid]["counts"]
                self._board.change_in("meshes", uid, "counts", {**dict.fromkeys(counts), **mesh.counts})
        self._recounted.clear()

    def _endpoint(self, mesh: MeshEntry, running: e.ActivityChanged | e.CallPending) -> str:
        if running.uid == mesh.event.uid:
            return running.endpoint
        actors = self._meshes.get(running.uid)
        if actors is None:
            return running.endpoint
        return _OPERATIONS if actors.event.inner else f"{actors.event.name}.{running.endpoint}"

    def _settle_on(self, mesh: MeshEntry, state: RankState) -> None:
        """Changes the state of all ranks without their own record."""
        uid, before = mesh.event.uid, mesh.default
        mesh.default = state
        self._board.change("meshes", uid, {"state": state})
        changed = mesh.ranks.silent
        mesh.ranks.usual.shown = state
        for index, rank in mesh.ranks.recorded():
            if rank.shown == before:
                rank.shown = state
                changed += 1
            elif rank.shown == state:
                self._board.change_rank(uid, str(index), {"state": None})
        self._count(mesh, before, -changed)
        self._count(mesh, state, changed)

    def _count(self, mesh: MeshEntry, state: str, by: int) -> None:
        if not by:
            return
        number = mesh.counts.get(state, 0) + by
        if number:
            mesh.counts[state] = number
        else:
            mesh.counts.pop(state, None)
        self._recounted.add(mesh.event.uid)
