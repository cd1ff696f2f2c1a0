"""Engine messages between ranks that stop and their controller. Their bodies are in `debug.messages`."""

from typing import Any

from monarch_nb.debug import messages as m
from monarch_nb.debug.records import Over, Stopped
from monarch_nb.wire import Done, Verb

# From a rank to the controller.
STOPPED = Verb("debug.stopped", Stopped, doc="a thread has stopped")
RESUMED = Verb("debug.resumed", Over, doc="it has continued")
OVER = Verb("debug.over", Over, doc="no step of it can stop any more")

# To a process, whether or not anything is stopped there.
BREAK = Verb("debug.break", m.Break, m.CommandOutcome, doc="sets or clears a breakpoint")
BREAK_SET = Verb(
    "debug.break_set",
    m.BreakSet,
    m.CommandOutcome,
    doc="the breakpoints in all actors of a process, instead of those before",
)
PAUSE = Verb("debug.pause", m.Pause, m.CommandOutcome, doc="stops what actors run, at the next line that is traced")
AUTOPSY = Verb(
    "debug.autopsy", m.Autopsy, m.CommandOutcome, doc="opens the frames of a failure, or lets go of all that are kept"
)
FREEZE = Verb("debug.freeze", m.Freeze, m.CommandOutcome, doc="stops at the raise of errors, or no longer")
STACKS = Verb("debug.stacks", Done, m.Threads, doc="the threads of a process, and where they are")
COMPLETE = Verb("debug.complete", m.CompleteName, m.Names, doc="which names complete what was typed")
DESCRIBE = Verb("debug.describe", m.DescribeName, m.NameText, doc="what a name is")
NAMESPACE = Verb(
    "debug.namespace", m.ReadNamespace, m.NamespaceVariables, doc="the variables of the cells that a rank runs"
)
LEASE = Verb("debug.lease", m.RenewLease, doc="the controller lives")

# To a thread that is stopped.
GO = Verb("debug.go", m.Go, m.CommandAnswer, doc="continues, or steps")
JUMP = Verb("debug.jump", m.Jump, m.CommandAnswer, doc="runs another line next")
QUIT = Verb("debug.quit", m.Quit, m.CommandAnswer, doc="ends the endpoint")
RELEASE = Verb("debug.release", m.Release, m.CommandAnswer, doc="other controllers may give commands")
SELECT = Verb("debug.select", m.Select, m.CommandAnswer, doc="selects another frame")
EVALUATE = Verb(
    "debug.evaluate", m.Evaluate, m.CommandAnswer, doc="the value of an expression, or what a statement prints"
)
VARIABLES = Verb("debug.variables", m.GetVariables, m.CommandAnswer, doc="variables, or a page of what a value holds")
SCOPES = Verb("debug.scopes", m.GetScopes, m.Scopes, doc="the scopes of a frame")
ASSIGN = Verb("debug.assign", m.Assign, m.CommandAnswer, doc="gives a variable another value")
SOURCE = Verb("debug.source", m.GetSource, m.SourceText, doc="the text of a file")
BREAKPOINTS = Verb("debug.breakpoints", m.GetBreakpoints, m.BreakpointList, doc="the breakpoints of the thread")
PDB = Verb("debug.pdb", m.Pdb, m.CommandAnswer, doc="a line in the language of pdb")

COMMANDS: dict[type[m.Command], Verb[Any, Any]] = {
    verb.request: verb
    for verb in (GO, JUMP, QUIT, RELEASE, SELECT, EVALUATE, VARIABLES, SCOPES, ASSIGN, SOURCE, BREAKPOINTS, PDB)
}
