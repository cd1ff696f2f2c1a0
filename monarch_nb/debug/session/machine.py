"""State machine of one thread's debugger: running, stopped or stepping, and the effect of each command.

Pure: it handles numbers, names and lines, never frames. Inputs are events of `bdb`, outputs are its next steps.
"""

from dataclasses import dataclass, replace

from monarch_nb.debug.records import Event, Motion
from monarch_nb.debug.session.breakpoints import BreakpointTable, Evaluate, Hit, SessionBreakpoint, SourceLocation

_NOTES = {"call": "--Call--", "return": "--Return--"}


@dataclass(frozen=True, slots=True)
class RunningThread:
    """Only breakpoints, and the code itself, stop the thread."""


@dataclass(frozen=True, slots=True)
class Stepping:
    """The thread runs to the end of a step."""

    motion: Motion


@dataclass(frozen=True, slots=True)
class Paused:
    """The thread is stopped at a line, or frames of a failure are open; commands are carried out."""

    number: int  # number of its stops so far
    event: Event
    reason: str
    note: str
    depth: int  # number of frames
    selected: int  # the selected frame, 0 is the outermost
    breakpoint: int = 0  # number of the breakpoint that has stopped it

    @property
    def traced(self) -> bool:
        """True if stopped at a line that is about to run: only then can another line be chosen."""
        return self.event == "line"


State = RunningThread | Stepping | Paused


@dataclass(frozen=True, slots=True)
class Resume:
    """The way the thread resumes: to a breakpoint, or by a step that counts from a frame, and until a line."""

    motion: Motion
    frame: int
    line: int | None = None


class CommandError(Exception):
    """A command cannot be carried out in this state; the text has the reason."""


class DebugMachine:
    """The state of one thread. Its methods are events and commands; impossible commands raise CommandError."""

    def __init__(self) -> None:
        self.state: State = RunningThread()
        self.breakpoints = BreakpointTable()
        self.raised = False  # exceptions stop it where they are raised
        self.pausing = False  # the next line that is traced stops it
        self._number = 0
        self._reason = ""  # of the next stop
        self._note = ""
        self._hit: SessionBreakpoint | None = None
        self._forgotten = False  # the earlier causes of a stop were removed
        self._jump: int | None = None

    # -- events of bdb ------------------------------------------------------------------------------------------------

    @property
    def standing(self) -> Paused | None:
        """The stop, None while the thread runs."""
        return self.state if isinstance(self.state, Paused) else None

    @property
    def stepping(self) -> bool:
        """True while a step is under way."""
        return isinstance(self.state, Stepping)

    @property
    def quiet(self) -> bool:
        """True if only its own code can stop the thread: no tracing is needed."""
        return isinstance(self.state, RunningThread) and not (self.breakpoints or self.raised or self.pausing)

    def at(self, location: SourceLocation, evaluate: Evaluate) -> Hit:
        """Handles the event before a line: returns whether a breakpoint stops there."""
        if self.standing is not None:
            return Hit()
        hit = self.breakpoints.hit(location, evaluate)
        if hit.stop is not None:
            self._reason, self._note, self._hit = hit.stop.reason, hit.note, hit.stop
        return hit

    def stops(self, event: Event, depth: int, selected: int, *, reason: str = "", note: str = "") -> Paused | None:
        """Stops the thread, with `depth` frames, one selected. Returns None if it is stopped already, and runs an
        evaluated expression, or if the cause of the stop was removed in the meantime.
        """
        if self.standing is not None:
            return None
        hit, self._hit = self._hit, None
        if self._forgotten and not self._still_stops(event, hit):
            self._reason, self._note = "", ""
            return None
        self._forgotten = False
        self._number += 1
        reason = reason or self._reason or ("pause" if self.pausing else "step")
        self.pausing = False
        note = "; ".join(part for part in (self._note, note or _NOTES.get(event, "")) if part)
        standing = Paused(self._number, event, reason, note, depth, selected, hit.number if hit else 0)
        self._reason, self._note = "", ""
        self.state = standing
        return standing

    def _still_stops(self, event: Event, hit: SessionBreakpoint | None) -> bool:
        if event in ("asked", "failure") or self.pausing:
            return True
        if hit is not None:
            return hit.temporary or self.breakpoints.get(hit.number) is hit
        return event == "exception" and self.raised

    def forget(self) -> None:
        """Cancels a running step, and the stop of a breakpoint that was hit and then removed."""
        self._forgotten = True
        self.pausing = False
        if isinstance(self.state, Stepping):
            self.state = RunningThread()

    def line_to_run(self) -> int | None:
        """Returns once the line that was chosen to run next; it is set at the next traced line."""
        line, self._jump = self._jump, None
        return line

    def cannot_jump(self, reason: str) -> None:
        """Records that the line could not be set: the next stop reports it."""
        self._note = f"jump failed: {reason}"

    def outermost_returns(self) -> bool:
        """Handles the end of the user's code: returns whether the thread was in a step, which is cancelled."""
        stepping = self.stepping
        if self.standing is None:
            self.state = RunningThread()
            self._jump = None
            self.pausing = False
        return stepping

    # -- commands -----------------------------------------------------------------------------------------------------

    def _standing(self) -> Paused:
        if not isinstance(self.state, Paused):
            raise CommandError("the rank is not stopped any more")
        return self.state

    def select(self, frame: int) -> Paused:
        """Selects another frame."""
        standing = self._standing()
        if not 0 <= frame < standing.depth:
            raise CommandError(f"there is no frame {frame}: the outermost is 0, the innermost {standing.depth - 1}")
        self.state = replace(standing, selected=frame)
        return self.state

    def move(self, by: int) -> Paused:
        """Selects a frame further in or out, at most the last one."""
        standing = self._standing()
        frame = min(max(0, standing.selected + by), standing.depth - 1)
        if frame == standing.selected:
            raise CommandError("Newest frame" if by > 0 else "Oldest frame")
        return self.select(frame)

    def go(self, motion: Motion, line: int | None = None, *, frame: int | None = None) -> Resume:
        """Resumes the thread; a step counts from the selected frame, or from `frame`."""
        standing = self._standing()
        start = standing.selected if frame is None else self.select(frame).selected
        self.state = RunningThread() if motion == "continue" or standing.event == "failure" else Stepping(motion)
        return Resume(motion, start, line)

    def jump(self, line: int) -> Resume | None:
        """Chooses the line that is run next, in the innermost frame. Returns None if that is possible at once;
        otherwise the thread runs to its next line and stops there.
        """
        standing = self._standing()
        if standing.selected + 1 != standing.depth:
            raise CommandError("You can only jump within the bottom frame")
        if standing.event == "failure":
            raise CommandError("these are the frames of a failure: nothing is run here any more")
        if standing.traced:
            return None
        self._jump = line
        return self.go("in")

    def released(self) -> None:
        """Resumes the thread regardless of commands: it is being ended, or has no controller any more."""
        if self.standing is not None:
            self.state = RunningThread()
