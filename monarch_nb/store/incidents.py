"""Folding of failures: failures of one event become one incident, shown under the id of the first failure."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import Struct, field

from monarch_nb.store import events as e
from monarch_nb.store.failures import known_fields, text, title
from monarch_nb.store.meshes import Meshes
from monarch_nb.store.records import Board, FailureFields, FailureState
from monarch_nb.supervision import MeshFailure
from monarch_nb.supervision.ranks import points_text

K = TypeVar("K")
KEPT_FAILURES = 200
FOLD_S = 2.0  # after the last failure, within which another one joins its incident
MEMORY_FOLD_S = 15.0  # the same if memory ran out: the kernel kills one process at a time, each of which frees some
_STATES: tuple[FailureState, ...] = ("open", "healing", "healed", "stopped")  # worst first
KINDS = 8  # of texts and of last lines that an incident stores
OF_PROCESSES = frozenset({"exit", "signal", "host", "spawn"})


class Member(Struct):
    """One failure of an incident, and its state."""

    failure: MeshFailure | None
    bases: tuple[int, ...]
    record: FailureFields
    state: FailureState = "open"


class MeshSize(Struct, frozen=True):
    """The data of a mesh that an incident needs: indices of base ranks, and the number of working ranks."""

    uid: str
    name: str
    procs: bool
    extent: tuple[tuple[str, ...], tuple[int, ...]]
    index: Callable[[int], int]
    left: Callable[[set[int]], int]


class Incident(Struct):
    """Failures that are shown as one, under the id of the first."""

    id: str
    uid: str  # the mesh for which it is shown
    members: dict[str, Member] = field(default_factory=dict)
    states: dict[str, int] = field(default_factory=dict)  # failures by state
    bases: set[int] = field(default_factory=set)
    latest: float = 0.0
    of_memory: bool = False

    def add(self, key: str, member: Member) -> None:
        """Adds a failure."""
        self.members[key] = member
        self.states[member.state] = self.states.get(member.state, 0) + 1
        self.bases.update(member.bases)
        self.of_memory = self.of_memory or bool(member.record.get("oom"))
        self.latest = max(self.latest, member.record.get("detected", 0.0))

    def takes(self, bases: Sequence[int], detected: float) -> bool:
        """Returns whether a similar failure at this time belongs to the incident."""
        within_s = MEMORY_FOLD_S if self.of_memory else FOLD_S
        joins = self.bases.isdisjoint(bases) and detected - self.latest <= within_s
        return joins and self.state == "open"

    @property
    def state(self) -> FailureState:
        """The worst state of its failures."""
        return next(state for state in _STATES if self.states.get(state) or state == _STATES[-1])

    def settle(self, key: str, state: FailureState) -> None:
        """Changes the state of one failure."""
        member = self.members[key]
        self.states[member.state] -= 1
        self.states[state] = self.states.get(state, 0) + 1
        member.state = state

    def fields(self, mesh: MeshSize) -> FailureFields:
        """Returns fields of the record that follow from all failures; None for unknown values."""
        members = sorted(self.members.values(), key=lambda member: [mesh.index(base) for base in member.bases])
        first = members[0]
        if first.failure is None:
            return {}
        indices = sorted({index for index in map(mesh.index, self.bases) if index >= 0})
        failure = msgspec.structs.replace(
            first.failure,
            mesh_name=mesh.name,
            mesh_uid=mesh.uid,
            procs=mesh.procs,
            extent=mesh.extent,
            places=tuple(indices),
            left=mesh.left(set(indices)),
        )
        if len(members) == 1:  # its record is complete, but other ranks may have failed since
            previous, advice = first.record["next"], failure.next_step
            return {"next": advice, "report": first.record["report"].removesuffix(previous) + advice}
        lines = _kinds(members, lambda member: tuple(member.record.get("last_lines") or ()))
        texts = _kinds(members, lambda member: member.record.get("text") or "")
        several = len(texts) > 1 and failure.cause.kind not in OF_PROCESSES

        def on_ranks(bases: list[int]) -> str:
            return points_text(mesh.extent, map(mesh.index, bases))

        fields: FailureFields = {
            **first.record,
            "ranks": indices,
            "name": mesh.name,
            "kind": "procs" if mesh.procs else "actors",
            "where": failure.where,
            "title": title(failure) + (" (the texts differ)" if several else ""),
            "pid": None,
            "processes": _processes(members) or None,
            "at": min(member.record["at"] for member in members),
            "detected": min(member.record["detected"] for member in members),
            "dump": next((member.record["dump"] for member in members if member.record.get("dump")), None),
            "last_lines": list(next(iter(lines))) or None,
            "lines": [[on_ranks(bases), list(last)] for last, bases in lines.items() if last]
            if len(lines) > 1
            else None,
            "texts": [[on_ranks(bases), raised] for raised, bases in texts.items()] if several else None,
            "also": list(_also(members, mesh.name)) or None,
            "next": failure.next_step,
        }
        fields["report"] = f"{fields['title']}\n\n{text(fields)}"
        return fields


def _kinds(members: Sequence[Member], value_of: Callable[[Member], K]) -> dict[K, list[int]]:
    """Returns the first distinct values among the failures, with the base ranks of each."""
    kinds: dict[K, list[int]] = {}
    for member in members:
        kinds.setdefault(value_of(member), []).extend(member.bases)
    return dict(list(kinds.items())[:KINDS])


def _processes(members: Sequence[Member]) -> list[list[Any]]:
    pids_of: dict[str, list[int]] = {}
    for member in members:
        host, pid = member.record.get("host"), member.record.get("pid")
        if host:
            pids_of.setdefault(host, []).extend([pid] if pid else [])
    return [[host, pids] for host, pids in pids_of.items()]


def _also(members: Sequence[Member], name: str) -> dict[str, None]:
    names: dict[str, None] = {}
    for member in members:
        record = member.record
        names.update(dict.fromkeys((*(record.get("also") or ()), record["name"])))
    names.pop(name, None)
    return names


class Incidents:
    """Folds the events of failures; writes each incident to the board as one failure."""

    def __init__(self, board: Board, meshes: Meshes) -> None:
        self._board = board
        self._meshes = meshes
        self._incidents: dict[str, Incident] = {}  # by displayed id
        self._incident_of: dict[str, str] = {}  # failure -> incident
        self._newest: dict[tuple[str, str, str], str] = {}  # procs or actors, owner, cause -> incident
        self._by_mesh: dict[str, set[str]] = {}  # by the mesh for which they are shown
        self._outdated: set[str] = set()  # incidents whose record in the document must be rewritten

    def key(self, failure: str) -> str:
        """Returns the id under which a failure is shown: its own, or that of the first failure of the same event."""
        return self._incident_of.get(failure, failure)

    def mesh_changed(self, uid: str) -> None:
        """Notes that ranks of a mesh have changed state, on which the advice of its open incidents depends."""
        for key in self._by_mesh.get(uid, ()):
            if self._incidents[key].state == "open":
                self._outdated.add(key)

    def write(self) -> None:
        """Brings the document up to date, once for many events."""
        for key in self._outdated:
            incident = self._incidents.get(key)
            shape = None if incident is None else self._shape(incident.uid)
            if incident is not None and shape is not None:
                self._board.change("failures", key, incident.fields(shape))
        self._outdated.clear()

    # -- events -----------------------------------------------------------------------------------------------------

    def failed(self, event: e.MeshFailed) -> None:
        """Records a failure."""
        if event.id in self._incident_of:
            return
        record = known_fields(event.record)
        member = Member(event.failure, event.ranks, record)
        incident = self._belongs_to(event)
        if incident is not None:
            self._join(incident, event, member)
            return
        mesh = self._meshes.get(event.uid)
        indices = [] if mesh is None else [index for index in map(mesh.index_of, event.ranks) if index >= 0]
        self._board.put(
            "failures", event.id, {"mesh": event.uid, "ranks": indices, "told": [], "state": "open", **record}
        )
        incident = self._incidents[event.id] = Incident(event.id, event.uid)
        incident.add(event.id, member)
        self._by_mesh.setdefault(event.uid, set()).add(event.id)
        self._incident_of[event.id] = event.id
        if event.failure is not None:
            self._newest[self._group_key(event)] = event.id
        failures = self._board.document["failures"]
        while len(failures) > KEPT_FAILURES:
            self._drop(next(iter(failures)))

    def notified(self, event: e.OwnerNotified) -> None:
        """Notes that an owner was asked to handle a failure, or has answered."""
        key = self.key(event.id)
        record = self._board.document["failures"].get(key)
        if record is not None and [event.who, event.how] not in record["told"]:
            self._board.change("failures", key, {"told": [*record["told"], [event.who, event.how]]})

    def settled(self, event: e.FailureStateChanged) -> None:
        """Notes that a failure is being healed, or has ended."""
        incident = self._incidents.get(self.key(event.id))
        if incident is None:
            return
        incident.settle(event.id, event.state)
        over = incident.state in ("healed", "stopped")
        self._board.change("failures", incident.id, {"state": incident.state, "ended": event.at if over else None})

    # -- grouping ---------------------------------------------------------------------------------------------------

    def _group_key(self, event: e.MeshFailed) -> tuple[str, str, str]:
        """Returns a key that is equal for failures of the same event."""
        mesh = self._meshes.get(event.uid)
        assert event.failure is not None
        procs = None if mesh is None else self._meshes.get(mesh.event.on)
        uid = event.uid
        if procs is not None and event.failure.cause.kind in OF_PROCESSES:
            uid = procs.event.uid
        return uid, mesh.event.owner if mesh is not None else "", event.failure.cause.likeness

    def _belongs_to(self, event: e.MeshFailed) -> Incident | None:
        if event.failure is None:
            return None
        incident = self._incidents.get(self._newest.get(self._group_key(event), ""))
        takes = incident is not None and incident.takes(event.ranks, event.record.get("detected", 0.0))
        return incident if takes else None

    def _join(self, incident: Incident, event: e.MeshFailed, member: Member) -> None:
        incident.add(event.id, member)
        self._incident_of[event.id] = incident.id
        mesh = self._meshes.get(incident.uid)
        procs = None if mesh is None else self._meshes.get(mesh.event.on)
        if mesh is not None and procs is not None and any(mesh.index_of(base) < 0 for base in event.ranks):
            self._by_mesh[incident.uid].discard(incident.id)  # ranks outside the actor mesh: shown for the procs
            incident.uid, mesh = procs.event.uid, procs
            self._by_mesh.setdefault(incident.uid, set()).add(incident.id)
        if mesh is None:
            return
        indices = sorted(index for index in map(mesh.index_of, incident.bases) if index >= 0)
        self._board.change("failures", incident.id, {"mesh": incident.uid, "ranks": indices})
        self._outdated.add(incident.id)
        root = procs or mesh
        for uid in (root.event.uid, *root.on_it):
            for base in event.ranks:
                hit, index = self._meshes.find(uid, base)
                if hit is not None and self._board.document["ranks"][uid].get(str(index), {}).get("failure"):
                    self._board.change_rank(uid, str(index), {"failure": incident.id})

    def _drop(self, key: str) -> None:
        self._board.put("failures", key, None)
        incident = self._incidents.pop(key)
        self._by_mesh[incident.uid].discard(key)
        for failure in incident.members:
            self._incident_of.pop(failure, None)

    def _shape(self, uid: str) -> MeshSize | None:
        mesh = self._meshes.get(uid)
        if mesh is None:
            return None
        event, ranks = mesh.event, mesh.ranks

        def count(lost: set[int]) -> int:
            return sum(rank.condition in ("alive", "starting") for index, rank in enumerate(ranks) if index not in lost)

        return MeshSize(uid, event.name, event.kind == "procs", (event.labels, event.sizes), mesh.index_of, count)
