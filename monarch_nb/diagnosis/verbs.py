"""Engine messages of a diagnosis: a process's endpoints and collectives, times and memory."""

import msgspec

from monarch_nb.collectives.verbs import GroupKey
from monarch_nb.runtime.tensor_memory import HeldMemory
from monarch_nb.wire import Verb


class StackLine(msgspec.Struct, array_like=True, frozen=True):
    """A line of a stack; `users` is False for lines of installed libraries."""

    file: str
    line: int
    function: str
    users: bool = True


class AwaitedCall(msgspec.Struct, array_like=True, frozen=True):
    """Ranks of another mesh of actors for whose replies an actor waits."""

    title: str  # "trainers.step"
    mesh: str
    ranks: tuple[int, ...]


class LockWait(msgspec.Struct, array_like=True, frozen=True):
    """A thread that waits for a lock of another, or of its own."""

    thread: str  # its name
    lock: str  # as the program names it: "self.lock"
    line: StackLine
    owner: str  # name of the thread that holds it
    owner_line: StackLine  # the owner's present line
    paused: int  # how often the waiting thread has stopped running; -1 where that is not known


class EndpointRun(msgspec.Struct, array_like=True, frozen=True):
    """An endpoint under way, or `__init__`."""

    mesh: str
    rank: int
    actor: str  # name of its mesh
    endpoint: str
    call: str
    seconds: float
    thread: int
    lines: tuple[StackLine, ...]  # innermost first, without those of this library
    state: str  # of its thread, as in /proc: "R" runs or would, "S" sleeps, "D" waits for a disk; "" where not known
    processor: float  # seconds that its thread has used so far
    transferred: int  # bytes that its thread has read and written so far
    waits: tuple[AwaitedCall, ...] = ()
    callee: str = ""  # the C function that its innermost line calls; "" for none
    peers: tuple[int, ...] = ()  # ranks of torch.distributed whose message it waits for
    woken: int = -1  # times that its thread was woken, where it waits for a file or a connection; else -1
    helpers: float = 0.0  # processor seconds of other threads and of child processes that it waits for
    waits_for_child: bool = False
    still: float = 0.0  # seconds for which its thread has not run, as far as inspections show
    lock: LockWait | None = None  # for which its thread waits
    helpers_woken: int = 0  # wakeups of other threads that wait for a file or a connection
    helpers_paused: int = 0  # times that other threads have stopped running
    queue: tuple[str, ...] = ()  # calls whose messages the actor has got, and not begun


class NewestCollective(msgspec.Struct, array_like=True, frozen=True):
    """The newest collective that a process has begun in a group."""

    group: GroupKey
    number: int  # in its group, from 1
    name: str  # "all_reduce"
    what: str  # types and shapes of its inputs: "float32 [4, 8]"
    is_pending: bool
    seconds: float  # since it began
    thread: int
    last: tuple[tuple[int, str], ...] = ()  # number, name and inputs of the group's last collectives, this one included
    pause: float = 0.0  # the longest between two of them in the call under way


class Inspect(msgspec.Struct, array_like=True, frozen=True):
    """Asks a process for its evidence."""


class Evidence(msgspec.Struct, array_like=True, frozen=True):
    """The endpoints, collectives and lock cycles of a process."""

    running: tuple[EndpointRun, ...] = ()
    collectives: tuple[NewestCollective, ...] = ()
    groups: tuple[GroupKey, ...] = ()  # of which it is a member
    rank: int = -1  # of torch.distributed
    has_recorder: bool = False  # collectives are recorded
    circle: tuple[LockWait, ...] = ()  # threads, each of which waits for a lock of the next


class BeginTimes(msgspec.Struct, array_like=True, frozen=True):
    """Starts sampling of a process's time, until `EndTimes`, or for ten minutes."""

    number: int  # counted by the requester


class BegunTimes(msgspec.Struct, array_like=True, frozen=True):
    """Sampling has begun."""

    clock: int  # wall clock of the process, in nanoseconds


class EndTimes(msgspec.Struct, array_like=True, frozen=True):
    """Stops sampling; the reply is `RankTimes`."""

    number: int


class TimeSpent(msgspec.Struct, array_like=True, frozen=True):
    """Time in one phase of a step, at one line of the user's program."""

    phase: str  # "forward", "collective", "idle", …; "" in other code
    source: str  # "file:line", "" where no line is known
    seconds: float


class CallTime(msgspec.Struct, array_like=True, frozen=True):
    """A call that ran in the sampled time."""

    call: str
    title: str  # "trainers.step"
    seconds: float


class BegunCollectives(msgspec.Struct, array_like=True, frozen=True):
    """The times at which a process has begun collectives of a group."""

    group: GroupKey
    numbers: tuple[int, ...]
    times: tuple[int, ...]  # wall clock, in nanoseconds


class RankTimes(msgspec.Struct, array_like=True, frozen=True):
    """The sampled time of a process, by phase and line."""

    seconds: float  # that were sampled
    samples: int
    spent: tuple[TimeSpent, ...]
    calls: tuple[CallTime, ...] = ()
    collectives: tuple[BegunCollectives, ...] = ()
    queued: float = 0.0  # seconds in which its threads were ready to run, and waited for a processor
    throttled: float = 0.0  # seconds in which a limit of its container kept it from its processors
    gpu: str = ""  # the reason why its GPU is throttled: "it is too hot (91 °C)"; "" if not known
    gpu_share: float = -1.0  # of the latest time in which kernels ran there; -1 if not known


class AskMemory(msgspec.Struct, array_like=True, frozen=True):
    """Asks a process for its use of memory."""


class TensorsAlike(msgspec.Struct, array_like=True, frozen=True):
    """Tensors of one type and shape that live in a process."""

    what: str  # "float32 [64, 1024]"
    device: str
    count: int
    size: int  # bytes of all of them


class GpuMemory(msgspec.Struct, array_like=True, frozen=True):
    """The GPU that a process computes on, see `gpu.GpuLoad`: bytes, and the share of the time in which kernels ran."""

    share: float
    own: int
    used: int
    total: int


class ProcessMemory(msgspec.Struct, array_like=True, frozen=True):
    """The memory of a process, in bytes."""

    used: int
    measure: str  # of `used`, see `host.linux.memory_used`
    resident: int
    peak: int  # of what was resident
    limit: int  # for all processes of the machine or container; 0 if not known
    free: int  # of that
    cuda: int  # in tensors on the GPU that the process computes on
    reserved: int  # there
    tensors: tuple[TensorsAlike, ...] = ()
    held: tuple[HeldMemory, ...] = ()  # the tensors' memory by name
    gpu: GpuMemory | None = None


BEGIN_TIMES = Verb("diagnosis.times", BeginTimes, BegunTimes, doc="samples where the time of a process goes")
END_TIMES = Verb("diagnosis.times.end", EndTimes, RankTimes, doc="where the time has gone")
MEMORY = Verb("diagnosis.memory", AskMemory, ProcessMemory, doc="what memory a process uses, and for which tensors")
INSPECT = Verb("diagnosis.inspect", Inspect, Evidence, doc="what a process runs, and which collectives it has begun")
