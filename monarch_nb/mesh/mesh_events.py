"""Events of meshes, processes and hosts, published to displays and other listeners."""

import logging
from collections.abc import Callable, Sequence

from msgspec import Struct

from monarch_nb.runtime import MeshState
from monarch_nb.supervision import RankIncarnation

logger = logging.getLogger(__name__)


class MeshSpawned(Struct, frozen=True):
    """A mesh of this process is known from now on."""

    mesh: MeshState


class MeshStarting(Struct, frozen=True):
    """All its ranks have been requested: `mesh.spawn_spec.initialized` resolves when they run."""

    mesh: MeshState


class MeshStopping(Struct, frozen=True):
    """A mesh, or some of its ranks, are being stopped."""

    mesh: MeshState


class MeshStopped(Struct, frozen=True):
    """Ranks have stopped; `mesh.stopped` has the reason if it was the whole mesh."""

    mesh: MeshState


class RanksStarting(Struct, frozen=True):
    """Ranks of a mesh are about to be started on hosts, other than when it is spawned. A listener may block."""

    mesh: MeshState
    hosts: frozenset[str]


class MeshHealed(Struct, frozen=True):
    """Ranks of a mesh were healed."""

    mesh: MeshState
    back: Sequence[RankIncarnation]


class MeshResized(Struct, frozen=True):
    """A mesh has another extent, or lies on other hosts."""

    mesh: MeshState


class ProcStarted(Struct, frozen=True):
    """A process exists."""

    address: str
    pid: int
    log: str = ""  # the file on its host with its whole output


class ProcExited(Struct, frozen=True):
    """A process has ended, or was never started."""

    address: str
    reason: str


class ProcUnresponsive(Struct, frozen=True):
    """A living process does not answer, since when (wall clock)."""

    address: str
    since: float


class ProcResponsive(Struct, frozen=True):
    """A process answers again."""

    address: str
    since: float


class HostLost(Struct, frozen=True):
    """A host agent cannot be reached any more, and all processes there are lost."""

    host: str


class HostBack(Struct, frozen=True):
    """A host that was lost can be used again."""

    host: str


class HostNoticed(Struct, frozen=True):
    """A host will be ended soon; `text` says so to people, with possible remedies."""

    host: str
    by: str
    until: float | None  # wall clock; None if unknown
    text: str


class HostNoticeWithdrawn(Struct, frozen=True):
    """A host that was to be ended stays."""

    host: str
    text: str


class HostMessage(Struct, frozen=True):
    """Other news of hosts for people: one has replaced another, a spare host is lost."""

    text: str


class RankPaused(Struct, frozen=True):
    """A thread has stopped in the debugger."""

    session: str
    mesh: str
    rank: int
    actor: str
    file: str
    line: int
    function: str
    since: float  # wall clock
    blocks_actor: bool  # False for the frames of a failure, which are only inspected


class RankResumed(Struct, frozen=True):
    """The thread continues."""

    session: str


class OwnerChanged(Struct, frozen=True):
    """Meshes of which this process holds a part have another owner process; "" for none at the moment."""

    owner: str


Event = (
    MeshSpawned
    | MeshStarting
    | MeshStopping
    | MeshStopped
    | RanksStarting
    | MeshHealed
    | MeshResized
    | ProcStarted
    | ProcExited
    | ProcUnresponsive
    | ProcResponsive
    | HostLost
    | HostBack
    | HostNoticed
    | HostNoticeWithdrawn
    | HostMessage
    | RankPaused
    | RankResumed
    | OwnerChanged
)

Listener = Callable[[Event], None]


class MeshEvents:
    """Publishes the events of one process to listeners."""

    def __init__(self, *listeners: Listener) -> None:
        self.listeners = list(listeners)  # called on engine threads: they must not block

    def publish(self, event: Event) -> None:
        """Calls all listeners with an event; a listener that raises does not affect the others."""
        for listener in tuple(self.listeners):
            try:
                listener(event)
            except Exception:
                logger.exception("a display failed on %s", type(event).__name__)
