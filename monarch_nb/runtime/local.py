"""What there is in one process: its actors, its calls that wait, and the meshes that it knows."""

from collections import deque

from monarch_nb.runtime.actors.cell import ActorCell
from monarch_nb.runtime.calls import PendingCall
from monarch_nb.runtime.meshes import MeshState
from monarch_nb.wire import host_of

UNHEARD = 1000
Unheard = tuple[str, int, str, int, float]  # mesh, rank, endpoint, status, and when (wall clock)


class Local:
    """The tables that the parts of a runtime, supervision and meshes share."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.host = host_of(address)
        self.root = f"{address}#"  # the stream of code outside actors
        self.calls: dict[str, PendingCall] = {}  # that wait for answers, by id
        self.cells: dict[tuple[str, int], ActorCell] = {}  # the actors here, by mesh and rank
        self.meshes: dict[str, MeshState] = {}  # owned here or referred to, by uid
        self.away: set[str] = set()  # processes that have left meshes which live here, and hear nothing
        self.unheard: deque[Unheard] = deque(maxlen=UNHEARD)  # answers that were for them
        self.closed = False  # this process has left the cluster
