"""Engine messages between the processes of a cluster about calls: cancelled, blocked, interrupted."""

import msgspec

from monarch_nb.wire import Verb


class Cancel(msgspec.Struct, array_like=True, frozen=True):
    """One rank is not to answer a call any more."""

    call: str
    mesh: str
    rank: int


class Hop(msgspec.Struct, array_like=True, frozen=True):
    """One wait in a chain of them: an actor whose endpoint is blocked until `call` is answered."""

    process: str
    call: str
    who: str  # "alice.step"
    what: str  # "bob.mean"


class Probe(msgspec.Struct, array_like=True, frozen=True):
    """Asks an actor that has not answered the last call of `hops` whether it is blocked itself."""

    round: int
    mesh: str
    rank: int
    incarnation: int
    hops: tuple[Hop, ...]


class Deadlock(msgspec.Struct, array_like=True, frozen=True):
    """A call that the receiver waits for is part of a circle of waits, and is to fail with this story."""

    call: str
    story: str


class Interrupt(msgspec.Struct, array_like=True, frozen=True):
    """Raises KeyboardInterrupt in what one rank runs. Calls of `drop` that have not begun never do."""

    mesh: str
    rank: int
    drop: tuple[str, ...] = ()


class WhatRuns(msgspec.Struct, array_like=True, frozen=True):
    """Asks what one rank does."""

    mesh: str
    rank: int


class Doing(msgspec.Struct, array_like=True, frozen=True):
    """What one rank does: the endpoint it runs, "" for none, and the innermost line of the user's that it is in."""

    call: str = ""
    endpoint: str = ""
    seconds: float = 0.0  # since it began
    ended: bool = False  # an interrupt has ended it
    file: str = ""
    line: int = 0
    source: str = ""
    freed: bool = False  # of process groups of torch.distributed, which are of no use any more


CANCEL = Verb("call.cancel", Cancel, doc="a rank is not to answer a call any more")
PROBE = Verb("wait.probe", Probe, doc="is the actor that has not answered blocked itself? (deadlocks)")
END = Verb("wait.end", Deadlock, doc="a call ends, as it is part of a deadlock")
INTERRUPT = Verb("actor.interrupt", Interrupt, Doing, doc="raises KeyboardInterrupt in what a rank runs")
DOING = Verb("actor.doing", WhatRuns, Doing, doc="what a rank runs at this moment")
