"""The breakpoints of one thread: locations, conditions and hit counts. Pure."""

import re
import string
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypedDict, Unpack

from monarch_nb.wire import error_line

Evaluate = Callable[[str], object]  # of an expression in the current frame; raises what the expression raises

_CONVERSIONS: dict[str, Callable[[object], str]] = {"r": repr, "s": str, "a": ascii}
_HIT_CONDITION = re.compile(r"(?P<sign>[<>=!]=|[<>=%])?\s*(?P<count>\d+)")


@dataclass(frozen=True, slots=True)
class SourceLocation:
    """A line that is about to be run."""

    file: str
    line: int
    function: str
    first: int  # the line on which the function begins


@dataclass(eq=False, slots=True)
class SessionBreakpoint:
    """A breakpoint, at a line or at the first executed line of a function."""

    number: int
    file: str
    line: int
    function: str = ""  # stops where this function begins
    condition: str = ""
    hit_condition: str = ""  # how often it must have been passed: "3", ">= 3", "% 10"
    log: str = ""  # printed instead of stopping; {expressions} are filled in
    temporary: bool = False
    set_by: str = ""  # clearing this name removes all breakpoints with it
    enabled: bool = True
    ignore: int = 0  # further passes that do not stop
    hits: int = 0
    passes: int = 0  # hits at which the condition held
    _began: tuple[int, int] | None = None  # of a function: its first line, and its first executed line

    def is_at(self, location: SourceLocation) -> bool:
        """Returns whether the breakpoint is at this line."""
        if self.file != location.file:
            return False
        if not self.function:
            return self.line == location.line
        if self.function != location.function or not location.first <= self.line:
            return False
        if self._began is None and self.line <= location.line:
            self._began = (location.first, location.line)
        return self._began == (location.first, location.line)

    @property
    def reason(self) -> str:
        """Description of a stop at it."""
        return f"breakpoint {self.number}" + (f", if {self.condition}" if self.condition else "")


class BreakpointOptions(TypedDict, total=False):
    """The fields of a SessionBreakpoint without its location."""

    function: str
    condition: str
    hit_condition: str
    log: str
    temporary: bool
    set_by: str
    enabled: bool
    ignore: int


@dataclass(frozen=True, slots=True)
class Hit:
    """Result of a line: the breakpoint that stops there, if any, and texts that others print."""

    stop: SessionBreakpoint | None = None
    note: str = ""
    logs: tuple[str, ...] = ()


class BreakpointTable:
    """Breakpoints of one thread, by number. Changed by any thread, read by its own thread."""

    def __init__(self) -> None:
        self._by_number: dict[int, SessionBreakpoint] = {}  # replaced, never changed: other threads may be reading it
        self._files: frozenset[str] = frozenset()
        self._last = 0

    def __iter__(self) -> Iterator[SessionBreakpoint]:
        return iter(self._by_number.values())

    def __bool__(self) -> bool:
        return bool(self._by_number)

    @property
    def last_number(self) -> int:
        """The greatest number that was given so far."""
        return self._last

    @property
    def lines(self) -> dict[str, list[int]]:
        """The lines that have any, by file."""
        by_file: dict[str, list[int]] = {}
        for bp in self._by_number.values():
            lines = by_file.setdefault(bp.file, [])
            if bp.line not in lines:
                lines.append(bp.line)
        return by_file

    def add(self, file: str, line: int, number: int = 0, **options: Unpack[BreakpointOptions]) -> SessionBreakpoint:
        """Adds a breakpoint, with this number if it is free. Raises ValueError for an invalid hit condition."""
        passed_often_enough(options.get("hit_condition", ""), 0)
        if number <= 0 or number in self._by_number:
            number = self._last + 1
        self._last = max(self._last, number)
        added = SessionBreakpoint(number, file, line, **options)
        self._replace({**self._by_number, added.number: added})
        return added

    def get(self, number: int) -> SessionBreakpoint | None:
        """Returns a breakpoint by its number, None if it was removed."""
        return self._by_number.get(number)

    def of(self, set_by: str) -> list[SessionBreakpoint]:
        """Breakpoints that `set_by` has set."""
        return [bp for bp in self._by_number.values() if bp.set_by == set_by]

    def remove(self, breakpoints: Iterable[SessionBreakpoint]) -> None:
        """Removes breakpoints."""
        removed = {bp.number for bp in breakpoints}
        self._replace({number: bp for number, bp in self._by_number.items() if number not in removed})

    def _replace(self, by_number: dict[int, SessionBreakpoint]) -> None:
        self._by_number = by_number
        self._files = frozenset(bp.file for bp in by_number.values())

    def has_file(self, file: str) -> bool:
        """Returns whether this file has any breakpoints; fast."""
        return file in self._files

    def hit(self, location: SourceLocation, evaluate: Evaluate) -> Hit:
        """Evaluates the breakpoints of a line: each counts its hit; the first that holds stops."""
        if location.file not in self._files:
            return Hit()
        stop: SessionBreakpoint | None = None
        note = ""
        logs: list[str] = []
        for bp in tuple(self._by_number.values()):
            if not bp.enabled or not bp.is_at(location):
                continue
            holds, error = _holds(bp, evaluate)
            if not holds:
                continue
            if bp.temporary and not error:
                self.remove([bp])
            if bp.log and not error:
                logs.append(filled_in(bp.log, evaluate))
            elif stop is None:
                stop, note = bp, error
        return Hit(stop, note, tuple(logs))


def _holds(breakpoint: SessionBreakpoint, evaluate: Evaluate) -> tuple[bool, str]:
    breakpoint.hits += 1
    if breakpoint.condition:
        try:
            if not evaluate(breakpoint.condition):
                return False, ""
        except (Exception, SystemExit) as error:  # its author needs the error, whatever the other conditions are
            return True, f"its condition `{breakpoint.condition}` raised {error_line(error)}"
    breakpoint.passes += 1
    if not passed_often_enough(breakpoint.hit_condition, breakpoint.passes):
        return False, ""
    if breakpoint.ignore > 0:
        breakpoint.ignore -= 1
        return False, ""
    return True, ""


def passed_often_enough(condition: str, passes: int) -> bool:
    """Checks a hit condition after so many passes: "3" and "== 3" at the third only, ">= 3" from the third on,
    "% 3" at each third; an empty one always. Raises ValueError for anything else.
    """
    text = condition.strip()
    if not text:
        return True
    parsed = _HIT_CONDITION.fullmatch(text)
    if parsed is None:
        raise ValueError(f"{condition!r} is no hit condition: write 3, >= 3, or % 10")
    count = int(parsed["count"])
    match parsed["sign"]:
        case ">":
            return passes > count
        case ">=":
            return passes >= count
        case "<":
            return passes < count
        case "<=":
            return passes <= count
        case "!=":
            return passes != count
        case "%":
            return count > 0 and passes % count == 0
        case _:
            return passes == count


def filled_in(message: str, evaluate: Evaluate) -> str:
    """Fills in the expressions of a log message, as in an f-string (`{loss:.3f}`); errors replace expressions."""
    parts: list[str] = []
    try:
        fields = list(string.Formatter().parse(message))
    except ValueError as error:
        return f"{message} ({error})"
    for literal, expression, form, conversion in fields:
        parts.append(literal)
        if expression is None:
            continue
        try:
            value: object = evaluate(expression)
            if conversion:
                value = _CONVERSIONS[conversion](value)
            parts.append(format(value, form or ""))
        except (Exception, SystemExit) as error:
            parts.append(f"{{{expression}: {error_line(error)}}}")
    return "".join(parts)
