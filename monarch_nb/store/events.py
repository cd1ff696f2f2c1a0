"""What the engine tells the store. Ranks are base ranks: those of the procs; times are seconds since the epoch."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from monarch_nb.supervision import MeshFailure

Kind = Literal["procs", "actors"]
Condition = Literal["starting", "alive", "failed", "healing", "stopped"]
Doing = Literal["starting", "idle", "busy"]
FailureState = Literal["open", "healing", "healed", "stopped"]


class HostSeen(msgspec.Struct, frozen=True):
    """A host belongs to the cluster; `why` says that it is lost, "" that it is up.

    `notice` says who is about to take it away, `until` when that is, 0 where nobody knows.
    """

    host: str
    name: str = ""
    why: str = ""
    notice: str = ""
    until: float = 0.0


class Spawned(msgspec.Struct, frozen=True, kw_only=True):
    """A mesh was spawned. `ranks` in its own row-major order."""

    uid: str
    name: str
    kind: Kind
    ranks: Sequence[int]
    labels: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    offset: int = 0
    strides: tuple[int, ...] = ()
    picked: tuple[int, ...] = ()  # the base ranks, where no strides lead from one to the next
    actor_class: str = ""
    on: str = ""
    inner: bool = False
    hosts: tuple[str, ...] = ()
    per_host: int = 1
    owner: str = "<root>"
    mine: bool = True
    ready: bool = False
    at: float = 0.0


class Resized(msgspec.Struct, frozen=True):
    """A mesh has another extent, or lies on other hosts: it is as if it had been spawned so."""

    mesh: Spawned


class Started(msgspec.Struct, frozen=True):
    """A process runs."""

    uid: str
    rank: int
    pid: int
    at: float


class Ready(msgspec.Struct, frozen=True):
    """All of a mesh is there: its processes with their set-up, or its actors' constructors."""

    uid: str
    at: float


class Turned(msgspec.Struct, frozen=True):
    """What supervision says of a rank from now on."""

    uid: str
    rank: int
    condition: Condition
    incarnation: int
    at: float
    detail: str = ""
    failure: str = ""


class Ended(msgspec.Struct, frozen=True):
    """A mesh was stopped, or has lost its owner."""

    uid: str
    why: str
    at: float
    failed: bool = False


class Forgotten(msgspec.Struct, frozen=True):
    """A mesh that has ended is of no interest any more."""

    uid: str


class Unheld(msgspec.Struct, frozen=True):
    """Nothing in the notebook refers to a mesh since then; with None something does."""

    uid: str
    since: float | None


class Answers(msgspec.Struct, frozen=True):
    """A process does not answer since then; with None it does again."""

    uid: str
    rank: int
    since: float | None
    at: float


class Doings(msgspec.Struct, frozen=True):
    """What an actor does, and how much it has done; `calls` is -1 where that is not known.

    The uid of procs means code that runs on the process itself.
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


class Asked(msgspec.Struct, frozen=True):
    """A rank has not answered a call of this process since then; without an endpoint it has."""

    uid: str
    rank: int
    incarnation: int
    since: float
    endpoint: str = ""


class Usage(msgspec.Struct, frozen=True):
    """What a process uses: `cpu` in cores, memory in bytes; `gpu` is the share of one in use, -1 where unknown.

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


class Quiet(msgspec.Struct, frozen=True):
    """Nobody watches: what workers told of themselves gets old, and is dropped."""

    at: float


class Failed(msgspec.Struct, frozen=True):
    """A failure; `ranks` are those of `uid`, base ranks. `record` is what a view is told besides.

    With the `failure` itself, those of one cause that come soon after each other are told as one, by the first id.
    """

    id: str
    uid: str
    ranks: tuple[int, ...]
    record: Mapping[str, Any]
    failure: MeshFailure | None = None


class Told(msgspec.Struct, frozen=True):
    """An owner was asked to handle a failure, or has answered."""

    id: str
    who: str
    how: str


class Settled(msgspec.Struct, frozen=True):
    """A failure is being mended, or is over."""

    id: str
    state: FailureState
    at: float


class SessionOpened(msgspec.Struct, frozen=True):
    """An actor has stopped in the debugger."""

    id: str
    uid: str
    rank: int
    since: float
    record: Mapping[str, Any] = {}


class SessionClosed(msgspec.Struct, frozen=True):
    """It goes on."""

    id: str
    at: float


class TransfersSeen(msgspec.Struct, frozen=True):
    """What one process has from the memory of another by one mover, or what it offers; an empty record: no more."""

    id: str
    record: Mapping[str, Any]


class TensorsSeen(msgspec.Struct, frozen=True):
    """The sharded tensors of one mesh of tensors now; an empty record means that it is gone."""

    id: str
    record: Mapping[str, Any]


class Detached(msgspec.Struct, frozen=True):
    """A mesh lives on without this controller; an empty record means that it does not any more."""

    id: str
    record: Mapping[str, Any]


Event = (
    HostSeen
    | Spawned
    | Resized
    | Started
    | Ready
    | Turned
    | Ended
    | Forgotten
    | Unheld
    | Answers
    | Doings
    | Asked
    | Usage
    | Quiet
    | Failed
    | Told
    | Settled
    | SessionOpened
    | SessionClosed
    | TransfersSeen
    | TensorsSeen
    | Detached
)
