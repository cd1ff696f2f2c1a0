"""The breakpoints that front ends have set in files and cells, with what was added to them here. Pure."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from monarch_nb.debug.messages import BreakLine
from monarch_nb.debug.session.breakpoints import passed_often_enough

from .lines import Line, Lines

Message = dict[str, Any]
COMPILED = (".so", ".pyd", ".dylib", ".dll", ".pyc")  # files that hold no lines of Python


@dataclass(frozen=True)
class Mark:
    """One breakpoint as it was asked for, and the line that it has got."""

    wanted: Message  # a SourceBreakpoint
    line: Line
    number: int = 0
    error: str = ""

    def row(self, path: str) -> Message:
        """As front ends are told of it."""
        about = {"id": self.number, "verified": not self.error, "line": self.line.number, "source": {"path": path}}
        return {**about, "message": self.error} if self.error else about


@dataclass(frozen=True)
class More:
    """What JupyterLab's gutter cannot say of a breakpoint: a condition, which may begin with `@ranks`; and the like."""

    condition: str = ""
    hit_condition: str = ""
    log: str = ""


class Gutter:
    """By file. `lines_of` gives the lines of a file that can be stopped at."""

    def __init__(self, lines_of: Callable[[str], Lines]) -> None:
        self._lines_of = lines_of
        self._files: dict[str, list[Mark]] = {}
        self._more: dict[tuple[str, int], More] = {}
        self._last = 0

    def __iter__(self) -> Iterator[tuple[str, Mark]]:
        for path, marks in self._files.items():
            for mark in marks:
                yield path, mark

    def set(self, path: str, wanted: Sequence[Message]) -> list[Mark]:
        """Those of a file, in place of those before."""
        lines = self._lines_of(path)
        marks = []
        for each in wanted:
            mark = Mark(each, lines.at(int(each.get("line") or 1)))
            self._last += 1
            marks.append(replace(mark, number=self._last, error=_no_lines(path) or _wrong(self._filled(path, mark))))
        self._files[path] = marks
        if not marks:
            del self._files[path]
        return marks

    def clear(self) -> None:
        """Takes all away; what was added to them is kept for when they come back."""
        self._files.clear()

    def add(self, path: str, line: int, more: More) -> None:
        """Says more of a breakpoint. Raises ValueError for what means nothing, LookupError where there is none."""
        marks = self._files.get(path, [])
        at = next((at for at, mark in enumerate(marks) if mark.line.number == line), None)
        if at is None:
            raise LookupError(f"there is no breakpoint at line {line} of {path}")
        error = _no_lines(path) or _wrong(more)
        if error:
            raise ValueError(error)
        self._more[path, line] = more
        marks[at] = replace(marks[at], error="")

    def more(self, path: str, line: int) -> More:
        """What is said of a breakpoint."""
        return self._more.get((path, line), More())

    def _filled(self, path: str, mark: Mark) -> More:
        told = mark.wanted
        more = self.more(path, mark.line.number)
        return More(
            str(told.get("condition") or more.condition),
            str(told.get("hitCondition") or more.hit_condition),
            str(told.get("logMessage") or more.log),
        )

    def of_mesh(self) -> list[BreakLine]:
        """Those that ranks are to have: not those of code that only the notebook runs."""
        wanted = []
        for path, mark in self:
            if mark.error or mark.line.whose == "notebook":
                continue
            more = self._filled(path, mark)
            ranks, condition = ranks_in(more.condition)
            wanted.append(
                BreakLine(
                    file=path,
                    line=mark.line.number,
                    actor=mark.line.actor,
                    ranks=ranks,
                    condition=condition,
                    hit_condition=more.hit_condition,
                    log=more.log,
                )
            )
        return wanted

    def of_notebook(self, path: str) -> list[Message]:
        """Those of a file that the kernel's own debugger is to have: not those in the methods of actors, nor those
        that name ranks.
        """
        mine = []
        for mark in self._files.get(path, ()):
            more = self._filled(path, mark)
            if mark.line.whose == "actors" or mark.error or ranks_in(more.condition)[0]:
                continue
            told = {"condition": more.condition, "hitCondition": more.hit_condition, "logMessage": more.log}
            mine.append({"line": mark.line.number, **{name: text for name, text in told.items() if text}})
        return mine

    @property
    def files(self) -> list[str]:
        """The files that have any."""
        return list(self._files)


def ranks_in(condition: str) -> tuple[str, str]:
    """The ranks that a condition is about, and the rest of it: `@gpus=0:4 loss > 1`, as at the prompt."""
    text = condition.strip()
    if not text.startswith("@"):
        return "", text
    words = text[1:].split(None, 1)
    return (words[0] if words else "", words[1] if len(words) > 1 else "")


def _no_lines(path: str) -> str:
    return "compiled code has no lines of Python to stop at" if path.endswith(COMPILED) else ""


def _wrong(more: More) -> str:
    """What is wrong with it, in words; "" mostly."""
    condition = ranks_in(more.condition)[1]
    try:
        passed_often_enough(more.hit_condition, 0)
        if condition:
            compile(condition, "<condition>", "eval")
    except SyntaxError as error:
        return f"the condition {condition} is not an expression: {error.msg}"
    except ValueError as error:
        return str(error)
    return ""
