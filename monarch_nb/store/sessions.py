"""Actors that are stopped in the debugger: each stop is a session, and its rank is paused."""

from monarch_nb.store import events as e
from monarch_nb.store.board import Board
from monarch_nb.store.meshes import Meshes


class Sessions:
    """Takes the events of the debugger."""

    def __init__(self, board: Board, meshes: Meshes) -> None:
        self._board = board
        self._meshes = meshes
        self._ranks: dict[str, tuple[str, int]] = {}  # mesh and base rank of each session

    def opened(self, event: e.SessionOpened) -> None:
        """An actor has stopped."""
        _, index = self._meshes.find(event.uid, event.rank)
        self._board.put("sessions", event.id, {"mesh": event.uid, "rank": index, "since": event.since, **event.record})
        self._ranks[event.id] = (event.uid, event.rank)
        self._pause(event.uid, event.rank, event.since)

    def closed(self, event: e.SessionClosed) -> None:
        """It goes on; a rank is paused until its last session has ended."""
        held = self._ranks.pop(event.id, None)
        self._board.put("sessions", event.id, None)
        if held is not None and held not in self._ranks.values():
            self._pause(*held, None)

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
        if since is not None or all(actors.ranks[at].paused is None for actors, at in self._meshes.above(procs, base)):
            proc.paused = since
        self._meshes.show(procs, below)
