"""The reducer: engine events in, `ClusterState` out. No I/O, no clock, no threads."""

from collections.abc import Callable
from typing import Any

from monarch_nb.shape import Region
from monarch_nb.store import events as e
from monarch_nb.store.board import Board
from monarch_nb.store.incidents import Incidents
from monarch_nb.store.mesh_view import MeshView, mesh_view
from monarch_nb.store.meshes import Meshes
from monarch_nb.store.patch import Patch
from monarch_nb.store.ranks import Ranks
from monarch_nb.store.sessions import Sessions
from monarch_nb.wire import host_name


class Cluster:
    """`fold` events, then `take` what has changed. `document` is what a view that comes now is given."""

    def __init__(self) -> None:
        self._board = board = Board()
        self._meshes = meshes = Meshes(board)
        self._ranks = ranks = Ranks(board, meshes)
        self._incidents = incidents = Incidents(board, meshes)
        sessions = Sessions(board, meshes)
        self._folds: dict[type[e.Event], Callable[[Any], None]] = {
            e.HostSeen: self._host,
            e.Spawned: meshes.spawned,
            e.Resized: meshes.resized,
            e.Ready: meshes.ready,
            e.Ended: meshes.ended,
            e.Forgotten: meshes.forgotten,
            e.Unheld: meshes.unheld,
            e.Started: ranks.started,
            e.Turned: self._turned,
            e.Answers: ranks.answers,
            e.Doings: ranks.does,
            e.Asked: ranks.asked,
            e.Usage: ranks.uses,
            e.Quiet: ranks.quiet,
            e.Failed: incidents.failed,
            e.Told: incidents.told,
            e.Settled: incidents.settled,
            e.SessionOpened: sessions.opened,
            e.SessionClosed: sessions.closed,
            e.Detached: self._detached,
            e.TensorsSeen: self._tensors,
            e.TransfersSeen: self._transfers,
        }

    @property
    def document(self) -> dict[str, Any]:
        """The whole state, as JSON has it; it changes with the next event."""
        self._write()
        return self._board.document

    def take(self) -> Patch:
        """What has changed since the last time, as one merge patch; {} if nothing has."""
        self._write()
        return self._board.take()

    def failure_key(self, failure: str) -> str:
        """The id under which a failure is told: its own, or that of the first of one event."""
        return self._incidents.key(failure)

    def mesh_view(self, uid: str, region: Region, now: float) -> MeshView | None:
        """A mesh, or the slice of it that `region` is; None if the state does not hold it (any more)."""
        return mesh_view(self._meshes, self.document, uid, region, now)

    def fold(self, event: e.Event) -> None:
        """Takes one event in. What is told of meshes nobody knows (any more) is of no consequence."""
        self._folds[type(event)](event)

    def _write(self) -> None:
        self._incidents.write()
        self._meshes.write()

    def _turned(self, event: e.Turned) -> None:
        self._ranks.turned(event, self._incidents.key(event.failure))
        self._incidents.mesh_changed(event.uid)

    def _host(self, event: e.HostSeen) -> None:
        state = "lost" if event.why else "up"
        fields: dict[str, Any] = {"state": state, "why": event.why or None}
        fields.update(notice=event.notice or None, until=event.until or None)
        if event.name:
            fields["name"] = event.name
        if event.host in self._board.document["hosts"]:
            self._board.change("hosts", event.host, fields)
        else:
            named = {"name": host_name(event.host), **fields}
            self._board.put("hosts", event.host, {key: value for key, value in named.items() if value is not None})

    def _detached(self, event: e.Detached) -> None:
        self._board.put("detached", event.id, dict(event.record) or None)

    def _transfers(self, event: e.TransfersSeen) -> None:
        self._board.put("transfers", event.id, dict(event.record) or None)

    def _tensors(self, event: e.TensorsSeen) -> None:
        self._board.put("tensors", event.id, dict(event.record) or None)
