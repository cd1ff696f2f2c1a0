"""Engine messages between a controller and stopped ranks, or their processes: requests, answers and notices."""

from typing import Any

import msgspec

from monarch_nb.debug.records import Frame, Motion, Over, RankBreakpoint, Scope, Stopped, ThreadRecord, Value, Variable
from monarch_nb.wire import Done, Harmless, Verb

# -- commands for a stopped thread -------------------------------------------------------------------------------------


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """Something for a stopped thread to do."""

    session: str
    frame: int | None = None  # select this frame first; None: the selected one
    force: bool = False  # also when another controller holds the session
    limit: float = 0.0  # seconds after which it is ended; 0: debug_command_timeout


class Go(Command, frozen=True, kw_only=True):
    """debug.go: continue; a step counts from the selected frame, `until` stops at `line` or the next greater."""

    motion: Motion = "continue"
    line: int | None = None


class Jump(Command, frozen=True, kw_only=True):
    """debug.jump: run this line next."""

    line: int


class Quit(Command, frozen=True, kw_only=True):
    """debug.quit: end the endpoint."""


class Release(Command, frozen=True, kw_only=True):
    """debug.release: other controllers may give commands."""


class Select(Command, frozen=True, kw_only=True):
    """debug.select: select a frame: `frame`, or so many further in from the selected one."""

    by: int = 0


class Evaluate(Command, frozen=True, kw_only=True):
    """debug.evaluate: the value of an expression; for a `statement`, which may be an expression, its output."""

    text: str
    statement: bool = False
    much: bool = False  # more of a long value


class GetVariables(Command, frozen=True, kw_only=True):
    """debug.variables: the local variables, or those of some names; or a page of the children of a reference."""

    names: tuple[str, ...] = ()
    reference: int = 0
    start: int = 0
    count: int = 0  # 0: as many as a page has


class GetScopes(Command, frozen=True, kw_only=True):
    """debug.scopes: the scopes of a frame."""


class Assign(Command, frozen=True, kw_only=True):
    """debug.assign: set a local variable, or a child of a reference, to the value of an expression."""

    name: str
    text: str
    reference: int = 0


class GetSource(Command, frozen=True, kw_only=True):
    """debug.source: the text of a file that code of the process came from."""

    file: str


class GetBreakpoints(Command, frozen=True, kw_only=True):
    """debug.breakpoints: those of the thread."""


class Pdb(Command, frozen=True, kw_only=True):
    """debug.pdb: a line in the language of pdb."""

    text: str


class CommandAnswer(Harmless, frozen=True, kw_only=True):
    """The result of a command."""

    session: str
    text: str = ""  # the printed text
    value: Value | None = None
    reference: int = 0  # for requests of the value's children
    named: int = 0
    indexed: int = 0
    variables: tuple[Variable, ...] = ()
    total: int = 0  # how many variables there are
    error: str = ""
    resumed: bool = False
    current: int = 0  # the selected frame
    frame: Frame | None = None
    source: tuple[str, ...] = ()  # source lines, if another frame is selected than before
    first: int = 1


class Scopes(CommandAnswer, frozen=True, kw_only=True):
    """Reply to debug.scopes."""

    scopes: tuple[Scope, ...] = ()


class SourceText(CommandAnswer, frozen=True, kw_only=True):
    """Reply to debug.source."""

    content: str = ""


class BreakpointList(CommandAnswer, frozen=True, kw_only=True):
    """Reply to debug.breakpoints."""

    breakpoints: tuple[RankBreakpoint, ...] = ()


# -- what goes to a process, whether or not anything is stopped there --------------------------------------------------


