"""The debugger of one thread: stops it, carries out commands there, and resumes it."""

import io
import linecache
import logging
import os
import queue
import re
import threading
import time
import types
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Unpack

import msgspec

from monarch_nb.debug import verbs
from monarch_nb.debug.records import CommandTimeout, Event, Frame, QuitDebugger, Stopped
from monarch_nb.debug.session import stack as stacks
from monarch_nb.debug.session.breakpoints import BreakpointOptions, SessionBreakpoint
from monarch_nb.debug.session.commands import Commands
from monarch_nb.debug.session.machine import DebugMachine, Paused, Resume
from monarch_nb.debug.session.stack import Frames
from monarch_nb.debug.session.tracer import Tracer
from monarch_nb.settings import settings
from monarch_nb.transport import AGAIN_S, throw_into
from monarch_nb.wire import text_of

if TYPE_CHECKING:
    from monarch_nb.debug.session.debuggers import Debuggers
    from monarch_nb.debug.session.pdb_text import PdbText


logger = logging.getLogger(__name__)
TICK_S = 0.25  # between checks whether the thread still has to stay stopped
MOST = 60_000  # characters of one answer
NOTE = 2_000  # characters of the reason and the note of a stop
CELL = re.compile(r"ipykernel_\d+[/\\]\d+\.py$")  # file names of cells: the kernel's process and a hash of the text
NOT_STOPPED = "the rank is not stopped any more"

Send = Callable[[verbs.CommandAnswer], None]


