"""Events of the store. Ranks are base ranks, those of the procs; times are seconds since the epoch."""

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from monarch_nb.store.records import FailureFields, FailureState
from monarch_nb.supervision import MeshFailure

Kind = Literal["procs", "actors"]
Condition = Literal["starting", "alive", "failed", "healing", "stopped"]
Doing = Literal["starting", "idle", "busy"]


class HostSeen(msgspec.Struct, frozen=True):
    """A host of the cluster; `why` is the reason of its loss, "" while it is up.

    `notice` is the source of a preemption notice, `until` the time of the preemption, 0 if unknown.
    """

    host: str
    name: str = ""
    why: str = ""
    notice: str = ""
    until: float = 0.0


class MeshDescription(msgspec.Struct, frozen=True, kw_only=True):
    """A mesh was spawned. `ranks` are in its own row-major order."""

    uid: str
    name: str
    kind: Kind
    ranks: Sequence[int]
    labels: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    offset: int = 0
    strides: tuple[int, ...] = ()
    picked: tuple[int, ...] = ()  # the base ranks, where strides cannot describe them
    actor_class: str = ""
    on: str = ""
    inner: bool = False
    hosts: tuple[str, ...] = ()
    per_host: int = 1
    owner: str = "<root>"
    mine: bool = True
    ready: bool = False
    at: float = 0.0


class MeshRedescribed(msgspec.Struct, frozen=True):
    """A mesh has a new extent, or other hosts; `mesh` is its new description."""

    mesh: MeshDescription


class ProcessStarted(msgspec.Struct, frozen=True):
    """A process runs."""

    uid: str
    rank: int
    pid: int
    at: float


class MeshReady(msgspec.Struct, frozen=True):
    """The start of a mesh is complete: its processes with their set-up, or its actors' constructors."""

    uid: str
    at: float


class RankStateChanged(msgspec.Struct, frozen=True):
    """Supervision reports a new condition of a rank."""

    uid: str
    rank: int
    condition: Condition
    incarnation: int
    at: float
    detail: str = ""
    failure: str = ""


class MeshEnded(msgspec.Struct, frozen=True):
    """A mesh was stopped, or has lost its owner."""

    uid: str
    why: str
    at: float
    failed: bool = False


class MeshForgotten(msgspec.Struct, frozen=True):
    """A mesh that has ended leaves the state."""

    uid: str


class MeshUnheld(msgspec.Struct, frozen=True):
    """No variable of the notebook refers to a mesh since that time; None: one does again."""

    uid: str
    since: float | None


class ResponsivenessChanged(msgspec.Struct, frozen=True):
    """A process has not answered since that time; None: it answers again."""

    uid: str
    rank: int
    since: float | None
    at: float


class ActivityChanged(msgspec.Struct, frozen=True):
    """The activity and counters of an actor; `calls` is -1 if unknown.

    With the uid of procs: code that runs on the process itself.
    """

    uid: str
    rank: int
    incarnation: int
    doing: Doing
    since: float
    endpoint: str = ""
    queue: int = 0
    calls: int = 0
    rate: float = 0.0
    errors: int = 0


class CallPending(msgspec.Struct, frozen=True):
    """A call of this process to a rank is pending since that time; without an endpoint it was answered."""

    uid: str
    rank: int
    incarnation: int
    since: float
    endpoint: str = ""


class Usage(msgspec.Struct, frozen=True):
    """Resources of a process: `cpu` in cores, memory in bytes; `gpu` is the share in use, -1 if unknown.

    `memory_kind` says how memory is counted: "Pss", "private" or "peak".
    """

    uid: str
    rank: int
    cpu: float
    memory: int
    gpu: float = -1.0
    gpu_memory: int = 0
    gpu_total: int = 0
    memory_kind: str = "Pss"


class WatchersLeft(msgspec.Struct, frozen=True):
    """The last watcher has left: reported activity is outdated, and is dropped."""

    at: float


class MeshFailed(msgspec.Struct, frozen=True):
    """A failure; `ranks` are base ranks of the mesh `uid`. `record` has further fields for views.

    Successive failures with a `failure` of the same cause are shown as one, under the first id.
    """

    id: str
    uid: str
    ranks: tuple[int, ...]
    record: FailureFields
    failure: MeshFailure | None = None


class OwnerNotified(msgspec.Struct, frozen=True):
    """An owner was asked to handle a failure, or has answered."""

    id: str
    who: str
    how: str


class FailureStateChanged(msgspec.Struct, frozen=True):
    """A failure is being healed, or is over."""

    id: str
    state: FailureState
    at: float


class SessionOpened(msgspec.Struct, frozen=True):
    """An actor has stopped in the debugger."""

    id: str
    uid: str
    rank: int
    since: float
    record: Mapping[str, object] = {}


class SessionClosed(msgspec.Struct, frozen=True):
    """A debugger session has ended: its thread resumed."""

    id: str
    at: float


class TransfersSeen(msgspec.Struct, frozen=True):
    """Transfers of one process from another's memory by one mover, or its offered memory; empty record: no longer."""

    id: str
    record: Mapping[str, object]


class TensorsSeen(msgspec.Struct, frozen=True):
    """The sharded tensors of one mesh of tensors; an empty record means that the mesh has ended."""

    id: str
    record: Mapping[str, object]


class DetachedMesh(msgspec.Struct, frozen=True):
    """A mesh runs on without this controller; an empty record means that it no longer does."""

    id: str
    record: Mapping[str, object]


Event = (
    HostSeen
    | MeshDescription
    | MeshRedescribed
    | ProcessStarted
    | MeshReady
    | RankStateChanged
    | MeshEnded
    | MeshForgotten
    | MeshUnheld
    | ResponsivenessChanged
    | ActivityChanged
    | CallPending
    | Usage
    | WatchersLeft
    | MeshFailed
    | OwnerNotified
    | FailureStateChanged
    | SessionOpened
    | SessionClosed
    | TransfersSeen
    | TensorsSeen
    | DetachedMesh
)