class BreakLine(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """A breakpoint that is wanted at a line."""

    file: str
    line: int
    actor: str = ""  # the qualified name of the only class of actors whose methods have the line; "": any code may
    ranks: str = ""  # which ranks only, as in "gpus=0:4"
    condition: str = ""
    hit_condition: str = ""
    log: str = ""


class BreakSet(msgspec.Struct, frozen=True, kw_only=True):
    """debug.break_set: the breakpoints that a controller has in all actors of a process, also in those that come, in
    place of those that it had. A set with a lower version than one that was taken is passed by.
    """

    version: int
    lines: tuple[BreakLine, ...] = ()
    raised: str | None = None  # the ranks that stop where exceptions are raised, "" for all; None: none does
    uncaught: str | None = None  # the ranks that stop where an endpoint fails
    release: bool = False  # all stopped threads of the process resume, and running steps are dropped


class Break(msgspec.Struct, frozen=True, kw_only=True):
    """debug.break: set a breakpoint in an actor, or clear those that the controller gave this number."""

    mesh: str
    rank: int
    number: int
    where: str = ""  # file:line or function
    condition: str = ""
    hit_condition: str = ""
    log: str = ""
    temporary: bool = False
    clear: bool = False


class CompleteName(msgspec.Struct, frozen=True):
    """debug.complete: the completions of a name, or of a path of names, in the cells of an actor."""

    mesh: str
    rank: int
    text: str


class Names(msgspec.Struct, frozen=True):
    """The answer to debug.complete."""

    names: tuple[str, ...] = ()


class DescribeName(msgspec.Struct, frozen=True):
    """debug.describe: a description of a name in the cells of an actor."""

    mesh: str
    rank: int
    name: str
    source: bool = False  # in place of the docstring


class NameText(msgspec.Struct, frozen=True):
    """The answer to debug.describe; empty for a name that is not there."""

    text: str = ""


class ReadNamespace(msgspec.Struct, frozen=True):
    """debug.namespace: the variables of the cells that an actor of a process runs."""

    mesh: str


class NamespaceVariable(msgspec.Struct, frozen=True):
    """A variable, and its value in short: empty where that would run code of the program."""

    name: str
    kind: str  # the name of its type
    text: str = ""


class NamespaceVariables(msgspec.Struct, frozen=True):
    """The answer to debug.namespace."""

    variables: tuple[NamespaceVariable, ...] = ()
    more: int = 0  # that are left out


class Pause(msgspec.Struct, frozen=True, kw_only=True):
    """debug.pause: stop what an actor runs, at its next line; no ranks: all actors of the process."""

    actors: tuple[tuple[str, int], ...] = ()  # mesh and rank of each


class Autopsy(msgspec.Struct, frozen=True, kw_only=True):
    """debug.autopsy: open the frames of a failure of this actor; of the newest where no call is named."""

    mesh: str
    rank: int
    call: str = ""
    release: bool = False  # releases all stored ones instead


class Freeze(msgspec.Struct, frozen=True):
    """debug.freeze: stop at the raise of errors from now on, or no longer."""

    on: bool


class Threads(msgspec.Struct, frozen=True):
    """Reply to debug.stacks."""

    threads: tuple[ThreadRecord, ...] = ()


class CommandOutcome(Harmless, frozen=True):
    """The result of debug.break, break_set, pause, autopsy and freeze, or the error."""

    text: str = ""
    error: str = ""
    session: str = ""


class RenewLease(msgspec.Struct, frozen=True):
    """debug.lease: the controller lives."""


# From a rank to the controller.
STOPPED = Verb("debug.stopped", Stopped, doc="a thread has stopped")
RESUMED = Verb("debug.resumed", Over, doc="it has continued")
OVER = Verb("debug.over", Over, doc="no step of it can stop any more")

# To a process, whether or not anything is stopped there.
BREAK = Verb("debug.break", Break, CommandOutcome, doc="sets or clears a breakpoint")
BREAK_SET = Verb(
    "debug.break_set",
    BreakSet,
    CommandOutcome,
    doc="the breakpoints in all actors of a process, instead of those before",
)
PAUSE = Verb("debug.pause", Pause, CommandOutcome, doc="stops what actors run, at the next line that is traced")
AUTOPSY = Verb(
    "debug.autopsy", Autopsy, CommandOutcome, doc="opens the frames of a failure, or lets go of all that are kept"
)
FREEZE = Verb("debug.freeze", Freeze, CommandOutcome, doc="stops at the raise of errors, or no longer")
STACKS = Verb("debug.stacks", Done, Threads, doc="the threads of a process, and where they are")
COMPLETE = Verb("debug.complete", CompleteName, Names, doc="which names complete what was typed")
DESCRIBE = Verb("debug.describe", DescribeName, NameText, doc="what a name is")
NAMESPACE = Verb(
    "debug.namespace", ReadNamespace, NamespaceVariables, doc="the variables of the cells that a rank runs"
)
LEASE = Verb("debug.lease", RenewLease, doc="the controller lives")

# To a thread that is stopped.
GO = Verb("debug.go", Go, CommandAnswer, doc="continues, or steps")
JUMP = Verb("debug.jump", Jump, CommandAnswer, doc="runs another line next")
QUIT = Verb("debug.quit", Quit, CommandAnswer, doc="ends the endpoint")
RELEASE = Verb("debug.release", Release, CommandAnswer, doc="other controllers may give commands")
SELECT = Verb("debug.select", Select, CommandAnswer, doc="selects another frame")
EVALUATE = Verb("debug.evaluate", Evaluate, CommandAnswer, doc="the value of an expression, or what a statement prints")
VARIABLES = Verb("debug.variables", GetVariables, CommandAnswer, doc="variables, or a page of what a value holds")
SCOPES = Verb("debug.scopes", GetScopes, Scopes, doc="the scopes of a frame")
ASSIGN = Verb("debug.assign", Assign, CommandAnswer, doc="gives a variable another value")
SOURCE = Verb("debug.source", GetSource, SourceText, doc="the text of a file")
BREAKPOINTS = Verb("debug.breakpoints", GetBreakpoints, BreakpointList, doc="the breakpoints of the thread")
PDB = Verb("debug.pdb", Pdb, CommandAnswer, doc="a line in the language of pdb")

COMMANDS: dict[type[Command], Verb[Any, Any]] = {
    verb.request: verb
    for verb in (GO, JUMP, QUIT, RELEASE, SELECT, EVALUATE, VARIABLES, SCOPES, ASSIGN, SOURCE, BREAKPOINTS, PDB)
}
