"""Breakpoints that front ends have set in files and cells, with the conditions added to them. Pure."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from monarch_nb.debug.messages import BreakLine
from monarch_nb.debug.session.breakpoints import passed_often_enough

from .lines import BreakableLine, BreakableLines

Message = dict[str, Any]
COMPILED = (".so", ".pyd", ".dylib", ".dll", ".pyc")  # files that hold no lines of Python


@dataclass(frozen=True)
class GutterMark:
    """A breakpoint as it was requested, and the line it was moved to."""

    requested: Message  # a SourceBreakpoint
    line: BreakableLine
    number: int = 0
    error: str = ""

    def row(self, path: str) -> Message:
        """Returns the DAP Breakpoint that front ends receive."""
        body = {"id": self.number, "verified": not self.error, "line": self.line.number, "source": {"path": path}}
        return {**body, "message": self.error} if self.error else body


@dataclass(frozen=True)
class MarkOptions:
    """Properties that JupyterLab's gutter cannot set: a condition (it may begin with `@ranks`), a hit count, a log."""

    condition: str = ""
    hit_condition: str = ""
    log: str = ""


class Gutter:
    """Breakpoints by file. `lines_of` gives the lines of a file that can have breakpoints."""

    def __init__(self, lines_of: Callable[[str], BreakableLines]) -> None:
        self._lines_of = lines_of
        self._files: dict[str, list[GutterMark]] = {}
        self._options: dict[tuple[str, int], MarkOptions] = {}
        self._last = 0

    def __iter__(self) -> Iterator[tuple[str, GutterMark]]:
        for path, marks in self._files.items():
            for mark in marks:
                yield path, mark

    def set(self, path: str, requested: Sequence[Message]) -> list[GutterMark]:
        """Replaces the breakpoints of a file."""
        lines = self._lines_of(path)
        marks = []
        for request in requested:
            mark = GutterMark(request, lines.at(int(request.get("line") or 1)))
            self._last += 1
            marks.append(replace(mark, number=self._last, error=_no_lines(path) or _error_in(self._filled(path, mark))))
        self._files[path] = marks
        if not marks:
            del self._files[path]
        return marks

    def clear(self) -> None:
        """Removes all breakpoints; their conditions are stored until they are set again."""
        self._files.clear()

    def add(self, path: str, line: int, options: MarkOptions) -> None:
        """Sets properties of a breakpoint. Raises ValueError for invalid ones, LookupError without a breakpoint."""
        marks = self._files.get(path, [])
        index = next((index for index, mark in enumerate(marks) if mark.line.number == line), None)
        if index is None:
            raise LookupError(f"there is no breakpoint at line {line} of {path}")
        error = _no_lines(path) or _error_in(options)
        if error:
            raise ValueError(error)
        self._options[path, line] = options
        marks[index] = replace(marks[index], error="")

    def options(self, path: str, line: int) -> MarkOptions:
        """Properties added to a breakpoint, empty by default."""
        return self._options.get((path, line), MarkOptions())

    def _filled(self, path: str, mark: GutterMark) -> MarkOptions:
        request = mark.requested
        options = self.options(path, mark.line.number)
        return MarkOptions(
            str(request.get("condition") or options.condition),
            str(request.get("hitCondition") or options.hit_condition),
            str(request.get("logMessage") or options.log),
        )

    def of_mesh(self) -> list[BreakLine]:
        """Breakpoints for the ranks, without those in code that only the notebook runs."""
        lines = []
        for path, mark in self:
            if mark.error or mark.line.whose == "notebook":
                continue
            options = self._filled(path, mark)
            ranks, condition = ranks_in(options.condition)
            lines.append(
                BreakLine(
                    file=path,
                    line=mark.line.number,
                    actor=mark.line.actor,
                    ranks=ranks,
                    condition=condition,
                    hit_condition=options.hit_condition,
                    log=options.log,
                )
            )
        return lines

    def of_notebook(self, path: str) -> list[Message]:
        """Breakpoints of a file for the kernel's own debugger: none in methods of actors, none that name ranks."""
        rows = []
        for mark in self._files.get(path, ()):
            options = self._filled(path, mark)
            if mark.line.whose == "actors" or mark.error or ranks_in(options.condition)[0]:
                continue
            extras = {"condition": options.condition, "hitCondition": options.hit_condition, "logMessage": options.log}
            rows.append({"line": mark.line.number, **{name: text for name, text in extras.items() if text}})
        return rows

    @property
    def files(self) -> list[str]:
        """Files that have breakpoints."""
        return list(self._files)


def ranks_in(condition: str) -> tuple[str, str]:
    """Returns the ranks that a condition names, and the rest of it: `@gpus=0:4 loss > 1`, as at the prompt."""
    text = condition.strip()
    if not text.startswith("@"):
        return "", text
    words = text[1:].split(None, 1)
    return (words[0] if words else "", words[1] if len(words) > 1 else "")


def _no_lines(path: str) -> str:
    return "compiled code has no lines of Python to stop at" if path.endswith(COMPILED) else ""


def _error_in(options: MarkOptions) -> str:
    """Returns the error in the properties of a breakpoint, "" if they are valid."""
    condition = ranks_in(options.condition)[1]
    try:
        passed_often_enough(options.hit_condition, 0)
        if condition:
            compile(condition, "<condition>", "eval")
    except SyntaxError as error:
        return f"the condition {condition} is not an expression: {error.msg}"
    except ValueError as error:
        return str(error)
    return ""
