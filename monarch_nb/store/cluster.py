"""The reducer: engine events in, `ClusterState` out. No I/O, no clock, no threads."""

from dataclasses import dataclass, field
from typing import Any

from monarch_nb.store import events as e
from monarch_nb.store.board import Board
from monarch_nb.store.groups import OF_PROCESSES, Group, Member, Shape
from monarch_nb.store.patch import Patch

KEPT_FAILURES = 200


@dataclass(slots=True)
class _Rank:
    """What was told of one rank; what is shown of it follows from that."""

    condition: e.Condition
    life: int = 0
    since: float = 0.0
    unanswered: float | None = None  # of procs
    session: float | None = None  # since when the debugger holds it
    doing: e.Doings | None = None
    shown: str = ""
    busy: dict[str, e.Doings] | None = None  # of procs: actors on it that run something, by mesh


@dataclass(slots=True)
class _Mesh:
    """One mesh as the reducer knows it."""

    event: e.Spawned
    default: str
    index: dict[int, int] | None  # of a base rank; None where they are one range
    first: int
    ranks: list[_Rank]
    counts: dict[str, int] = field(default_factory=dict)
    on_it: list[str] = field(default_factory=list)
    ended: bool = False

    def at(self, base: int) -> int:
        """The index of a base rank; -1 if it is none of this mesh."""
        if self.index is not None:
            return self.index.get(base, -1)
        place = base - self.first
        return place if 0 <= place < len(self.ranks) else -1


