"""The reducer: events of the cluster in, `ClusterState` out. No I/O, no clock, no threads."""

from collections.abc import Callable
from typing import Any

from monarch_nb.shape import Region
from monarch_nb.store import events as e
from monarch_nb.store.incidents import Incidents
from monarch_nb.store.mesh_view import MeshView, mesh_view
from monarch_nb.store.meshes import MeshEntry, Meshes, working
from monarch_nb.store.records import Board, Document, Patch
from monarch_nb.wire import host_name

_USED = ("cpu", "memory", "gpu", "gpu_memory", "gpu_total")
_STATISTICS = ("queue", "rate", *_USED)


class Sessions:
    """Folds the events of the debugger."""

    def __init__(self, board: Board, meshes: Meshes) -> None:
        self._board = board
        self._meshes = meshes
        self._ranks: dict[str, tuple[str, int]] = {}  # mesh and base rank of each session

    def opened(self, event: e.SessionOpened) -> None:
        """Notes that an actor has stopped at a breakpoint."""
        _, index = self._meshes.find(event.uid, event.rank)
        self._board.put("sessions", event.id, {"mesh": event.uid, "rank": index, "since": event.since, **event.record})
        self._ranks[event.id] = (event.uid, event.rank)
        self._pause(event.uid, event.rank, event.since)

    def closed(self, event: e.SessionClosed) -> None:
        """Notes that a session has ended; its rank is paused until its last session has ended."""
        key = self._ranks.pop(event.id, None)
        self._board.put("sessions", event.id, None)
        if key is not None and key not in self._ranks.values():
            self._pause(*key, None)

    def _pause(self, uid: str, base: int, since: float | None) -> None:
        mesh, index = self._meshes.find(uid, base)
        if mesh is None:
            return
        mesh.ranks.own(index).paused = since
        self._meshes.show(mesh, index)
        procs, below = self._meshes.find(mesh.event.on, base)
        if procs is None:
            return
        proc = procs.ranks.own(below)
        if since is not None or all(
            actors.ranks[actor_index].paused is None for actors, actor_index in self._meshes.above(procs, base)
        ):
            proc.paused = since
        self._meshes.show(procs, below)


class Ranks:
    """Folds the events of ranks. Events for unknown ranks are ignored."""

    def __init__(self, board: Board, meshes: Meshes) -> None:
        self._board = board
        self._meshes = meshes

    def started(self, event: e.ProcessStarted) -> None:
        """Notes that the process of a rank runs."""
        mesh, index = self._meshes.find(event.uid, event.rank)
        if mesh is not None:
            self._board.change_rank(event.uid, str(index), {"pid": event.pid})

    def turned(self, event: e.RankStateChanged, failure: str) -> None:
        """Notes a new condition from supervision; `failure` is the id under which its failure is shown."""
        mesh, index = self._meshes.find(event.uid, event.rank)
        if mesh is None or event.incarnation < mesh.ranks[index].incarnation:
            return
        rank = mesh.ranks.own(index)
        if event.condition != "alive" or event.incarnation != rank.incarnation:
            rank.doing = rank.pending = None
            self._meshes.rests(mesh, index)
        fields: dict[str, object] = {
            "incarnation": event.incarnation or None,
            "detail": event.detail or None,
            "failure": failure or None,
        }
        if event.condition == "failed" or event.incarnation != rank.incarnation:
            rank.unanswered = None  # concerned the former process
        if event.condition == "failed":
            fields.update(dict.fromkeys(_STATISTICS))
        rank.condition, rank.incarnation, rank.since = event.condition, event.incarnation, event.at
        self._board.change_rank(event.uid, str(index), fields)
        self._meshes.show_with_actors(mesh, index)

    def answers(self, event: e.ResponsivenessChanged) -> None:
        """Notes that a process has stopped or resumed answering."""
        mesh, index = self._meshes.find(event.uid, event.rank)
        if mesh is not None:
            mesh.ranks.own(index).unanswered = event.since
            self._meshes.show_with_actors(mesh, index)

    def does(self, event: e.ActivityChanged) -> None:
        """Notes that an actor began or ended a call."""
        mesh, index = self._meshes.find(event.uid, event.rank)
        if mesh is None or event.incarnation < mesh.ranks[index].incarnation:
            return
        mesh.ranks.own(index).doing = event
        counters: dict[str, int | float | None] = {}
        if mesh.event.kind == "actors" and event.calls >= 0:
            counters = {
                "queue": event.queue or None,
                "calls": event.calls or None,
                "rate": event.rate or None,
                "errors": event.errors or None,
            }
        self._meshes.show(mesh, index, counters)
        self._works(mesh, index)

    def pending(self, event: e.CallPending) -> None:
        """Notes that a call of this process awaits the rank, or no longer does; the rank's own report comes later."""
        mesh, index = self._meshes.find(event.uid, event.rank)
        if mesh is None or event.incarnation < mesh.ranks[index].incarnation:
            return
        rank = mesh.ranks.own(index)
        before, rank.pending = rank.pending, event if event.endpoint else None
        doing = rank.doing
        if rank.pending is None and before is not None and doing is not None and doing.endpoint == before.endpoint:
            rank.doing = None  # the report of its end will arrive
        self._meshes.show(mesh, index)
        self._works(mesh, index)

    def _works(self, mesh: MeshEntry, index: int) -> None:
        """Marks a process busy while one of its actors is."""
        below = self._meshes.below(mesh, index)
        if below is None or below[0].ended:
            return
        proc = below[0].ranks.own(below[1])
        if proc.busy is None:
            proc.busy = {}
        running = working(mesh.ranks[index])
        if running is not None:
            proc.busy[mesh.event.uid] = running
        elif proc.busy.pop(mesh.event.uid, None) is None:
            return
        self._meshes.show(*below)

    def uses(self, event: e.Usage) -> None:
        """Notes the resource use of a process."""
        mesh, index = self._meshes.find(event.uid, event.rank)
        if mesh is None:
            return
        fields: dict[str, object] = {"cpu": event.cpu, "memory": event.memory}
        if event.memory_kind != "Pss":
            fields["memory_kind"] = event.memory_kind
        if event.gpu_total:
            fields.update(gpu=None if event.gpu < 0 else event.gpu)
            fields.update(gpu_memory=event.gpu_memory, gpu_total=event.gpu_total)
        self._board.change_rank(event.uid, str(index), fields)

    def quiet(self, _event: e.WatchersLeft) -> None:
        """Drops activity that workers no longer report."""
        for mesh in self._meshes:
            for index, rank in mesh.ranks.recorded():
                if rank.doing is not None:
                    rank.doing = None
                    self._meshes.show(mesh, index)
                    self._works(mesh, index)
        for uid, ranks in self._board.document["ranks"].items():
            for key in ranks:
                self._board.change_rank(uid, key, dict.fromkeys(_STATISTICS))


