"""Threads that stop and carry out the commands of a test, in the test's own process."""

import linecache
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import CodeType
from typing import Any

from monarch_nb.debug import verbs
from monarch_nb.debug.records import Stopped
from monarch_nb.debug.session.thread import ThreadDebugger

SESSION = "s#1"
RECORD = Stopped(
    session=SESSION, number=0, address="h/p.0.0", host="h", pid=1, mesh="uid", name="a", rank=0, incarnation=0
)
SECONDS = 20.0


def source(name: str, text: str) -> CodeType:
    """Code whose lines the debugger finds like those of a cell."""
    lines = text.splitlines(keepends=True)
    linecache.cache[name] = (len(text), None, lines, name)
    return compile(text, name, "exec")


# Code that users neither see nor step into.
_ENGINE: dict[str, Any] = {"__name__": "monarch_nb.runtime.actors.cell", "sys": sys}
exec(
    """
def endpoint(code, names):
    return lambda: exec(code, names)

def breakpoint_of(debugger):
    return lambda: debugger.stop(sys._getframe(1), "stop()")
""",
    _ENGINE,
)


class Listener:
    """The process that a debugger notifies: at each stop it posts the next commands, and records the answers."""

    def __init__(self, script: "Callable[[Stopped], Iterable[verbs.Command]]") -> None:
        self._script = script
        self.stops: list[Stopped] = []
        self.answers: list[verbs.CommandAnswer] = []
        self.events: list[tuple[str, str]] = []

    def stopped(self, debugger: ThreadDebugger) -> None:
        self.stops.append(debugger.record)
        for command in self._script(debugger.record):
            assert debugger.post(command, self.answers.append)

    def resumed(self, debugger: ThreadDebugger, reason: str) -> None:
        self.events.append(("resumed", reason))

    def over(self, debugger: ThreadDebugger, reason: str) -> None:
        self.events.append(("over", reason))

    def verdict(self) -> str:
        return ""

    def later(self, seconds: float, function: Callable[[], object]) -> None:
        pass


def go(motion: Any = "continue", line: int | None = None) -> verbs.Go:
    return verbs.Go(session=SESSION, motion=motion, line=line)


def stack_of(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    return "".join(traceback.format_stack(frame)) if frame is not None else "the thread has ended"


def on_thread(function: Callable[[], object]) -> object:
    """The result of a function on a thread of its own, on which it may be traced; raises its exception."""
    outcome: list[tuple[object, BaseException | None]] = []

    def run() -> None:
        try:
            outcome.append((function(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(SECONDS)
    assert outcome, f"the function has not ended:\n{stack_of(thread)}"
    value, error = outcome[0]
    if error is not None:
        raise error
    return value


def debugged(
    code: CodeType,
    script: "Callable[[Stopped], Iterable[verbs.Command]]",
    *,
    arm: Callable[[ThreadDebugger], object] = id,
    listener: Listener | None = None,
) -> tuple[Listener, dict[str, Any]]:
    """Runs code that `stop()` stops; `arm` may set breakpoints first. Gives the listener and the names of the code."""
    listener = listener or Listener(script)
    names: dict[str, Any] = {"__name__": "program"}

    def run() -> None:
        debugger = ThreadDebugger(listener, RECORD, threading.current_thread(), ends=lambda: False)
        names["stop"] = _ENGINE["breakpoint_of"](debugger)
        arm(debugger)
        debugger.watched(_ENGINE["endpoint"](code, names))()

    on_thread(run)
    return listener, names


def line_of(file: str, text: str) -> int:
    """The number of the first line of a file that reads so."""
    lines = Path(file).read_text(encoding="utf-8").splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.strip() == text)
