"""Engine messages about the activity of processes while they are watched."""

import msgspec

from monarch_nb.wire import Verb


class ActorActivity(msgspec.Struct, array_like=True, frozen=True):
    """Activity of one actor."""

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


class ResourcesUsed(msgspec.Struct, array_like=True, frozen=True):
    """Resources of the process."""

    cpu: float
    memory: int
    gpu: float
    gpu_memory: int
    gpu_total: int
    memory_kind: str  # see `host.linux.memory_used`
    received: float = 0.0  # bytes a second of messages and transfers
    sent: float = 0.0


class Activity(msgspec.Struct, array_like=True, frozen=True):
    """Changes since the last report."""

    doings: tuple[ActorActivity, ...]
    used: ResourcesUsed | None = None


class WatchActivity(msgspec.Struct, array_like=True, frozen=True):
    """Starts or stops reports to the sender; `pace` divides their usual frequency. `used`: of resources alone."""

    on: bool
    pace: float = 1.0
    used: bool = False
    used_pace: float = 1.0  # the same for the resources


class WhichStack(msgspec.Struct, array_like=True, frozen=True):
    """Requests the stacks of a process: of one actor, or of all if `mesh` is empty."""

    mesh: str
    rank: int


class StackText(msgspec.Struct, array_like=True, frozen=True):
    """The stacks as text."""

    text: str


WATCH = Verb("activity.watch", WatchActivity, doc="starts or stops reports of what actors do to the sender")
ACTIVITY = Verb("activity.report", Activity, doc="what the actors of a process do, and what it uses")
STACK = Verb("activity.stack", WhichStack, StackText, doc="where actors are, as text")
