"""One debugger: Python's own pdb on one thread of a worker, driven by messages instead of a terminal."""

import bdb
import dis
import inspect
import logging
import os
import queue
import sys
import threading
import time
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from monarch_nb.debug.errors import CommandTimeout, QuitDebugger
from monarch_nb.debug.records import Answer, Command, Frame, Stopped
from monarch_nb.debug.session import stack as stacks
from monarch_nb.debug.session.breakpoints import Breaks
from monarch_nb.settings import settings
from monarch_nb.transport import throw_into
from monarch_nb.wire import text_of

if TYPE_CHECKING:
    from monarch_nb.debug.session.worker import Worker
    from monarch_nb.runtime import ActorCell

logger = logging.getLogger(__name__)
TICK_S = 0.25  # between looks whether anybody still wants this thread to stand still
MOST = 60_000  # characters of one answer
_ELSEWHERE = "is done at the controller's prompt, not on the rank"

Send = Callable[[Answer], None]


class Debugger(Breaks):
    """Stops its thread, and carries out commands there until one of them lets it go on."""

    def __init__(self, worker: "Worker", who: Stopped, *, ends: Callable[[], bool]) -> None:
        super().__init__(lambda: worker.arm(self))
        self.who = who
        self.stopped = False
        self.holder = ""  # the controller that gives it commands
        self._worker = worker
        self._ends = ends
        self._commands: queue.SimpleQueue[tuple[Command, Send]] = queue.SimpleQueue()
        self._verdict = ""  # of a command that ends the stop: "resume" or "quit"
        self._post_mortem = False
        self._jump: int | None = None  # the line that is to be run next
        self._traced = False  # it stands at an event of tracing
        self._going = False  # no step was asked for, only breakpoints stop it
        self.botframe: types.FrameType | None = None
        self.thread = threading.current_thread()
        self.cell: ActorCell | None = None

    # -- stopping ---------------------------------------------------------------------------------------------------

    def stop(self, frame: types.FrameType, reason: str) -> None:
        """Stops the calling thread at `frame`, now; returns when it may go on. Raises QuitDebugger."""
        if self.stopped:  # inside of what a command evaluates
            return
        sys.settrace(None)  # what commands evaluate is not stepped through
        self.reset()
        self._reason = reason
        self.interaction(frame, None)
        if self.breaks or not self._going:
            at: types.FrameType | None = frame
            while at is not None:
                at.f_trace = self.trace_dispatch
                if at is self.botframe:
                    break
                at = at.f_back
            sys.settrace(self.trace_dispatch)

    def autopsy(self, error: BaseException, tb: types.TracebackType, reason: str) -> None:
        """Opens the frames of an exception; returns when they are to be closed."""
        self.reset()
        self._reason, self._post_mortem = reason, True
        self.interaction(None, tb)

    def watched(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """The method of an endpoint, traced while it runs: there are breakpoints."""
        if not self.breaks:
            return method
        if inspect.iscoroutinefunction(method):

            async def run_async(*args: Any, **kwargs: Any) -> Any:
                self.arm()
                return await method(*args, **kwargs)

            return run_async

        def run(*args: Any, **kwargs: Any) -> Any:
            self.arm()
            try:
                return method(*args, **kwargs)
            finally:
                sys.settrace(None)

        return run

    def arm(self) -> None:
        """Traces what this thread calls from now on."""
        if self.stopped:
            return
        self.reset()
        frame = sys._getframe(1)
        self.botframe = frame  # the engine's: what it calls may stop, it itself does not
        self._set_stopinfo(frame, None, -1)  # type: ignore[attr-defined]
        sys.settrace(self.trace_dispatch)

    # -- what bdb tells ---------------------------------------------------------------------------------------------

    def trace_dispatch(self, frame: types.FrameType, event: str, arg: Any) -> Any:
        """As bdb's; when the outermost frame of the user's code returns, there is nothing to step in any more."""
        try:
            result = super().trace_dispatch(frame, event, arg)
        except bdb.BdbQuit:
            raise self._quit() from None
        if event == "return" and frame is self.botframe and _is_over(frame):
            stepping = not self._going
            self.set_continue()
            if stepping:
                self._worker.over(self, "the endpoint has ended")
        return result

    def set_continue(self) -> None:
        """Stops at breakpoints only. Frames are left alone: `stop` sets what is needed."""
        self._set_stopinfo(self.botframe, None, -1)  # type: ignore[attr-defined]
        self._going = True
        if not self.breaks:
            sys.settrace(None)

    # -- being asked ------------------------------------------------------------------------------------------------

    def interaction(self, frame: types.FrameType | None, tb: types.TracebackType | None) -> None:
        """Tells the controller and waits for its commands; on the stopped thread."""
        if self.stopped:  # inside of what a command evaluates
            return
        if frame is not None:
            self.botframe = stacks.bottom_of(frame)
        self._going = False
        self.setup(frame, tb)
        note, self._note = (self._note or self._take().strip()), ""
        self.who = self._record(note)
        self.stopped = True
        self._worker.told_stopped(self)
        why = "the controller said so"
        try:
            why = self._serve()
        except BaseException as error:
            why = f"{type(error).__name__} was raised there"
            raise
        finally:
            self.stopped = False
            self._reason = "step"
            self._worker.told_resumed(self, why)
            self.forget()

    def get_stack(self, f: types.FrameType | None, t: types.TracebackType | None) -> Any:
        """The user's part of the stack, and the place in it."""
        stack = stacks.walk(f)
        at: types.TracebackType | None = t.tb_next if t is not None and f is not None and t.tb_frame is f else t
        while at is not None:
            stack.append((at.tb_frame, at.tb_lineno))
            at = at.tb_next
        stack = stack[stacks.own_part(stack) :]
        return stack, max(0, len(stack) - 1)

    def _record(self, note: str) -> Stopped:
        frame, line = self.stack[self.curindex]
        source, first = stacks.around(frame, line)
        if stacks.has_changed(frame.f_code):
            note = f"{note}; " if note else ""
            note += f"{os.path.basename(frame.f_code.co_filename)} has changed since it was loaded: lines may be off"
        return Stopped(
            **{name: getattr(self.who, name) for name in Stopped.__struct_fields__ if name not in _OF_A_STOP},
            number=self.who.number + 1,
            reason=self._reason,
            note=note,
            post_mortem=self._post_mortem,
            stack=stacks.frames(self.stack),
            current=self.curindex,
            source=source,
            first=first,
            since=time.time(),
        )

    def post(self, command: Command, send: Send) -> None:
        """Hands a command to the stopped thread; from any thread. `send` is called once."""
        self._commands.put((command, send))

    def _serve(self) -> str:
        while True:
            try:
                command, send = self._commands.get(timeout=TICK_S)
            except queue.Empty:
                verdict = self._worker.verdict(self)
                if not verdict and not self._ends():
                    continue
                if verdict == "resume":
                    self.set_continue()
                    return "the controller was silent for too long"
                raise QuitDebugger(
                    "the controller was silent for too long" if verdict else "the actor is being stopped"
                ) from None
            answer = self._guarded(command)
            try:
                send(answer)
            except Exception:  # nobody is there to hear it
                logger.debug("an answer could not be sent", exc_info=True)
            if answer.resumed:
                if self._verdict == "quit":
                    raise self._quit()
                return "the controller said so"

    def _quit(self) -> QuitDebugger:
        frame = self.who.frame
        where = f"{os.path.basename(frame.file)}:{frame.line}"
        return QuitDebugger(f"quit in the debugger, where it was stopped at {where} in {frame.function}")

    def _guarded(self, command: Command) -> Answer:
        """Carries a command out; one that does not end is broken off after a while."""
        limit = settings.debug_command_timeout
        done = threading.Event()
        thread = threading.get_ident()
        lock = threading.Lock()

        def late() -> None:
            with lock:
                if not done.is_set():
                    throw_into(thread, CommandTimeout)

        self._worker.engine.later(limit, late)
        try:
            try:
                resumed = self._carry_out(command)
            finally:
                with lock:
                    done.set()
        except CommandTimeout:
            resumed = False
            self._error = f"the command was ended after {limit:g} s (debug_command_timeout): {command.text}"
        except KeyboardInterrupt as error:
            if self._ends():
                raise
            resumed, self._error = False, f"interrupted: {text_of(error)}" if error.args else "interrupted"
        value, self._value = self._value, None
        error_text, self._error = self._error, ""
        text = self._take()
        if len(text) > MOST:
            text = f"{text[:MOST]}\n… {len(text) - MOST} more characters are not shown\n"
        here: Frame | None = None
        source: tuple[str, ...] = ()
        first = 1
        if not resumed and self.stack:
            here = stacks.frames(self.stack[self.curindex : self.curindex + 1])[0]
            if self.curindex != self.who.current:
                source, first = stacks.around(*self.stack[self.curindex])
                self.who = msgspec.structs.replace(self.who, current=self.curindex, source=source, first=first)
        locals_, self._locals = self._locals, {}
        return Answer(
            session=self.who.session,
            text=text,
            value=value,
            locals=locals_,
            error=error_text,
            resumed=resumed,
            current=self.curindex,
            frame=here,
            source=source,
            first=first,
        )

    def _carry_out(self, command: Command) -> bool:
        self._verdict = "resume"
        if command.frame is not None and 0 <= command.frame < len(self.stack):
            self._look_at(command.frame)
        if command.kind == "resume":
            self.set_continue()
            return True
        if command.kind == "quit":
            self._verdict = "quit"
            return True
        if command.kind == "eval":
            self._evaluate(command.text)
        elif command.kind == "locals":
            self._locals = self._all_locals(command.text)
        elif command.kind == "pdb":
            return self._pdb(command.text)
        return False

    def _look_at(self, index: int) -> None:
        self.curindex = index
        self.curframe = self.stack[index][0]
        self.curframe_locals = self.curframe.f_locals
        self.lineno = None

    def _pdb(self, text: str) -> bool:
        lines = [text] if "\n" in text else [*text.split("\n")]
        self.cmdqueue = lines
        while self.cmdqueue:
            line = self.precmd(self.cmdqueue.pop(0))
            if line.strip() and self.postcmd(self.onecmd(line), line):
                self.cmdqueue.clear()
                return True
        return False

    # -- commands of pdb that are otherwise here --------------------------------------------------------------------

    def do_quit(self, arg: str) -> bool:
        """q(uit)
        End the endpoint: its caller gets an error.
        """
        self._verdict = "quit"
        return True

    do_q = do_exit = do_EOF = do_quit  # noqa: N815

    def do_jump(self, arg: str) -> bool | None:
        """j(ump) lineno
        Set the line that is run next, in the innermost frame.
        """
        if self._traced or not arg.strip().isdecimal():
            super().do_jump(arg)
            return None
        if self.curindex + 1 != len(self.stack):
            self.error("You can only jump within the bottom frame")
            return None
        self._jump = int(arg)  # only an event of tracing may set it: there is one before the next line is run
        return bool(self.do_step(""))

    do_j = do_jump

    def user_line(self, frame: types.FrameType) -> None:
        """A line is to be run next."""
        line, self._jump = self._jump, None
        if line is not None:
            try:
                frame.f_lineno = line  # type: ignore[misc]  # it can be set here, and only here
            except ValueError as error:
                self._note = f"jump failed: {error}"
        self._traced = True
        try:
            super().user_line(frame)
        finally:
            self._traced = False

    def do_interact(self, arg: str) -> None:
        """interact
        Type Python until an empty `exit`.
        """
        self.error(f"interact {_ELSEWHERE}")

    def do_commands(self, arg: str) -> None:
        """commands
        Not here.
        """
        self.error("`commands` is not supported: give the breakpoint a condition, or use display")

    def do_debug(self, arg: str) -> None:
        """debug
        Not here.
        """
        self.error("`debug` is not supported: set a breakpoint in the function that you want to see")

    do_run = do_restart = lambda self, arg: self.error(
        "an endpoint cannot be run again from here: quit, then call it again"
    )


_OF_A_STOP = {"number", "reason", "note", "post_mortem", "stack", "current", "source", "first", "since"}


def _is_over(frame: types.FrameType) -> bool:
    """Whether a "return" event is one: coroutines that only wait have the same event."""
    if not frame.f_code.co_flags & (inspect.CO_COROUTINE | inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR):
        return True
    at = next((i for i in dis.get_instructions(frame.f_code) if i.offset == frame.f_lasti), None)
    return at is None or at.opname not in ("YIELD_VALUE", "SEND", "RESUME")
