"""What is told of single ranks, folded in: how supervision has them, whether they answer, what they do and use."""

from typing import Any

from monarch_nb.store import events as e
from monarch_nb.store.board import Board
from monarch_nb.store.meshes import Mesh, Meshes
from monarch_nb.store.rank import working

_USED = ("cpu", "memory", "gpu", "gpu_memory", "gpu_total")
_STATISTICS = ("queue", "rate", *_USED)


class Ranks:
    """Takes the events of ranks. What is told of ranks that nobody knows (any more) is of no consequence."""

    def __init__(self, board: Board, meshes: Meshes) -> None:
        self._board = board
        self._meshes = meshes

    def started(self, event: e.Started) -> None:
        """Its process runs."""
        mesh, index = self._meshes.find(event.uid, event.rank)
        if mesh is not None:
            self._board.change_rank(event.uid, str(index), {"pid": event.pid})

    def turned(self, event: e.Turned, failure: str) -> None:
        """Supervision has it so from now on; `failure` is the id under which what happened to it is shown."""
        mesh, index = self._meshes.find(event.uid, event.rank)
        if mesh is None or event.incarnation < mesh.ranks[index].incarnation:
            return
        rank = mesh.ranks.own(index)
        if event.condition != "alive" or event.incarnation != rank.incarnation:
            rank.doing = rank.asked = None
            self._meshes.rests(mesh, index)
        fields: dict[str, Any] = {
            "incarnation": event.incarnation or None,
            "detail": event.detail or None,
            "failure": failure or None,
        }
        if event.condition == "failed" or event.incarnation != rank.incarnation:
            rank.unanswered = None  # of the process before
        if event.condition == "failed":
            fields.update(dict.fromkeys(_STATISTICS))
        rank.condition, rank.incarnation, rank.since = event.condition, event.incarnation, event.at
        self._board.change_rank(event.uid, str(index), fields)
        self._meshes.show_with_actors(mesh, index)

    def answers(self, event: e.Answers) -> None:
        """Its process does not answer, or does again."""
        mesh, index = self._meshes.find(event.uid, event.rank)
        if mesh is not None:
            mesh.ranks.own(index).unanswered = event.since
            self._meshes.show_with_actors(mesh, index)

    def does(self, event: e.Doings) -> None:
        """It has begun or ended something."""
        mesh, index = self._meshes.find(event.uid, event.rank)
        if mesh is None or event.incarnation < mesh.ranks[index].incarnation:
            return
        mesh.ranks.own(index).doing = event
        counters: dict[str, Any] = {}
        if mesh.event.kind == "actors" and event.calls >= 0:
            counters = {
                "queue": event.queue or None,
                "calls": event.calls or None,
                "rate": event.rate or None,
                "errors": event.errors or None,
            }
        self._meshes.show(mesh, index, counters)
        self._works(mesh, index)

    def asked(self, event: e.Asked) -> None:
        """A call of this process waits for it, or does no longer: known here before its process reports so."""
        mesh, index = self._meshes.find(event.uid, event.rank)
        if mesh is None or event.incarnation < mesh.ranks[index].incarnation:
            return
        rank = mesh.ranks.own(index)
        before, rank.asked = rank.asked, event if event.endpoint else None
        doing = rank.doing
        if rank.asked is None and before is not None and doing is not None and doing.endpoint == before.endpoint:
            rank.doing = None  # the report that it has ended is on its way
        self._meshes.show(mesh, index)
        self._works(mesh, index)

    def _works(self, mesh: Mesh, index: int) -> None:
        """Its process is busy for as long as it is."""
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
        """What its process uses."""
        mesh, index = self._meshes.find(event.uid, event.rank)
        if mesh is None:
            return
        fields: dict[str, Any] = {"cpu": event.cpu, "memory": event.memory}
        if event.gpu_total:
            fields.update(gpu=None if event.gpu < 0 else event.gpu)
            fields.update(gpu_memory=event.gpu_memory, gpu_total=event.gpu_total)
        self._board.change_rank(event.uid, str(index), fields)

    def quiet(self, _event: e.Quiet) -> None:
        """Workers tell nothing of themselves any more."""
        for mesh in self._meshes:
            for index, rank in mesh.ranks.told():
                if rank.doing is not None:
                    rank.doing = None
                    self._meshes.show(mesh, index)
                    self._works(mesh, index)
        for uid, ranks in self._board.document["ranks"].items():
            for place in ranks:
                self._board.change_rank(uid, place, dict.fromkeys(_STATISTICS))
