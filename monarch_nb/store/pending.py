"""Who is busy as this process can tell by itself: those that have not answered its calls yet."""

from collections.abc import Iterable, Iterator

from monarch_nb.runtime import MeshState, PendingCall, Runtime
from monarch_nb.store import events as e
from monarch_nb.store.facts import now

WIDEST = 10_000  # calls of which more answers are missing are not looked at


class Pending:
    """Compares the calls that wait for answers with those of the last look.

    It is asked while nobody watches; workers then tell nothing of what they do.
    """

    def __init__(self, engine: Runtime) -> None:
        self._engine = engine
        self._busy: dict[tuple[str, int], e.Doings] = {}

    def clear(self) -> None:
        """What was told is void: the workers tell from now on, or everything was dropped."""
        self._busy.clear()

    def changes(self) -> Iterator[e.Doings]:
        """What has begun and ended since it was last asked."""
        waited = self._waited(tuple(self._engine.calls.values()))
        for place, doing in tuple(self._busy.items()):
            if place not in waited:
                del self._busy[place]
                yield e.Doings(doing.uid, doing.rank, doing.incarnation, "idle", now(), calls=-1)
        for place, doing in waited.items():
            if place not in self._busy:
                self._busy[place] = doing
                yield doing

    def _waited(self, calls: Iterable[PendingCall]) -> dict[tuple[str, int], e.Doings]:
        waited: dict[tuple[str, int], e.Doings] = {}
        for call in calls:
            state: MeshState | None = self._engine.meshes.get(call.mesh)
            endpoint = call.title.rpartition(".")[2] if "[" not in call.title else "cell"
            if state is None or endpoint == "__init__" or call.missing > WIDEST:
                continue
            for rank in call.missing_ranks():
                doing = e.Doings(call.mesh, rank, state.incarnation(rank), "busy", now(), endpoint, calls=-1)
                waited.setdefault((call.mesh, rank), doing)
        return waited
