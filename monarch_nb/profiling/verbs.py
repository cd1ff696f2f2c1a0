"""Engine messages between the profiler of a mesh and the processes of that mesh: requests, samples and records."""

import msgspec

from monarch_nb.wire import Verb


class Begin(msgspec.Struct, array_like=True, frozen=True):
    """Starts to sample an actor, or with `mesh` "" the whole process, until `StopSampling`."""

    number: int  # of the profile, counted by the requester
    mesh: str
    rank: int  # base rank
    hz: float


class Began(msgspec.Struct, array_like=True, frozen=True):
    """Sampling has begun."""

    at: float  # wall clock of the process, to compare the clocks of hosts


class StackFrame(msgspec.Struct, array_like=True, frozen=True):
    """A frame of a stack. The line is the executed one; `users` is False for frames of installed libraries."""

    file: str
    line: int
    function: str
    first: int  # first line of the function
    users: bool


class Weight(msgspec.Struct, array_like=True, frozen=True):
    """The time for which a stack was sampled. The empty stack is that of an actor that waits for messages."""

    stack: tuple[int, ...]  # numbers of frames, outermost first
    seconds: float
    computing: float  # those of the seconds in which its thread ran on a processor
    samples: int


class Samples(msgspec.Struct, array_like=True, frozen=True):
    """Samples since the last message of the same sampler."""

    number: int
    rank: int
    places: tuple[StackFrame, ...]  # new frames, numbered from `first`
    first: int
    weights: tuple[Weight, ...]
    seconds: float  # sampled time
    cost: float  # processor seconds of the sampler's own thread
    dropped: int = 0  # samples of further stacks beyond the limit


class SamplesReply(msgspec.Struct, array_like=True, frozen=True):
    """The answer to samples: `more` is False when no more are wanted."""

    more: bool


class StopSampling(msgspec.Struct, array_like=True, frozen=True):
    """Stops sampling; the answer has the remaining samples."""

    number: int
    mesh: str
    rank: int


class BeginRecording(msgspec.Struct, array_like=True, frozen=True):
    """Records the calls of an actor, or with `mesh` "" of the whole process, until `StopRecording`."""

    number: int  # of the timeline, counted by the requester
    mesh: str
    rank: int  # base rank
    pace: float = 1.0  # divides the rate at which it sends records


class RecordedSpan(msgspec.Struct, array_like=True, frozen=True):
    """A stretch of a rank's time; `ended` is 0 while it lasts. Times are wall clock."""

    kind: str  # "call", "span", "collective", "transfer", "pause"
    name: str
    began: float
    ended: float
    call: str = ""
    failed: bool = False
    count: int = 1  # of short calls that follow each other


class RecordedCall(msgspec.Struct, array_like=True, frozen=True):
    """A call that a process has sent; `ended` is 0 while it waits for answers. Times are wall clock."""

    call: str
    title: str
    mesh: str
    size: int
    began: float
    ended: float
    file: str
    line: int


class Recorded(msgspec.Struct, array_like=True, frozen=True):
    """The records since the last message of the same process. `running` replaces that of the last message."""

    number: int
    rank: int
    spans: tuple[RecordedSpan, ...]
    running: tuple[RecordedSpan, ...] = ()
    sent: tuple[RecordedCall, ...] = ()  # a call is repeated when it has ended
    cost: float = 0.0  # processor seconds


class StopRecording(msgspec.Struct, array_like=True, frozen=True):
    """Stops recording; the answer has the rest."""

    number: int
    mesh: str
    rank: int


BEGIN = Verb("profiling.begin", Begin, Began, doc="samples the stacks of an actor, or of the whole process")
END = Verb("profiling.end", StopSampling, Samples, doc="samples no longer, and gives the rest")
SAMPLES = Verb("profiling.samples", Samples, SamplesReply, doc="what was sampled since the last of these")
RECORD = Verb("profiling.record", BeginRecording, Began, doc="records the calls of an actor, or of the whole process")
END_RECORD = Verb("profiling.end_record", StopRecording, Recorded, doc="records no longer, and gives the rest")
RECORDED = Verb("profiling.recorded", Recorded, SamplesReply, doc="what was recorded since the last of these")
