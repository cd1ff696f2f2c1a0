"""The `bdb` of a thread: passes its events to the thread's debugger, and carries out what the debugger decides."""

import bdb
import dis
import inspect
import sys
import traceback
import types
import warnings
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from monarch_nb.debug.records import Event
from monarch_nb.debug.session.breakpoints import SourceLocation
from monarch_nb.debug.session.machine import DebugMachine, Resume
from monarch_nb.debug.session.stack import is_users, runs_for_user
from monarch_nb.transport import calm

_SKIPPED = ("monarch_nb.*", "asyncio.*", "threading", "weakref", "_weakrefset")


Arrived = Callable[[Event, types.FrameType, "types.TracebackType | None", str], None]


class Tracer(bdb.Bdb):
    """Traces one thread while anything can stop it."""

    if TYPE_CHECKING:  # bdb's own, which its types lack

        def _set_stopinfo(
            self, stopframe: types.FrameType | None, returnframe: types.FrameType | None, stoplineno: int
        ) -> None: ...

    def __init__(self, machine: DebugMachine, arrived: Arrived, on_return: Callable[[], None]) -> None:
        """`arrived(event, frame, traceback, note)` stops the thread, and returns when it may go on; `on_return()` is
        called when the outermost frame of the user's code has returned.
        """
        self._machine = machine
        self._arrived = arrived
        self._on_return = on_return
        self.botframe: types.FrameType | None = None
        self._awaited = 0  # endpoints on the loop of this thread that have not ended
        super().__init__(_SKIPPED)
        self._set_stopinfo(None, None, -1)

    def _load_breaks(self) -> None:
        """Breakpoints are the machine's, and not those of other debuggers in the process."""

    # -- actions -----------------------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Suspends tracing on this thread, which is about to stop outside of tracing."""
        sys.settrace(None)

    def bottom(self, frame: types.FrameType) -> None:
        """`frame` is the outermost of the user's code."""
        self.botframe = frame

    def follow(self, resume: Resume, frames: Iterable[types.FrameType], start: types.FrameType | None) -> None:
        """Resumes the thread as decided; `frames` are those of its stack, a step counts from `start`."""
        if resume.motion == "continue" or start is None:
            self.set_continue()
        elif resume.motion == "in":
            self.set_step()
        elif resume.motion == "over":
            self.set_next(start)
        elif resume.motion == "out":
            self.set_return(start)
        else:
            self.set_until(start, resume.line)
        if self._machine.quiet:
            sys.settrace(None)
            return
        stepping = resume.motion != "continue" or self._machine.raised
        for frame in frames:  # also frames that were not traced so far: a step may return to them
            file = self.canonic(frame.f_code.co_filename)
            frame.f_trace = self.trace_dispatch if stepping or self._machine.breakpoints.has_file(file) else None

    def resume_tracing(self) -> None:
        """Traces this thread, which had stopped outside of tracing."""
        if not self._machine.quiet:
            calm()
            sys.settrace(self.trace_dispatch)

    def watched(self, method: Callable[..., Any]) -> Callable[..., object]:
        """Returns a method that is traced while it runs."""
        if inspect.iscoroutinefunction(method):

            async def run_async(*args: object, **kwargs: object) -> object:
                self._awaited += 1
                self.start(sys._getframe())
                try:
                    return await method(*args, **kwargs)
                finally:
                    self._awaited -= 1
                    if not self._awaited:
                        sys.settrace(None)

            return run_async

        def run(*args: object, **kwargs: object) -> object:
            self.start(sys._getframe())
            try:
                return method(*args, **kwargs)
            finally:
                sys.settrace(None)

        return run

    def start(self, caller: types.FrameType) -> None:
        """Traces what `caller`, a frame of the engine, calls from now on."""
        sys.settrace(None)  # another endpoint of this loop may be traced: this method must not be
        if self._awaited < 2 or not self._machine.stepping:  # the step of another endpoint continues
            self.reset()
            self.botframe = caller  # its callees may stop, but not this frame itself
            self._set_stopinfo(caller, None, -1)
        calm()  # an exception thrown into any thread would keep it from entering the method
        sys.settrace(self.trace_dispatch)

    def set_continue(self) -> None:
        """Stops at breakpoints only."""
        self._set_stopinfo(self.botframe, None, -1)

    # -- questions of bdb ---------------------------------------------------------------------------------------------

    def stop_here(self, frame: types.FrameType) -> bool:
        """Returns whether a step ends in a frame; steps do not enter the event loop while an endpoint waits."""
        ends: bool = super().stop_here(frame)
        return ends and (self.stopframe is not None or runs_for_user(frame))

    def break_anywhere(self, frame: types.FrameType) -> bool:
        """Returns whether a frame is traced although no step goes through it."""
        if self._machine.breakpoints.has_file(self.canonic(frame.f_code.co_filename)):
            return True
        return (self._machine.raised or self._machine.pausing) and is_users(frame)

    def break_here(self, frame: types.FrameType) -> bool:
        """Returns whether a breakpoint stops at the next line; log points print their messages there."""
        code = frame.f_code
        file = self.canonic(code.co_filename)
        if self._machine.pausing and is_users(frame):
            return True
        if not self._machine.breakpoints.has_file(file):
            return False
        location = SourceLocation(file, frame.f_lineno or 0, code.co_name, code.co_firstlineno)
        hit = self._machine.at(location, lambda text: eval(text, {**frame.f_globals, **frame.f_locals}))
        for line in hit.logs:
            sys.stdout.write(f"{line}\n")
        return hit.stop is not None

    # -- events of bdb ------------------------------------------------------------------------------------------------

    def trace_dispatch(self, frame: types.FrameType, event: str, arg: Any) -> Any:
        """As bdb's; ends a step when the outermost frame of the user's code returns."""
        result = super().trace_dispatch(frame, event, arg)
        if event == "return" and frame is self.botframe and _is_over(frame):
            self.set_continue()
            self._on_return()
            if self._machine.quiet:
                sys.settrace(None)
        return result

    def user_call(self, frame: types.FrameType, argument_list: None) -> None:
        """Handles the entry into a function."""
        if self.stop_here(frame):
            self._arrived("call", frame, None, "")

    def user_line(self, frame: types.FrameType) -> None:
        """Handles the event before a line."""
        line = self._machine.line_to_run()
        if line is not None:
            try:
                # Python warns which variables are None then, and a filter may turn that into an error.
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", RuntimeWarning)
                    frame.f_lineno = line  # type: ignore[misc]  # it can be set here, and only here
            except ValueError as error:
                self._machine.cannot_jump(str(error))
        self._arrived("line", frame, None, "")

    def user_return(self, frame: types.FrameType, return_value: object) -> None:
        """Handles the return from a function."""
        frame.f_locals["__return__"] = return_value
        self._arrived("return", frame, None, "")

    def user_exception(self, frame: types.FrameType, exc_info: Any) -> None:
        """Handles an exception that passes a frame."""
        kind, error, tb = exc_info
        frame.f_locals["__exception__"] = kind, error
        inner = "Internal " if tb is None and kind is StopIteration else ""  # a generator has ended
        note = inner + traceback.format_exception_only(kind, error)[-1].strip()
        self._arrived("exception", frame, tb, note)

    def dispatch_exception(self, frame: types.FrameType, arg: Any) -> Any:
        """As bdb's; and where exceptions stop at their raise, in the innermost frame of the user's that they pass."""
        kind, error, tb = arg
        if tb is None and kind is StopIteration and self.stopframe not in (None, frame):
            if _is_over(self.stopframe):  # a step out of a coroutine ends in its caller
                self._arrived("return", frame, None, "")
            return self.trace_dispatch  # else an awaitable has ended, and no exception is raised
        if self._machine.raised and not self.stop_here(frame) and _raised_here(error, tb):
            self.user_exception(frame, arg)
            return self.trace_dispatch
        return super().dispatch_exception(frame, arg)


def _is_over(frame: types.FrameType) -> bool:
    """Returns whether a return is real: coroutines that only wait have the same event."""
    if not frame.f_code.co_flags & (inspect.CO_COROUTINE | inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR):
        return True
    # In Python 3.12 the position may be within the inline cache of an instruction.
    names = [step.opname for step in dis.get_instructions(frame.f_code) if step.offset <= frame.f_lasti]
    return not names or names[-1] not in ("YIELD_VALUE", "YIELD_FROM", "SEND", "RESUME")


def _raised_here(error: Any, tb: types.TracebackType | None) -> bool:
    """Returns whether an exception has not passed a frame of the user's before this one."""
    if tb is None or isinstance(error, (StopIteration, StopAsyncIteration, GeneratorExit)):
        return False
    if not is_users(tb.tb_frame):
        return False
    inner = tb.tb_next
    while inner is not None:
        if is_users(inner.tb_frame):
            return False
        inner = inner.tb_next
    return True