class ThreadDebugger:
    """Stops its thread, and carries out commands there until one of them resumes it."""

    def __init__(
        self,
        process: "Debuggers",
        record: Stopped,
        thread: threading.Thread,
        *,
        ends: Callable[[], bool],
        armed: Callable[[], None] = lambda: None,
    ) -> None:
        self.record = record
        self.holder = ""  # the controller that sends it commands
        self.thread = thread
        self.machine = DebugMachine()
        self._process = process
        self._ends = ends
        self._armed = armed  # called when its breakpoints change
        self._tracer = Tracer(self.machine, self._stand, self._on_return)
        self._out = io.StringIO()
        self._posted: queue.SimpleQueue[tuple[verbs.Command, Send]] = queue.SimpleQueue()
        self._posting = threading.Lock()
        self._pdb: PdbText | None = None

    @property
    def stopped(self) -> bool:
        """True while it is stopped."""
        return self.machine.standing is not None

    # -- stopping -----------------------------------------------------------------------------------------------------

    def stop(self, frame: types.FrameType, reason: str) -> None:
        """Stops the calling thread at `frame`, now; returns when it is resumed. Raises QuitDebugger."""
        if self.stopped:  # inside of a command's evaluation
            return
        self._tracer.pause()
        self._tracer.reset()
        self._stand("asked", frame, reason=reason)
        self._tracer.resume_tracing()

    def autopsy(self, tb: types.TracebackType, reason: str) -> None:
        """Opens the frames of an exception; returns when they are closed."""
        linecache.checkcache()
        self._stand("failure", None, tb, reason=reason)

    def watched(self, method: Callable[..., object]) -> Callable[..., object]:
        """Returns the method of an endpoint, traced while it runs if anything can stop it."""
        return method if self.machine.quiet else self._tracer.watched(method)

    def add_breakpoint(
        self, file: str, line: int, number: int = 0, **options: Unpack[BreakpointOptions]
    ) -> SessionBreakpoint:
        """Sets a breakpoint, with this number if it is free. Raises ValueError for a line that does not exist, and for
        an invalid hit condition.
        """
        file = self._tracer.canonic(file)
        if not linecache.getline(file, line):
            raise ValueError(f"Line {file}:{line} does not exist")
        added = self.machine.breakpoints.add(file, line, number, **options)
        self._armed()
        return added

    def clear_breakpoints(self, set_by: str) -> int:
        """Removes the breakpoints that `set_by` has set; returns their number."""
        removed = self.machine.breakpoints.of(set_by)
        self.machine.breakpoints.remove(removed)
        self._armed()
        return len(removed)

    def set_breakpoints(self, set_by: str, lines: Sequence[verbs.BreakLine]) -> None:
        """Replaces the breakpoints of `set_by`; unchanged ones keep their counts."""
        keys = {
            (self._tracer.canonic(item.file), item.line, item.condition, item.hit_condition, item.log) for item in lines
        }
        have = {(x.file, x.line, x.condition, x.hit_condition, x.log): x for x in self.machine.breakpoints.of(set_by)}
        self.machine.breakpoints.remove(bp for key, bp in have.items() if key not in keys)
        for file, line, condition, hit_condition, log in sorted(keys - have.keys()):
            self.machine.breakpoints.add(
                file, line, condition=condition, hit_condition=hit_condition, log=log, set_by=set_by
            )
        self._armed()

    def pause(self) -> bool:
        """Stops it at the next traced line; False if no line is traced."""
        if self.machine.quiet or self.stopped:
            return False
        self.machine.pausing = True
        return True

    def release(self) -> None:
        """Resumes the thread for any controller, and drops a step; frames of a failure stay open. From any thread."""
        with self._posting:
            standing = self.machine.standing
            if standing is None:
                self.machine.forget()
            elif standing.event != "failure" or self.record.call:
                self._posted.put((verbs.Go(session=self.record.session, force=True), lambda answer: None))

    def pdb_text(self) -> "PdbText":
        """pdb's language on this thread; its aliases last over several stops."""
        if self._pdb is None:
            from monarch_nb.debug.session.pdb_text import PdbText  # pdb takes long to import

            self._pdb = PdbText(self._out)
        return self._pdb

    def stop_where_raised(self, on: bool) -> None:
        """Sets whether exceptions stop the thread in the user's frame where they are raised."""
        self.machine.raised = on
        self._armed()

    # -- stopped ------------------------------------------------------------------------------------------------------

    def _on_return(self) -> None:
        if self.machine.outermost_returns():
            self._process.over(self, "the endpoint has ended")

    def _stand(
        self,
        event: Event,
        frame: types.FrameType | None,
        tb: types.TracebackType | None = None,
        note: str = "",
        *,
        reason: str = "",
    ) -> None:
        """Reports the stop to the controller and carries out its commands; on the stopped thread."""
        if self.stopped:  # inside of a command's evaluation
            return
        if frame is not None:
            self._tracer.bottom(stacks.bottom_of(frame))
        entries, selected = stacks.users_part(frame, tb)
        with self._posting:  # so that release() sees it stand, or it sees release()
            standing = self.machine.stops(event, len(entries), selected, reason=reason, note=note)
        if standing is None:
            self._tracer.set_continue()
            return
        frames = Frames(entries, self._out)
        commands = Commands(self, frames, tb)
        self.record = self._record(standing, frames)
        self._process.stopped(self)
        cause = "the controller said so"
        try:
            cause = self._serve(commands)
        except BaseException as error:
            cause = f"{type(error).__name__} was raised there"
            raise
        finally:
            self._refuse_the_rest()
            self._process.resumed(self, cause)

    def _record(self, standing: Paused, frames: Frames) -> Stopped:
        frame, line = frames.entries[standing.selected]
        source, first = stacks.around(frame, line)
        note = standing.note
        if stacks.has_changed(frame.f_code):
            note = f"{note}; " if note else ""
            note += f"{os.path.basename(frame.f_code.co_filename)} has changed since it was loaded: lines may be off"
        return msgspec.structs.replace(
            self.record,
            number=standing.number,
            event=standing.event,
            breakpoint=standing.breakpoint,
            reason=standing.reason[:NOTE],
            note=note[:NOTE],
            post_mortem=standing.event == "failure",
            stack=stacks.frames(frames.entries),
            current=standing.selected,
            source=source,
            first=first,
            since=time.time(),
        )

    def post(self, command: verbs.Command, send: Send) -> bool:
        """Passes a command to the stopped thread, which calls `send` once. False if it is not stopped."""
        with self._posting:
            if not self.stopped:
                return False
            self._posted.put((command, send))
            return True

    def _refuse_the_rest(self) -> None:
        with self._posting:
            self.machine.released()
        while not self._posted.empty():
            command, send = self._posted.get()
            self._send(send, verbs.CommandAnswer(session=command.session, error=NOT_STOPPED, resumed=True))

    def _serve(self, commands: Commands) -> str:
        while True:
            try:
                command, send = self._posted.get(timeout=TICK_S)
            except queue.Empty:
                verdict = self._process.verdict()
                if not verdict and not self._ends():
                    continue
                silent = "the controller was silent for too long"
                if verdict == "resume":
                    self._follow(self.machine.go("continue"), commands.frames)
                    return silent
                raise QuitDebugger(silent if verdict else "the actor is being stopped") from None
            answer = self._guarded(commands, command)
            if commands.resume is not None:
                self._follow(commands.resume, commands.frames)
            self._send(send, answer)
            if commands.quits:
                raise self._quit()
            if answer.resumed:
                return "the controller said so"

    @staticmethod
    def _send(send: Send, answer: verbs.CommandAnswer) -> None:
        try:
            send(answer)
        except Exception:  # the controller has ended
            logger.debug("an answer could not be sent", exc_info=True)

    def _follow(self, resume: Resume, frames: Frames) -> None:
        start = frames.frame(resume.frame) if len(frames) else None
        if self.record.post_mortem:
            start = None
        self._tracer.follow(resume, [frame for frame, _ in frames.entries], start)

    def _quit(self) -> QuitDebugger:
        frame = self.record.frame
        in_cell = CELL.search(frame.file)  # whose number only its notebook knows
        location = f"line {frame.line} of a cell" if in_cell else f"{os.path.basename(frame.file)}:{frame.line}"
        return QuitDebugger(f"quit in the debugger, where it was stopped at {location} in {frame.function}")

    def _guarded(self, commands: Commands, command: verbs.Command) -> verbs.CommandAnswer:
        """Carries out a command, for a limited time."""
        limit = command.limit or settings.debug_command_timeout
        done = threading.Event()
        thread = threading.get_ident()
        lock = threading.Lock()

        def late() -> None:
            with lock:
                if not done.is_set() and not throw_into(thread, CommandTimeout):
                    self._process.later(AGAIN_S, late)

        self._process.later(limit, late)
        answer = verbs.CommandAnswer(session=command.session)
        error = ""
        try:
            try:
                answer = commands.carry_out(command)
            finally:
                with lock:
                    done.set()
        except CommandTimeout:
            text = getattr(command, "text", "")
            setting = "" if command.limit else " (debug_command_timeout)"
            error = f"the command was ended after {limit:g} s{setting}: {text}"
        except KeyboardInterrupt as interrupt:
            if self._ends():
                raise
            error = f"interrupted: {text_of(interrupt)}" if interrupt.args else "interrupted"
        return self._completed(answer, error, commands.frames)

    def _completed(self, answer: verbs.CommandAnswer, error: str, frames: Frames) -> verbs.CommandAnswer:
        """Adds printed output and the selected location to an answer."""
        text = self._printed()
        resumed = not self.stopped or answer.resumed
        standing = self.machine.standing
        current = standing.selected if standing is not None else self.record.current
        frame: Frame | None = None
        source: tuple[str, ...] = ()
        first = 1
        if not resumed and len(frames):
            frame = stacks.frames(frames.entries[current : current + 1])[0]
            if current != self.record.current:
                source, first = stacks.around(*frames.entries[current])
                self.record = msgspec.structs.replace(self.record, current=current, source=source, first=first)
        return msgspec.structs.replace(
            answer,
            text=text,
            error=_cut(error or answer.error),
            resumed=resumed,
            current=current,
            frame=frame,
            source=source,
            first=first,
        )

    def _printed(self) -> str:
        text = self._out.getvalue()
        self._out.seek(0)
        self._out.truncate()
        return _cut(text)


def _cut(text: str) -> str:
    """Returns a text of limited length: proxies of notebooks cut long messages."""
    return text if len(text) <= MOST else f"{text[:MOST]}\n… {len(text) - MOST} more characters are not shown\n"
