"""Engine messages about what processes do while somebody watches."""

import msgspec

from monarch_nb.wire import Verb


class Doing(msgspec.Struct, array_like=True, frozen=True):
    """One actor."""

    uid: str
    rank: int
    incarnation: int
    doing: str
    since: float
    endpoint: str
    queue: int
    calls: int
    rate: float
    errors: int


class Used(msgspec.Struct, array_like=True, frozen=True):
    """The process."""

    cpu: float
    memory: int
    gpu: float
    gpu_memory: int
    gpu_total: int
    memory_kind: str  # see `host.linux.memory_used`


class Activity(msgspec.Struct, array_like=True, frozen=True):
    """What has changed since the last one."""

    doings: tuple[Doing, ...]
    used: Used | None = None


class Watch(msgspec.Struct, array_like=True, frozen=True):
    """The sender wants to hear from now on, or not any more; `pace` times less often than one of few would be told."""

    on: bool
    pace: float = 1.0


class WhichStack(msgspec.Struct, array_like=True, frozen=True):
    """Asks where the actors of a process are: one of them, or all where `mesh` is empty."""

    mesh: str
    rank: int


class StackText(msgspec.Struct, array_like=True, frozen=True):
    """Where they are, for people."""

    text: str


WATCH = Verb("activity.watch", Watch, doc="the sender watches what actors do, or not any more")
TOLD = Verb("activity.told", Activity, doc="what the actors of a process do, and what it uses")
STACK = Verb("activity.stack", WhichStack, StackText, doc="where actors are, as text")
