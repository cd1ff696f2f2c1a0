"""Data that stopped ranks and their controller exchange in CONTROL messages, and the exceptions of the debugger."""

from typing import Any, ClassVar, Literal

import msgspec

from monarch_nb.wire import Harmless, ThreadCutOff

Motion = Literal["continue", "in", "over", "out", "until"]
Event = Literal["asked", "line", "call", "return", "exception", "failure"]  # asked: by the code itself


class Frame(Harmless, array_like=True, frozen=True):
    """A frame of a stack."""

    file: str
    line: int
    function: str
    text: str = ""  # the line itself


class Stopped(Harmless, frozen=True, kw_only=True):
    """debug.stopped: a thread has stopped; everything that is known of it without asking it."""

    PROSE: ClassVar = ("reason", "note")

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
    event: Event = "asked"  # the event at which it is stopped
    breakpoint: int = 0  # the number on the rank of the breakpoint that has stopped it
    reason: str = ""  # in words
    note: str = ""
    post_mortem: bool = False
    stack: tuple[Frame, ...] = ()  # outermost first, without the engine's
    current: int = 0  # the selected frame
    source: tuple[str, ...] = ()  # lines around, in that frame
    first: int = 1  # the number of the first of them
    since: float = 0.0  # wall clock

    @property
    def frame(self) -> Frame:
        """The frame that it is stopped in."""
        return self.stack[-1] if self.stack else Frame("?", 0, "?")

    @property
    def selected_frame(self) -> Frame:
        """The selected frame: `frame`, or one of its callers."""
        return self.stack[self.current] if self.current < len(self.stack) else self.frame

    @property
    def blocks_actor(self) -> bool:
        """True if the stop holds its actor up, unlike opened frames of a failure."""
        return not self.post_mortem or bool(self.call)

    @property
    def place(self) -> tuple[str, int]:
        """The actor: mesh and rank."""
        return self.mesh, self.rank


class Over(Harmless, frozen=True):
    """debug.resumed, debug.over: a thread has resumed; after the second, no step of it can stop any more."""

    session: str
    why: str = ""


class Tensor(msgspec.Struct, frozen=True):
    """Description of a tensor or an array, sent instead of its elements."""

    shape: tuple[int, ...]
    dtype: str
    device: str = ""
    least: float | None = None
    most: float | None = None
    mean: float | None = None
    nan: int = 0  # how many are not a number
    inf: int = 0
    step: int = 1  # the numbers are of every so many-th element only
    pending: bool = False  # its device has not got to it yet: a kernel, or a collective that others have not joined


class Value(Harmless, frozen=True):
    """A value as it can be shown elsewhere."""

    text: str
    type: str
    number: float | None = None  # of numbers, and of tensors with one element
    tensor: Tensor | None = None
    length: int | None = None


class Variable(Harmless, frozen=True):
    """A variable, an element or an attribute; its children are requested by `reference` during the stop."""

    name: str
    value: Value
    reference: int = 0  # 0: it holds nothing
    named: int = 0  # how many attributes or keys it holds
    indexed: int = 0  # how many elements
    expression: str = ""  # an expression for it in the frame; "" without one


class Scope(Harmless, frozen=True):
    """The variables of a frame of one kind."""

    name: str
    reference: int
    named: int
    expensive: bool = False


class RankBreakpoint(Harmless, frozen=True, kw_only=True):
    """A breakpoint of one thread, as it is."""

    number: int
    file: str
    line: int
    function: str = ""
    condition: str = ""
    hit_condition: str = ""
    log: str = ""
    temporary: bool = False
    enabled: bool = True
    ignore: int = 0
    hits: int = 0


class ThreadRecord(Harmless, frozen=True):
    """A thread of a process, for `stacks`."""

    name: str
    stack: tuple[Frame, ...]
    actor: str = ""  # of which actor it is the thread: its mesh's name
    mesh: str = ""
    rank: int = 0
    doing: str = ""  # the endpoint that runs
    seconds: float = 0.0


class StoppedAtBreakpoint(RuntimeError):
    """A call waits for ranks that are stopped in the debugger, and there is no prompt to ask what to do.

    They stay stopped and the call goes on: debug them (`%%mdb`, `monarch.debug`), then `.get()` again. `sessions` are
    their records, `table` is what a prompt would have shown.
    """

    def __init__(self, message: str, sessions: Any = (), table: str = "") -> None:
        super().__init__(message)
        self.sessions = tuple(sessions)
        self.table = table


class DebugError(RuntimeError):
    """A command for stopped ranks cannot be carried out; the text says why and what can be done."""


class QuitDebugger(KeyboardInterrupt):
    """Ends the endpoint of a stopped rank, which was asked to quit; as an interrupt does, past `except Exception`."""


class CommandTimeout(ThreadCutOff):
    """Breaks off a command that takes too long, on the stopped thread."""
