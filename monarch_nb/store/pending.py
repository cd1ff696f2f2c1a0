"""Who is busy as this process can tell by itself: those that have not answered its calls yet."""

from collections.abc import Iterable, Iterator

from monarch_nb.runtime import MeshState, PendingCall, Runtime
from monarch_nb.store import events as e
from monarch_nb.store.facts import now

WIDEST = 10_000  # calls of which more answers are missing are not looked at


class Pending:
    """Compares the calls that wait for answers with those of the last look.

    It is asked by who looks: what workers report, while somebody watches, comes a little later.
    """

    def __init__(self, engine: Runtime) -> None:
        self._engine = engine
        self._asked: dict[tuple[str, int], e.Asked] = {}

    @property
    def any(self) -> bool:
        """Whether calls were waiting at the last look."""
        return bool(self._asked)

    def changes(self) -> Iterator[e.Asked]:
        """What has begun and ended since it was last asked."""
        waited = self._waited(tuple(self._engine.calls.values()))
        for place, asked in tuple(self._asked.items()):
            if place not in waited:
                del self._asked[place]
                yield e.Asked(asked.uid, asked.rank, asked.incarnation, now())
        for place, asked in waited.items():
            before = self._asked.get(place)
            if before is None or (before.incarnation, before.endpoint) != (asked.incarnation, asked.endpoint):
                self._asked[place] = asked
                yield asked

    def _waited(self, calls: Iterable[PendingCall]) -> dict[tuple[str, int], e.Asked]:
        waited: dict[tuple[str, int], e.Asked] = {}
        for call in calls:
            state: MeshState | None = self._engine.meshes.get(call.mesh)
            endpoint = call.title.rpartition(".")[2] if "[" not in call.title else "cell"
            if state is None or endpoint == "__init__" or call.missing > WIDEST:
                continue
            for rank in call.missing_ranks():
                asked = e.Asked(call.mesh, rank, state.incarnation(rank), now(), endpoint)
                waited.setdefault((call.mesh, rank), asked)
        return waited
