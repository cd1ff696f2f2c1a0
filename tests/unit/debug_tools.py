"""Threads that stop and carry out what a test has said, in the test's own process."""

import linecache
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import CodeType
from typing import Any

from monarch_nb.debug import messages as m
from monarch_nb.debug.records import Stopped
from monarch_nb.debug.session.thread import ThreadDebugger

SESSION = "s#1"
WHO = Stopped(
    session=SESSION, number=0, address="h/p.0.0", host="h", pid=1, mesh="uid", name="a", rank=0, incarnation=0
)
SECONDS = 20.0


def source(name: str, text: str) -> CodeType:
    """Code whose lines the debugger finds as it finds those of a cell."""
    lines = text.splitlines(keepends=True)
    linecache.cache[name] = (len(text), None, lines, name)
    return compile(text, name, "exec")


# What users neither see nor step into.
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


class Told:
    """The process that a debugger tells: at each stop it posts the next commands, and keeps the answers."""

    def __init__(self, script: "Callable[[Stopped], Iterable[m.Command]]") -> None:
        self._script = script
        self.stops: list[Stopped] = []
        self.answers: list[m.CommandAnswer] = []
        self.events: list[tuple[str, str]] = []

    def stopped(self, debugger: ThreadDebugger) -> None:
        self.stops.append(debugger.record)
        for command in self._script(debugger.record):
            assert debugger.post(command, self.answers.append)

    def resumed(self, debugger: ThreadDebugger, why: str) -> None:
        self.events.append(("resumed", why))

    def over(self, debugger: ThreadDebugger, why: str) -> None:
        self.events.append(("over", why))

    def verdict(self) -> str:
        return ""

    def later(self, seconds: float, function: Callable[[], object]) -> None:
        pass


def go(motion: Any = "continue", line: int | None = None) -> m.Go:
    return m.Go(session=SESSION, motion=motion, line=line)


def where(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    return "".join(traceback.format_stack(frame)) if frame is not None else "it is over"


def on_thread(function: Callable[[], object]) -> object:
    """What a function gives on a thread of its own, on which it may be traced; raises what it raises."""
    outcome: list[tuple[object, BaseException | None]] = []

    def run() -> None:
        try:
            outcome.append((function(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(SECONDS)
    assert outcome, f"it has not ended:\n{where(thread)}"
    value, error = outcome[0]
    if error is not None:
        raise error
    return value


def debugged(
    code: CodeType,
    script: "Callable[[Stopped], Iterable[m.Command]]",
    *,
    arm: Callable[[ThreadDebugger], object] = id,
    told: Told | None = None,
) -> tuple[Told, dict[str, Any]]:
    """Runs code whose `stop()` stops it; `arm` may set breakpoints before. What was told, and the names of the code."""
    told = told or Told(script)
    names: dict[str, Any] = {"__name__": "program"}

    def run() -> None:
        debugger = ThreadDebugger(told, WHO, threading.current_thread(), ends=lambda: False)
        names["stop"] = _ENGINE["breakpoint_of"](debugger)
        arm(debugger)
        debugger.watched(_ENGINE["endpoint"](code, names))()

    on_thread(run)
    return told, names


def line_of(file: str, text: str) -> int:
    """The number of the first line of a file that reads so."""
    lines = Path(file).read_text(encoding="utf-8").splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.strip() == text)
