"""What stopped ranks and their controller tell each other: plain data, in CONTROL messages."""

from typing import Literal

import msgspec

from monarch_nb.wire import Harmless

Kind = Literal["pdb", "eval", "locals", "look", "release", "resume", "quit"]


class Frame(Harmless, array_like=True, frozen=True):
    """One frame of a stack."""

    file: str
    line: int
    function: str
    text: str = ""  # the line itself


class Stopped(Harmless, frozen=True, kw_only=True):
    """debug.stopped: a thread has stopped; everything that is known of it without asking it."""

    session: str
    number: int  # how often this session has stopped
    address: str
    host: str
    pid: int
    mesh: str  # uid of the actor's mesh; of the processes', where it is no actor's
    name: str
    rank: int
    incarnation: int
    labels: tuple[str, ...] = ()
    point: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    endpoint: str = ""
    call: str = ""
    chain: tuple[str, ...] = ()  # calls that wait for it
    thread: str = ""  # its name, where it is not the actor's own
    reason: str = ""
    note: str = ""
    post_mortem: bool = False
    stack: tuple[Frame, ...] = ()  # outermost first, without the engine's
    current: int = 0  # the frame that is looked at
    source: tuple[str, ...] = ()  # lines around, in that frame
    first: int = 1  # the number of the first of them
    since: float = 0.0  # wall clock

    @property
    def frame(self) -> Frame:
        """Where it is."""
        return self.stack[-1] if self.stack else Frame("?", 0, "?")

    @property
    def looked(self) -> Frame:
        """The frame that is looked at: `frame`, or one of those that have called it."""
        return self.stack[self.current] if self.current < len(self.stack) else self.frame

    @property
    def in_the_way(self) -> bool:
        """Whether it holds its actor up: not so the frames of a failure that are only looked at."""
        return not self.post_mortem or bool(self.call)

    @property
    def place(self) -> tuple[str, int]:
        """The actor: mesh and rank."""
        return self.mesh, self.rank


class Over(Harmless, frozen=True):
    """debug.resumed, debug.over: a thread goes on; the second says that no step of it can stop any more."""

    session: str
    why: str = ""


class Tensor(msgspec.Struct, frozen=True):
    """What is told of a tensor or an array instead of its elements."""

    shape: tuple[int, ...]
    dtype: str
    device: str = ""
    least: float | None = None
    most: float | None = None
    mean: float | None = None
    nan: int = 0  # how many are not a number
    inf: int = 0


class Value(Harmless, frozen=True):
    """A value as it can be shown elsewhere."""

    text: str
    type: str
    number: float | None = None  # of numbers, and of tensors with one element
    tensor: Tensor | None = None
    length: int | None = None


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """debug.command: something for a stopped thread to do."""

    session: str
    kind: Kind
    text: str = ""
    frame: int | None = None  # the frame to look at; None is the one that was
    force: bool = False  # also when another controller holds the session


class Answer(Harmless, frozen=True, kw_only=True):
    """What came of a command."""

    session: str
    text: str = ""
    value: Value | None = None
    locals: dict[str, Value] = msgspec.field(default_factory=dict)
    error: str = ""
    resumed: bool = False
    current: int = 0  # the frame it looks at now
    frame: Frame | None = None
    source: tuple[str, ...] = ()  # lines around, where it looks at another frame than before
    first: int = 1


class Break(msgspec.Struct, frozen=True, kw_only=True):
    """debug.break: set a breakpoint in an actor, or clear those that the controller gave this number."""

    mesh: str
    rank: int
    number: int
    where: str = ""  # file:line or function
    condition: str = ""
    temporary: bool = False
    clear: bool = False


class Autopsy(msgspec.Struct, frozen=True, kw_only=True):
    """debug.autopsy: open the frames of a failure of this actor; of the newest where no call is named."""

    mesh: str
    rank: int
    call: str = ""
    release: bool = False  # let go of all that are kept instead


class Freeze(msgspec.Struct, frozen=True):
    """debug.freeze: stop at the raise of errors from now on, or no longer."""

    on: bool


class Thread(Harmless, frozen=True):
    """One thread of a process, for `stacks`."""

    name: str
    stack: tuple[Frame, ...]
    actor: str = ""  # of which actor it is the thread: its mesh's name
    mesh: str = ""
    rank: int = 0
    doing: str = ""  # the endpoint that runs
    seconds: float = 0.0


class Threads(msgspec.Struct, frozen=True):
    """Reply to debug.stacks."""

    threads: tuple[Thread, ...] = ()


class Told(Harmless, frozen=True):
    """Reply to debug.break, debug.autopsy, debug.freeze: what has been done, or why it has not."""

    text: str = ""
    error: str = ""
    session: str = ""


class Lease(msgspec.Struct, frozen=True):
    """debug.lease: the controller lives."""
