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
    """All its ranks have been asked for: `mesh.spawn_spec.initialized` resolves when they are there."""

    mesh: MeshState


class MeshStopping(Struct, frozen=True):
    """A mesh, or some of its ranks, are being stopped."""

    mesh: MeshState


class MeshStopped(Struct, frozen=True):
    """They have stopped; `mesh.stopped` says why where it was the whole mesh."""

    mesh: MeshState


class RanksStarting(Struct, frozen=True):
    """Hosts are about to be asked for ranks of a mesh, other than when it is spawned. A listener may block."""

    mesh: MeshState
    hosts: frozenset[str]


class MeshHealed(Struct, frozen=True):
    """Ranks of a mesh are back."""

    mesh: MeshState
    back: Sequence[RankIncarnation]


class MeshResized(Struct, frozen=True):
    """It has another extent, or lies on other hosts."""

    mesh: MeshState


class ProcStarted(Struct, frozen=True):
    """A process exists."""

    address: str
    pid: int
    log: str = ""  # the file on its host that all it writes is kept in


class ProcExited(Struct, frozen=True):
    """A process is gone, or never came to be."""

    address: str
    reason: str


class ProcUnresponsive(Struct, frozen=True):
    """A living process does not answer, since when (wall clock)."""

    address: str
    since: float


class ProcResponsive(Struct, frozen=True):
    """It answers again."""

    address: str
    since: float


class HostLost(Struct, frozen=True):
    """A host agent cannot be reached any more, and all that ran there is gone."""

    host: str


class HostBack(Struct, frozen=True):
    """A host that was lost can be used again."""

    host: str


class HostNoticed(Struct, frozen=True):
    """A host is about to be taken away; `text` says it to people, with what can be done."""

    host: str
    by: str
    until: float | None  # wall clock; None where nobody knows
    text: str


class HostNoticeWithdrawn(Struct, frozen=True):
    """It was not, and is as before."""

    host: str
    text: str


class HostMessage(Struct, frozen=True):
    """What else people are to know of hosts: one has taken the place of another, a spare one is lost."""

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
    blocks_actor: bool  # it holds its actor up; frames of a failure that are only looked at do not


class RankResumed(Struct, frozen=True):
    """It goes on."""

    session: str


class OwnerChanged(Struct, frozen=True):
    """Meshes that this process holds a part of have another owner, in that process; "" is nobody, for a time."""

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