class ClusterState:
    """The state of the cluster: `fold` events, then `take` the changes. `document` is the whole state."""

    def __init__(self) -> None:
        self._board = board = Board()
        self._meshes = meshes = Meshes(board)
        self._ranks = ranks = Ranks(board, meshes)
        self._incidents = incidents = Incidents(board, meshes)
        sessions = Sessions(board, meshes)
        self._folds: dict[type[e.Event], Callable[[Any], None]] = {
            e.HostSeen: self._host,
            e.MeshDescription: meshes.spawned,
            e.MeshRedescribed: meshes.resized,
            e.MeshReady: meshes.ready,
            e.MeshEnded: meshes.ended,
            e.MeshForgotten: meshes.forgotten,
            e.MeshUnheld: meshes.unheld,
            e.ProcessStarted: ranks.started,
            e.RankStateChanged: self._turned,
            e.ResponsivenessChanged: ranks.answers,
            e.ActivityChanged: ranks.does,
            e.CallPending: ranks.pending,
            e.Usage: ranks.uses,
            e.WatchersLeft: ranks.quiet,
            e.MeshFailed: incidents.failed,
            e.OwnerNotified: incidents.notified,
            e.FailureStateChanged: incidents.settled,
            e.SessionOpened: sessions.opened,
            e.SessionClosed: sessions.closed,
            e.DetachedMesh: self._detached,
            e.TensorsSeen: self._tensors,
            e.TransfersSeen: self._transfers,
        }

    @property
    def document(self) -> Document:
        """The whole state as JSON; it changes with the next event."""
        self._write()
        return self._board.document

    def take(self) -> Patch:
        """Returns the changes since the last call as one merge patch; {} if there are none."""
        self._write()
        return self._board.take()

    def failure_key(self, failure: str) -> str:
        """Returns the id under which a failure is shown: its own, or that of the first failure of the same event."""
        return self._incidents.key(failure)

    def mesh_view(self, uid: str, region: Region, now: float) -> MeshView | None:
        """Returns a mesh, or its slice `region`; None if the state does not contain it."""
        return mesh_view(self._meshes, self.document, uid, region, now)

    def fold(self, event: e.Event) -> None:
        """Applies an event. Events for unknown meshes are ignored."""
        self._folds[type(event)](event)

    def _write(self) -> None:
        self._incidents.write()
        self._meshes.write()

    def _turned(self, event: e.RankStateChanged) -> None:
        self._ranks.turned(event, self._incidents.key(event.failure))
        self._incidents.mesh_changed(event.uid)

    def _host(self, event: e.HostSeen) -> None:
        state = "lost" if event.why else "up"
        fields: dict[str, object] = {"state": state, "why": event.why or None}
        fields.update(notice=event.notice or None, until=event.until or None)
        if event.name:
            fields["name"] = event.name
        if event.host in self._board.document["hosts"]:
            self._board.change("hosts", event.host, fields)
        else:
            named = {"name": host_name(event.host), **fields}
            self._board.put("hosts", event.host, {key: value for key, value in named.items() if value is not None})

    def _detached(self, event: e.DetachedMesh) -> None:
        self._board.put("detached", event.id, dict(event.record) or None)

    def _transfers(self, event: e.TransfersSeen) -> None:
        self._board.put("transfers", event.id, dict(event.record) or None)

    def _tensors(self, event: e.TensorsSeen) -> None:
        self._board.put("tensors", event.id, dict(event.record) or None)