class Cluster:
    """`fold` events, then `take` what has changed. `document` is what a view that comes now is given."""

    def __init__(self) -> None:
        self._board = Board()
        self._meshes: dict[str, _Mesh] = {}
        self._sessions: dict[str, tuple[str, int]] = {}
        self._recounted: set[str] = set()  # meshes whose counts are not in the document yet
        self._groups: dict[str, Group] = {}  # by the id that they are told under
        self._group_of: dict[str, str] = {}  # failure -> group
        self._newest: dict[tuple[str, str, str], str] = {}  # procs or actors, owner, cause -> group
        self._groups_on: dict[str, set[str]] = {}  # by the mesh that they are told of
        self._retold: set[str] = set()  # groups of which something else is to be said than the document does

    @property
    def document(self) -> dict[str, Any]:
        """The whole state, as JSON has it; it changes with the next event."""
        self._write()
        return self._board.document

    def take(self) -> Patch:
        """What has changed since the last time, as one merge patch; {} if nothing has."""
        self._write()
        return self._board.take()

    def group(self, failure: str) -> str:
        """The id under which a failure is told: its own, or that of the first of one event."""
        return self._group_of.get(failure, failure)

    def _write(self) -> None:
        """What follows from the events, once for many: each of them changes some."""
        for key in self._retold:
            group = self._groups.get(key)
            shape = None if group is None else self._shape(group.uid)
            if group is not None and shape is not None:
                self._board.change("failures", key, group.told(shape))
        self._retold.clear()
        for uid in self._recounted:
            mesh = self._meshes.get(uid)
            if mesh is not None:
                known = self._board.document["meshes"][uid]["counts"]
                self._board.change_in("meshes", uid, "counts", {**dict.fromkeys(known), **mesh.counts})
        self._recounted.clear()

    def fold(self, event: e.Event) -> None:
        """Takes one event in. What is told of meshes nobody knows (any more) is of no consequence."""
        _FOLDS[type(event)](self, event)

    # -- meshes -----------------------------------------------------------------------------------------------------

    def _spawned(self, event: e.Spawned) -> None:
        if event.uid in self._meshes:
            return
        condition: e.Condition = "alive" if event.ready else "starting"
        default = "idle" if event.ready else "starting"
        plain = isinstance(event.ranks, range) and event.ranks.step == 1
        index = None if plain else {base: place for place, base in enumerate(event.ranks)}
        first = event.ranks[0] if plain and len(event.ranks) else 0
        ranks = [_Rank(condition, since=event.at, shown=default) for _ in event.ranks]
        mesh = _Mesh(event, default, index, first, ranks, {default: len(ranks)})
        self._meshes[event.uid] = mesh
        if event.on in self._meshes:
            self._meshes[event.on].on_it.append(event.uid)
        for host in event.hosts:
            if host not in self._board.document["hosts"]:
                self._board.put("hosts", host, {"name": host, "state": "up"})
        record: dict[str, Any] = {
            "name": event.name,
            "kind": event.kind,
            "labels": list(event.labels),
            "sizes": list(event.sizes),
            "offset": event.offset,
            "strides": list(event.strides),
            "state": default,
            "born": event.at,
            "owner": event.owner,
            "mine": event.mine,
            "counts": dict(mesh.counts),
        }
        if event.kind == "procs":
            record.update(hosts=list(event.hosts), per_host=event.per_host)
        else:
            record.update({"class": event.actor_class, "on": event.on})
        self._board.put("meshes", event.uid, record)
        self._board.put("ranks", event.uid, {})
        procs = self._meshes.get(event.on)
        if procs is not None:  # some of those may have failed, or be stopped in the debugger
            for place, base in enumerate(event.ranks):
                at = procs.at(base)
                if at >= 0 and procs.ranks[at].shown in ("paused", "unresponsive"):
                    self._show(mesh, place, event.at)

    def _started(self, event: e.Started) -> None:
        mesh, place = self._find(event.uid, event.rank)
        if mesh is not None:
            self._board.change_rank(event.uid, str(place), {"pid": event.pid})

    def _ready(self, event: e.Ready) -> None:
        mesh = self._meshes.get(event.uid)
        if mesh is None or mesh.ended or mesh.default != "starting":
            return
        for rank in mesh.ranks:
            if rank.condition == "starting":
                rank.condition, rank.since = "alive", event.at
        self._settle_on(mesh, "idle")
        for place in range(len(mesh.ranks)):
            self._show(mesh, place, event.at)

    def _settle_on(self, mesh: _Mesh, state: str) -> None:
        """Ranks without a state of their own are in another one from now on."""
        uid, before = mesh.event.uid, mesh.default
        mesh.default = state
        self._board.change("meshes", uid, {"state": state})
        changed = 0
        for place, rank in enumerate(mesh.ranks):
            if rank.shown == before:
                rank.shown = state
                changed += 1
            elif rank.shown == state:
                self._board.change_rank(uid, str(place), {"state": None})
        self._count(mesh, before, -changed)
        self._count(mesh, state, changed)

    def _ended(self, event: e.Ended) -> None:
        mesh = self._meshes.get(event.uid)
        if mesh is None or mesh.ended:
            return
        state = "failed" if event.failed else "stopped"
        mesh.ended = True
        for rank in mesh.ranks:
            rank.shown, rank.doing, rank.busy = state, None, None
        mesh.default = state
        mesh.counts = {state: len(mesh.ranks)}
        self._recounted.add(event.uid)
        self._board.change("meshes", event.uid, {"state": state, "stopped": event.why, "ended": event.at})
        for place in self._board.document["ranks"].get(event.uid, {}):
            plain = dict.fromkeys(("state", "since", "endpoint", "queue", "rate", "cpu", "memory", "gpu", "detail"))
            self._board.change_rank(event.uid, place, plain)
        for place, base in enumerate(mesh.event.ranks):
            self._at_rest(mesh, place, base, event.at)

    def _at_rest(self, mesh: _Mesh, place: int, base: int, at: float) -> None:
        """An actor does nothing any more: so says its proc."""
        procs = self._meshes.get(mesh.event.on)
        if procs is None:
            return
        below = procs.at(base)
        if below >= 0 and (busy := procs.ranks[below].busy) and busy.pop(mesh.event.uid, None) is not None:
            self._show(procs, below, at)

    def _forgotten(self, event: e.Forgotten) -> None:
        mesh = self._meshes.pop(event.uid, None)
        if mesh is None:
            return
        procs = self._meshes.get(mesh.event.on)
        if procs is not None:
            procs.on_it.remove(event.uid)
        self._board.put("meshes", event.uid, None)
        self._board.put("ranks", event.uid, None)

    # -- ranks ------------------------------------------------------------------------------------------------------

    def _find(self, uid: str, base: int) -> tuple[_Mesh | None, int]:
        mesh = self._meshes.get(uid)
        if mesh is None or mesh.ended:
            return None, -1
        place = mesh.at(base)
        return (mesh, place) if place >= 0 else (None, -1)

    def _turned(self, event: e.Turned) -> None:
        mesh, place = self._find(event.uid, event.rank)
        if mesh is None:
            return
        rank = mesh.ranks[place]
        if event.life < rank.life:
            return
        if event.condition != "alive" or event.life != rank.life:
            rank.doing = None
            self._at_rest(mesh, place, event.rank, event.at)
        if event.condition == "failed":
            rank.unanswered = None
        rank.condition, rank.life, rank.since = event.condition, event.life, event.at
        fields: dict[str, Any] = {"life": event.life or None, "detail": event.detail or None}
        fields["failure"] = self.group(event.failure) or None
        for key in self._groups_on.get(event.uid, ()):
            if self._groups[key].state == "open":
                self._retold.add(key)
        if event.condition == "failed":
            fields.update(dict.fromkeys(("queue", "rate", "cpu", "memory", "gpu", "gpu_memory", "gpu_total")))
        self._board.change_rank(event.uid, str(place), fields)
        self._show_with_actors(mesh, place, event.rank, event.at)

    def _answers(self, event: e.Answers) -> None:
        mesh, place = self._find(event.uid, event.rank)
        if mesh is None:
            return
        mesh.ranks[place].unanswered = event.since
        self._show_with_actors(mesh, place, event.rank, event.at)

    def _show_with_actors(self, mesh: _Mesh, place: int, base: int, at: float) -> None:
        self._show(mesh, place, at)
        for uid in mesh.on_it:
            actors, above = self._find(uid, base)
            if actors is not None:
                self._show(actors, above, at)

    def _does(self, event: e.Doings) -> None:
        mesh, place = self._find(event.uid, event.rank)
        if mesh is None:
            return
        rank = mesh.ranks[place]
        if event.life < rank.life:
            return
        rank.doing = event
        told: dict[str, Any] = {}
        if mesh.event.kind == "actors":
            told = {
                "queue": event.queue or None,
                "calls": event.calls or None,
                "rate": event.rate or None,
                "errors": event.errors or None,
            }
        self._show(mesh, place, event.since, told)
        procs = self._meshes.get(mesh.event.on)
        if procs is None or procs.ended:
            return
        below = procs.at(event.rank)
        if below < 0:
            return
        under = procs.ranks[below]
        if under.busy is None:
            under.busy = {}
        if event.doing == "busy":
            under.busy[event.uid] = event
        elif under.busy.pop(event.uid, None) is None:
            return
        self._show(procs, below, event.since)

    def _uses(self, event: e.Usage) -> None:
        mesh, place = self._find(event.uid, event.rank)
        if mesh is None:
            return
        fields: dict[str, Any] = {"cpu": event.cpu, "memory": event.memory}
        if event.gpu_total:
            fields.update(gpu=None if event.gpu < 0 else event.gpu)
            fields.update(gpu_memory=event.gpu_memory, gpu_total=event.gpu_total)
        self._board.change_rank(event.uid, str(place), fields)

    def _quiet(self, event: e.Quiet) -> None:
        for mesh in self._meshes.values():
            for place, rank in enumerate(mesh.ranks):
                if rank.doing is not None or rank.busy:
                    rank.doing = rank.busy = None
                    self._show(mesh, place, event.at)
        plain = dict.fromkeys(("queue", "rate", "cpu", "memory", "gpu", "gpu_memory", "gpu_total"))
        for uid, ranks in self._board.document["ranks"].items():
            for index in ranks:
                self._board.change_rank(uid, index, plain)

    def _show(self, mesh: _Mesh, place: int, at: float, more: dict[str, Any] | None = None) -> None:
        """Works out what is shown of a rank, and since when; `more` of it is written with that."""
        if mesh.ended:
            return
        rank = mesh.ranks[place]
        state, since, endpoint = self._look(mesh, rank, place)
        before = rank.shown
        uid = mesh.event.uid
        if state != before:
            rank.shown = state
            self._count(mesh, before, -1)
            self._count(mesh, state, 1)
        known = None if state == mesh.default else state
        told = None if state == "idle" and known is None else since
        fields = {"state": known, "since": told, "endpoint": endpoint}
        self._board.change_rank(uid, str(place), {**more, **fields} if more else fields)

    def _look(self, mesh: _Mesh, rank: _Rank, place: int) -> tuple[str, float, str | None]:
        if rank.condition != "alive":
            return rank.condition, rank.since, None
        procs = self._meshes.get(mesh.event.on)
        under = None
        if procs is not None and (below := procs.at(mesh.event.ranks[place])) >= 0:
            under = procs.ranks[below]
        if rank.session is not None:
            return "paused", rank.session, None
        unanswered = rank.unanswered if under is None else under.unanswered
        if unanswered is not None:
            return "unresponsive", unanswered, None
        mine = rank.doing
        if mine is not None and mine.doing == "busy":
            return "busy", mine.since, mine.endpoint
        if rank.busy:
            uid, first = next(iter(rank.busy.items()))
            held = self._meshes.get(uid)
            return "busy", first.since, f"{held.event.name}.{first.endpoint}" if held is not None else first.endpoint
        return "idle", rank.since, None

    def _count(self, mesh: _Mesh, state: str, by: int) -> None:
        if not by:
            return
        number = mesh.counts.get(state, 0) + by
        if number:
            mesh.counts[state] = number
        else:
            mesh.counts.pop(state, None)
        self._recounted.add(mesh.event.uid)

    # -- failures, sessions, hosts ----------------------------------------------------------------------------------

    def _host(self, event: e.HostSeen) -> None:
        fields = {"state": "lost" if event.why else "up", "why": event.why or None}
        if event.name:
            fields["name"] = event.name
        if event.host in self._board.document["hosts"]:
            self._board.change("hosts", event.host, fields)
        else:
            named = {"name": event.host, **fields}
            self._board.put("hosts", event.host, {key: value for key, value in named.items() if value is not None})

    def _failed(self, event: e.Failed) -> None:
        if event.id in self._group_of:
            return
        record = {key: value for key, value in event.record.items() if value is not None}
        member = Member(event.failure, event.ranks, record)
        group = self._belongs_to(event)
        if group is not None:
            self._join(group, event, member)
            return
        mesh = self._meshes.get(event.uid)
        indices = [] if mesh is None else [place for place in map(mesh.at, event.ranks) if place >= 0]
        told = {"mesh": event.uid, "ranks": indices, "told": [], "state": "open", **record}
        self._board.put("failures", event.id, told)
        group = self._groups[event.id] = Group(event.id, event.uid)
        group.add(event.id, member)
        self._groups_on.setdefault(event.uid, set()).add(event.id)
        self._group_of[event.id] = event.id
        if event.failure is not None:
            self._newest[self._sort(event)] = event.id
        failures = self._board.document["failures"]
        while len(failures) > KEPT_FAILURES:
            self._drop(next(iter(failures)))

    def _drop(self, key: str) -> None:
        self._board.put("failures", key, None)
        group = self._groups.pop(key)
        self._groups_on[group.uid].discard(key)
        for member in group.members:
            self._group_of.pop(member, None)

    def _sort(self, event: e.Failed) -> tuple[str, str, str]:
        """The same for failures of one event."""
        mesh = self._meshes.get(event.uid)
        assert event.failure is not None
        below = mesh is not None and event.failure.cause.kind in OF_PROCESSES and mesh.event.on in self._meshes
        uid = mesh.event.on if mesh is not None and below else event.uid
        return uid, mesh.event.owner if mesh is not None else "", event.failure.cause.likeness

    def _belongs_to(self, event: e.Failed) -> Group | None:
        if event.failure is None:
            return None
        group = self._groups.get(self._newest.get(self._sort(event), ""))
        found = group is not None and group.takes(event.ranks, event.record.get("detected", 0.0))
        return group if found else None

    def _join(self, group: Group, event: e.Failed, member: Member) -> None:
        group.add(event.id, member)
        self._group_of[event.id] = group.id
        mesh = self._meshes.get(group.uid)
        if mesh is not None and any(mesh.at(base) < 0 for base in event.ranks) and mesh.event.on in self._meshes:
            self._groups_on[group.uid].discard(group.id)  # other ranks have other actors
            group.uid, mesh = mesh.event.on, self._meshes[mesh.event.on]
            self._groups_on.setdefault(group.uid, set()).add(group.id)
        if mesh is None:
            return
        places = sorted(place for place in map(mesh.at, group.bases) if place >= 0)
        self._board.change("failures", group.id, {"mesh": group.uid, "ranks": places})
        self._retold.add(group.id)
        procs = self._meshes.get(mesh.event.on, mesh)
        for uid in (procs.event.uid, *procs.on_it):
            for base in event.ranks:
                known, place = self._find(uid, base)
                if known is not None and self._board.document["ranks"][uid].get(str(place), {}).get("failure"):
                    self._board.change_rank(uid, str(place), {"failure": group.id})

    def _shape(self, uid: str) -> Shape | None:
        mesh = self._meshes.get(uid)
        if mesh is None:
            return None
        event, ranks = mesh.event, mesh.ranks

        def left(places: set[int]) -> int:
            return sum(rank.condition in ("alive", "starting") for at, rank in enumerate(ranks) if at not in places)

        return Shape(uid, event.name, event.kind == "procs", (event.labels, event.sizes), mesh.at, left)

    def _told(self, event: e.Told) -> None:
        key = self.group(event.id)
        record = self._board.document["failures"].get(key)
        if record is not None and [event.who, event.how] not in record["told"]:
            self._board.change("failures", key, {"told": [*record["told"], [event.who, event.how]]})

    def _settled(self, event: e.Settled) -> None:
        group = self._groups.get(self.group(event.id))
        if group is None:
            return
        group.settle(event.id, event.state)
        over = group.state in ("healed", "stopped")
        self._board.change("failures", group.id, {"state": group.state, "ended": event.at if over else None})

    def _opened(self, event: e.SessionOpened) -> None:
        _, place = self._find(event.uid, event.rank)
        record = {"mesh": event.uid, "rank": place, "since": event.since, **event.record}
        self._board.put("sessions", event.id, record)
        self._sessions[event.id] = (event.uid, event.rank)
        self._hold(event.uid, event.rank, event.since, event.since)

    def _closed(self, event: e.SessionClosed) -> None:
        held = self._sessions.pop(event.id, None)
        self._board.put("sessions", event.id, None)
        if held is not None and held not in self._sessions.values():
            self._hold(*held, None, event.at)

    def _hold(self, uid: str, base: int, since: float | None, at: float) -> None:
        mesh, place = self._find(uid, base)
        if mesh is None:
            return
        mesh.ranks[place].session = since
        self._show(mesh, place, at)
        procs, below = self._find(mesh.event.on, base)
        if procs is not None:
            others = any(one.ranks[k].session is not None for one, k in self._above(procs, base))
            procs.ranks[below].session = since if since is not None or not others else procs.ranks[below].session
            self._show(procs, below, at)

    def _above(self, procs: _Mesh, base: int) -> list[tuple[_Mesh, int]]:
        found = (self._find(uid, base) for uid in procs.on_it)
        return [(mesh, place) for mesh, place in found if mesh is not None]

    def _detached(self, event: e.Detached) -> None:
        self._board.put("detached", event.id, dict(event.record) or None)


_FOLDS: dict[type, Any] = {
    e.HostSeen: Cluster._host,
    e.Spawned: Cluster._spawned,
    e.Started: Cluster._started,
    e.Ready: Cluster._ready,
    e.Turned: Cluster._turned,
    e.Ended: Cluster._ended,
    e.Forgotten: Cluster._forgotten,
    e.Answers: Cluster._answers,
    e.Doings: Cluster._does,
    e.Usage: Cluster._uses,
    e.Quiet: Cluster._quiet,
    e.Failed: Cluster._failed,
    e.Told: Cluster._told,
    e.Settled: Cluster._settled,
    e.SessionOpened: Cluster._opened,
    e.SessionClosed: Cluster._closed,
    e.Detached: Cluster._detached,
}
