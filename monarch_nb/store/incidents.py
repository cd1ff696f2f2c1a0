"""Failures folded in: those of one event become one incident, which is told under the id of its first failure."""

from monarch_nb.store import events as e
from monarch_nb.store.board import Board
from monarch_nb.store.incident import OF_PROCESSES, Incident, Member, Shape
from monarch_nb.store.meshes import Meshes

KEPT_FAILURES = 200


class Incidents:
    """Takes the events of failures; writes each incident into the board as one failure."""

    def __init__(self, board: Board, meshes: Meshes) -> None:
        self._board = board
        self._meshes = meshes
        self._incidents: dict[str, Incident] = {}  # by the id that they are told under
        self._incident_of: dict[str, str] = {}  # failure -> incident
        self._newest: dict[tuple[str, str, str], str] = {}  # procs or actors, owner, cause -> incident
        self._by_mesh: dict[str, set[str]] = {}  # by the mesh that they are told of
        self._outdated: set[str] = set()  # incidents of which the document says something else than is to be said

    def key(self, failure: str) -> str:
        """The id under which a failure is told: its own, or that of the first of one event."""
        return self._incident_of.get(failure, failure)

    def mesh_changed(self, uid: str) -> None:
        """Ranks of a mesh work, or do not any more: the advice of its open incidents follows that."""
        for key in self._by_mesh.get(uid, ()):
            if self._incidents[key].state == "open":
                self._outdated.add(key)

    def write(self) -> None:
        """Brings the document up to date: once for many events."""
        for key in self._outdated:
            incident = self._incidents.get(key)
            shape = None if incident is None else self._shape(incident.uid)
            if incident is not None and shape is not None:
                self._board.change("failures", key, incident.story(shape))
        self._outdated.clear()

    # -- events -----------------------------------------------------------------------------------------------------

    def failed(self, event: e.Failed) -> None:
        """Something has failed."""
        if event.id in self._incident_of:
            return
        record = {key: value for key, value in event.record.items() if value is not None}
        member = Member(event.failure, event.ranks, record)
        known = self._belongs_to(event)
        if known is not None:
            self._join(known, event, member)
            return
        mesh = self._meshes.get(event.uid)
        indices = [] if mesh is None else [index for index in map(mesh.at, event.ranks) if index >= 0]
        self._board.put(
            "failures", event.id, {"mesh": event.uid, "ranks": indices, "told": [], "state": "open", **record}
        )
        incident = self._incidents[event.id] = Incident(event.id, event.uid)
        incident.add(event.id, member)
        self._by_mesh.setdefault(event.uid, set()).add(event.id)
        self._incident_of[event.id] = event.id
        if event.failure is not None:
            self._newest[self._sort(event)] = event.id
        failures = self._board.document["failures"]
        while len(failures) > KEPT_FAILURES:
            self._drop(next(iter(failures)))

    def told(self, event: e.Told) -> None:
        """An owner was asked, or has answered."""
        key = self.key(event.id)
        record = self._board.document["failures"].get(key)
        if record is not None and [event.who, event.how] not in record["told"]:
            self._board.change("failures", key, {"told": [*record["told"], [event.who, event.how]]})

    def settled(self, event: e.Settled) -> None:
        """A failure is being mended, or is over."""
        incident = self._incidents.get(self.key(event.id))
        if incident is None:
            return
        incident.settle(event.id, event.state)
        over = incident.state in ("healed", "stopped")
        self._board.change("failures", incident.id, {"state": incident.state, "ended": event.at if over else None})

    # -- which belong together --------------------------------------------------------------------------------------

    def _sort(self, event: e.Failed) -> tuple[str, str, str]:
        """The same for failures of one event."""
        mesh = self._meshes.get(event.uid)
        assert event.failure is not None
        procs = None if mesh is None else self._meshes.get(mesh.event.on)
        uid = event.uid
        if procs is not None and event.failure.cause.kind in OF_PROCESSES:
            uid = procs.event.uid
        return uid, mesh.event.owner if mesh is not None else "", event.failure.cause.likeness

    def _belongs_to(self, event: e.Failed) -> Incident | None:
        if event.failure is None:
            return None
        incident = self._incidents.get(self._newest.get(self._sort(event), ""))
        takes = incident is not None and incident.takes(event.ranks, event.record.get("detected", 0.0))
        return incident if takes else None

    def _join(self, incident: Incident, event: e.Failed, member: Member) -> None:
        incident.add(event.id, member)
        self._incident_of[event.id] = incident.id
        mesh = self._meshes.get(incident.uid)
        procs = None if mesh is None else self._meshes.get(mesh.event.on)
        if mesh is not None and procs is not None and any(mesh.at(base) < 0 for base in event.ranks):
            self._by_mesh[incident.uid].discard(incident.id)  # other ranks have other actors
            incident.uid, mesh = procs.event.uid, procs
            self._by_mesh.setdefault(incident.uid, set()).add(incident.id)
        if mesh is None:
            return
        indices = sorted(index for index in map(mesh.at, incident.bases) if index >= 0)
        self._board.change("failures", incident.id, {"mesh": incident.uid, "ranks": indices})
        self._outdated.add(incident.id)
        whole = procs or mesh
        for uid in (whole.event.uid, *whole.on_it):
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

    def _shape(self, uid: str) -> Shape | None:
        mesh = self._meshes.get(uid)
        if mesh is None:
            return None
        event, ranks = mesh.event, mesh.ranks

        def left(lost: set[int]) -> int:
            return sum(rank.condition in ("alive", "starting") for index, rank in enumerate(ranks) if index not in lost)

        return Shape(uid, event.name, event.kind == "procs", (event.labels, event.sizes), mesh.at, left)
