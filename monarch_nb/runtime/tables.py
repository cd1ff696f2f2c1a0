"""Tables of one process: its actors, its calls that wait, and the meshes that it knows."""

import threading
from typing import TYPE_CHECKING

from monarch_nb.runtime.actors.cell import ActorCell
from monarch_nb.runtime.calls import PendingCall
from monarch_nb.runtime.meshes import MeshState
from monarch_nb.wire import host_of

if TYPE_CHECKING:
    from monarch_nb.runtime.stored_answers import StoredAnswers

_making = threading.Lock()


class ProcessTables:
    """The tables that the parts of a runtime, supervision and meshes share."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.host = host_of(address)
        self.root = f"{address}#"  # the stream of code outside actors
        self.calls: dict[str, PendingCall[object]] = {}  # that wait for answers, by id
        self.cells: dict[tuple[str, int], ActorCell] = {}  # the actors here, by mesh and rank
        self.meshes: dict[str, MeshState] = {}  # owned here or referred to, by uid
        self.away: set[str] = set()  # processes that have detached from meshes which live here
        self.orphans: set[str] = set()  # calls that such a process had made before it left, and came back
        self._stored_answers: StoredAnswers | None = None
        self.closed = False  # this process has left the cluster

    @property
    def stored_answers(self) -> "StoredAnswers":
        """Answers that were for them."""
        if self._stored_answers is None:
            from monarch_nb.runtime.stored_answers import StoredAnswers

            with _making:
                self._stored_answers = self._stored_answers or StoredAnswers()
        return self._stored_answers
