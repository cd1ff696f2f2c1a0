"""Ranks that this process itself knows to be busy: those that have not answered its calls yet."""

from collections.abc import Iterable, Iterator

from monarch_nb.runtime import MeshState, PendingCall, Runtime
from monarch_nb.store import events as e
from monarch_nb.store.facts import now

WIDEST = 10_000  # calls with more missing answers are ignored


class Pending:
    """Compares the calls that wait for answers with those of the last check.

    Called when the state is read: reports of workers, while somebody watches, come a little later.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._asked: dict[tuple[str, int], e.CallPending] = {}

    @property
    def any(self) -> bool:
        """True if calls were waiting at the last check."""
        return bool(self._asked)

    def changes(self) -> Iterator[e.CallPending]:
        """Calls that began or ended since the last check."""
        waited = self._waited(tuple(self._runtime.calls.values()))
        for key, asked in tuple(self._asked.items()):
            if key not in waited:
                del self._asked[key]
                yield e.CallPending(asked.uid, asked.rank, asked.incarnation, now())
        for key, asked in waited.items():
            before = self._asked.get(key)
            if before is None or (before.incarnation, before.endpoint) != (asked.incarnation, asked.endpoint):
                self._asked[key] = asked
                yield asked

    def _waited(self, calls: Iterable[PendingCall[object]]) -> dict[tuple[str, int], e.CallPending]:
        waited: dict[tuple[str, int], e.CallPending] = {}
        for call in calls:
            state: MeshState | None = self._runtime.meshes.get(call.mesh)
            endpoint = call.title.rpartition(".")[2] if "[" not in call.title else "cell"
            if state is None or endpoint == "__init__" or call.missing > WIDEST:
                continue
            for rank in call.missing_ranks():
                asked = e.CallPending(call.mesh, rank, state.incarnation(rank), now(), endpoint)
                waited.setdefault((call.mesh, rank), asked)
        return waited
