"""Engine messages between processes about actors and calls: spawned, cancelled, blocked, interrupted."""

from enum import IntEnum

import msgspec

from monarch_nb.runtime.actors.actor import Kind
from monarch_nb.runtime.context import Ancestor
from monarch_nb.shape import RegionForm
from monarch_nb.wire import Harmless, Lane, Verb


class RunsOn(IntEnum):
    """The thread of its process that an actor runs on."""

    ITS_OWN = 0  # or its own loop
    MAIN_THREAD = 1


class SpawnActor(Harmless, array_like=True, frozen=True):
    """The request to host one rank of an actor mesh; its class and arguments follow, pickled."""

    name: str
    class_name: str
    kind: Kind
    region: RegionForm  # on which the mesh was spawned, or that it has grown to
    owner: str  # stream of the owning actor
    owner_process: str
    creators: tuple[Ancestor, ...]  # the chain of creators, the owner last
    runs_on: RunsOn = RunsOn.ITS_OWN
    debug: bytes = b""  # the debugger's breakpoints, which hold in `__init__`, too


class Cancel(msgspec.Struct, array_like=True, frozen=True):
    """Cancels a call on one rank."""

    call: str
    mesh: str
    rank: int


class WaitHop(msgspec.Struct, array_like=True, frozen=True):
    """One wait in a chain of them: an actor whose endpoint is blocked until `call` is answered."""

    process: str
    call: str
    who: str  # "alice.step"
    what: str  # "bob.mean"


class Probe(msgspec.Struct, array_like=True, frozen=True):
    """Requests whether an actor that has not answered the last call of `hops` is blocked itself."""

    round: int
    mesh: str
    rank: int
    incarnation: int
    hops: tuple[WaitHop, ...]


class Deadlock(msgspec.Struct, array_like=True, frozen=True):
    """A call that the receiver waits for is part of a circle of waits, and fails with this description."""

    call: str
    description: str


class Interrupt(msgspec.Struct, array_like=True, frozen=True):
    """Raises KeyboardInterrupt in code that a process runs for a mesh. Calls of `drop` that have not begun never run.

    A request with the same `number` is the same interrupt, which may arrive twice.
    """

    mesh: str
    number: str
    drop: tuple[str, ...] = ()


class WhatRuns(msgspec.Struct, array_like=True, frozen=True):
    """Requests which endpoint a process runs for a mesh."""

    mesh: str


class RunningEndpoint(msgspec.Struct, array_like=True, frozen=True):
    """The endpoint that one rank runs, "" for none, and its innermost line in the user's program."""

    call: str = ""
    endpoint: str = ""
    seconds: float = 0.0  # since it began
    ended: bool = False  # an interrupt has ended it
    file: str = ""
    line: int = 0
    source: str = ""
    freed: bool = False  # from process groups of torch.distributed, which cannot be used any more


class SentCall(msgspec.Struct, array_like=True, frozen=True):
    """A call by its position in the messages from its sender to one actor."""

    mesh: str
    rank: int
    incarnation: int
    sender: str
    seq: int
    call: str
    method: str


class AskReceived(msgspec.Struct, array_like=True, frozen=True):
    """Requests the states of calls to a process's actors. If it is `final`, calls that never arrived will not run."""

    calls: tuple[SentCall, ...]
    final: bool


class UnreadState(msgspec.Struct, array_like=True, frozen=True):
    """The calls of a controller with unread results, as in `Header.unread` of a later call."""

    unread: tuple[int, ...]


class CallsReceived(msgspec.Struct, array_like=True, frozen=True):
    """The states of the calls, in the order of the request: `WAITS`, `NEVER_CAME` or `ANSWERED`."""

    states: tuple[str, ...]


CANCEL = Verb("call.cancel", Cancel, doc="a rank is not to answer a call any more")
PROBE = Verb("wait.probe", Probe, doc="is the actor that has not answered blocked itself? (deadlocks)")
END = Verb("wait.end", Deadlock, doc="a call ends, as it is part of a deadlock")
INTERRUPT = Verb("actor.interrupt", Interrupt, RunningEndpoint, doc="raises KeyboardInterrupt in what a rank runs")
RECEIVED = Verb(
    "relays.received",
    AskReceived,
    CallsReceived,
    lane=Lane.DATA,
    doc="what has become of calls that a relay may have lost?",
)
UNREAD = Verb("call.unread", UnreadState, doc="the results of all other calls are read: no answers need be stored")
DOING = Verb("actor.doing", WhatRuns, RunningEndpoint, doc="what a rank runs at this moment")
