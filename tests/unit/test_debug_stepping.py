"""Random programs, breakpoints and commands: a thread stops where it would under Python's own `bdb`."""

import bdb
import gc
import sys
from collections.abc import Iterable, Iterator
from random import Random
from types import CodeType, FrameType
from typing import Any

import pytest

from monarch_nb.debug import verbs
from monarch_nb.debug.records import Stopped
from monarch_nb.debug.session.thread import ThreadDebugger
from monarch_nb.transport import calm
from tests.effort import tries
from tests.unit.debug_tools import SESSION, debugged, go, on_thread, source

StopEvent = tuple[str, str, int]  # event, function, line
MOTIONS = ("in", "in", "over", "over", "over", "out", "until", "continue")


class Writer:
    """Writes a program of some functions that loop, call each other, raise, yield and stop."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.lines: list[str] = ["count = 0"]

    def program(self) -> str:
        functions = self.random.randrange(1, 4)
        for number in range(functions):
            kind = self.random.choice(("plain", "plain", "generator"))
            self.lines.append(f"def f{number}(x):")
            self.lines.append("    global count")
            self.body(1, number, self.random.randrange(2, 6), generator=kind == "generator")
            if kind == "generator":
                self.lines.append("    yield x")
                self.lines.append(f"_g{number} = f{number}")
                self.lines.append(f"def f{number}(x):")
                self.lines.append(f"    return sum(_g{number}(x))")
            else:
                self.lines.append("    return x")
        self.body(0, functions, self.random.randrange(3, 7))
        return "\n".join(self.lines) + "\n"

    def body(self, depth: int, callables: int, statements: int, *, generator: bool = False) -> None:
        for _ in range(statements):
            self.statement(depth, callables, generator)

    def statement(self, depth: int, callables: int, generator: bool) -> None:
        pad = "    " * depth
        dice = self.random.randrange(12)
        if dice < 3 and callables:
            self.lines.append(f"{pad}count += f{self.random.randrange(callables)}({self.random.randrange(3)})")
        elif dice == 3 and depth < 4:
            self.lines.append(f"{pad}for i in range({self.random.randrange(3)}):")
            self.body(depth + 1, callables, self.random.randrange(1, 3), generator=generator)
        elif dice == 4 and depth < 4:
            self.lines.append(f"{pad}try:")
            self.body(depth + 1, callables, 1, generator=generator)
            self.lines.append(f"{pad}    count // (count % {self.random.randrange(1, 3)})")
            self.lines.append(f"{pad}except ZeroDivisionError:")
            self.body(depth + 1, callables, 1, generator=generator)
        elif dice == 5 and depth < 4:
            self.lines.append(f"{pad}if count % 2:")
            self.body(depth + 1, callables, 1, generator=generator)
        elif dice == 6:
            self.lines.append(f"{pad}stop()")
        elif dice == 7 and generator:
            self.lines.append(f"{pad}yield count")
        elif dice == 8:
            self.lines.append(f"{pad}total = [n for n in range(2)]")
        else:
            self.lines.append(f"{pad}{'count' if not depth else 'y'} = {self.random.randrange(9)}")


class Breakpoint:
    """A breakpoint for both debuggers."""

    def __init__(self, random: Random, lines: int) -> None:
        self.line = random.randrange(1, lines + 1)
        self.condition = random.choice(("", "", "count % 2 == 0", "nothing > 1"))
        self.ignore = random.choice((0, 0, 1, 3))
        self.temporary = random.random() < 0.2


class Reference(bdb.Bdb):
    """`bdb` as a debugger uses it: each stop is recorded, and answered with the next command."""

    def __init__(self, breakpoints: list[Breakpoint], file: str, commands: "Iterable[tuple[str, int]]") -> None:
        bdb.Breakpoint.clearBreakpoints()
        super().__init__(["tests.*", "threading", "bdb", "weakref", "_weakrefset"])
        self.stops: list[StopEvent] = []
        self._commands = iter(commands)
        self.quiet = not breakpoints
        for point in breakpoints:
            assert self.set_break(file, point.line, point.temporary, point.condition or None) is None
            bdb.Breakpoint.bpbynumber[-1].ignore = point.ignore  # type: ignore[union-attr]

    def do_clear(self, arg: Any) -> None:
        self.clear_bpbynumber(arg)

    def record(self, event: str, frame: FrameType) -> None:
        self.stops.append((event, frame.f_code.co_name, frame.f_lineno))
        motion, up = next(self._commands, ("continue", 0))
        ancestor: FrameType | None = frame
        while ancestor is not None and ancestor.f_globals.get("__name__") == "program":
            ancestor.f_trace = self.trace_dispatch  # from Python 3.14 on, bdb follows functions with breakpoints only
            ancestor = ancestor.f_back
        start = frame
        while up and start.f_back is not None and start.f_back.f_globals.get("__name__") == "program":
            start, up = start.f_back, up - 1
        if motion == "in":
            self.set_step()
        elif motion == "over":
            self.set_next(start)
        elif motion == "out":
            self.set_return(start)
        elif motion == "until":
            self.set_until(start)
        else:
            self.set_continue()

    def stop(self) -> None:
        sys.settrace(None)
        frame = sys._getframe(1)
        self.reset()  # not set_trace(), which from Python 3.13 on stops at single instructions
        ancestor: FrameType | None = frame
        while ancestor is not None:
            ancestor.f_trace = self.trace_dispatch
            if ancestor.f_globals.get("__name__") == "program":
                self.botframe = ancestor
            ancestor = ancestor.f_back
        self.set_step()
        sys.settrace(self.trace_dispatch)
        self.record("asked", frame)

    def user_call(self, frame: FrameType, argument_list: None) -> None:
        if self.stop_here(frame):
            self.record("call", frame)

    def user_line(self, frame: FrameType) -> None:
        self.record("line", frame)

    def user_return(self, frame: FrameType, return_value: Any) -> None:
        self.record("return", frame)

    def user_exception(self, frame: FrameType, exc_info: Any) -> None:
        self.record("exception", frame)

    def run_code(self, code: CodeType) -> dict[str, Any]:
        names: dict[str, Any] = {"__name__": "program", "stop": self.stop}

        def run() -> None:
            if not self.quiet:
                self.reset()
                self.botframe = sys._getframe()
                self.set_continue()
                calm()  # as ours does: an exception that was thrown into a thread of an earlier test blocks traced ones
                sys.settrace(self.trace_dispatch)
            try:
                exec(code, names)
            finally:
                sys.settrace(None)

        on_thread(run)
        return names


def run_ours(
    code: CodeType, breakpoints: list[Breakpoint], commands: "Iterable[tuple[Any, int]]"
) -> tuple[list[StopEvent], dict[str, Any]]:
    remaining = iter(commands)
    stops: list[StopEvent] = []
    debuggers: list[ThreadDebugger] = []

    def arm(debugger: ThreadDebugger) -> None:
        debuggers.append(debugger)
        for point in breakpoints:
            debugger.add_breakpoint(
                code.co_filename, point.line, condition=point.condition, ignore=point.ignore, temporary=point.temporary
            )

    def script(record: Stopped) -> Iterable[verbs.Command]:
        pause = debuggers[0].machine.standing
        assert pause is not None
        stops.append((pause.event, record.selected_frame.function.rpartition(".")[2], record.selected_frame.line))
        motion, up = next(remaining, ("continue", 0))
        if min(up, pause.selected):
            yield verbs.Select(session=SESSION, by=-min(up, pause.selected))
        yield go(motion)

    _, names = debugged(code, script, arm=arm)
    return stops, names


@pytest.fixture(autouse=True)
def no_collections() -> Iterator[None]:
    """No garbage collection in the middle of a program: test libraries have Python functions called for each."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("seed", range(tries(60)))
def test_a_thread_stops_where_it_does_under_bdb(seed: int) -> None:
    random = Random(seed)
    text = Writer(random).program()
    file = f"<program-{seed}>"
    code = source(file, text)
    lines = text.count("\n")
    breakpoints = [Breakpoint(random, lines) for _ in range(random.choice((0, 1, 2, 4)))]
    breakpoints = list({point.line: point for point in breakpoints}.values())
    commands = [(random.choice(MOTIONS), random.choice((0, 0, 0, 1, 2))) for _ in range(random.randrange(40))]
    reference = Reference(breakpoints, file, commands)
    expected = reference.run_code(code)
    stops, names = run_ours(code, breakpoints, commands)
    assert stops == reference.stops, text
    assert names["count"] == expected["count"]
