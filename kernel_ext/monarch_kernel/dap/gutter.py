"""Breakpoints that front ends have set in files and cells: the lines that can have them, and their conditions. Pure."""

import ast
import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any, Literal

from monarch_nb._parsing import parsed
from monarch_nb.debug.session.breakpoints import passed_often_enough
from monarch_nb.debug.verbs import BreakLine

NEW_LOCALS = 0x2  # a flag of the code of functions; that of classes is run when they are defined
Whose = Literal["actors", "anybody", "notebook"]
Function = ast.FunctionDef | ast.AsyncFunctionDef
Message = dict[str, Any]
COMPILED = (".so", ".pyd", ".dylib", ".dll", ".pyc")  # files that hold no lines of Python


@dataclass(frozen=True)
class BreakableLine:
    """A line that can have a breakpoint: the kind of its code, and its actor class."""

    number: int
    whose: Whose = "anybody"  # methods of an actor class, a function that any code may call, or the top level
    actor: str = ""


class BreakableLines:
    """Lines of one text. If it does not compile, every line can have a breakpoint."""

    def __init__(self, text: str, is_actor: Callable[[str], bool] = lambda name: False) -> None:
        """`is_actor(name)` says whether a class is an actor class, where the text does not show it."""
        self._is_actor = is_actor
        self._classes: list[tuple[int, int, str]] = []
        self._functions: list[tuple[int, int, int]] = []  # first line, first executed line, last line
        try:
            tree = parsed(text)
            code = compile(text, "<lines>", "exec", dont_inherit=True)
        except (SyntaxError, ValueError, RecursionError):
            self._run: list[int] = []
            return
        self._visit(tree, "")
        codes = [code, *_inner(code)]
        inside = {line for code in codes if code.co_flags & NEW_LOCALS for line in _lines_of(code)}
        outside = {line for code in codes if not code.co_flags & NEW_LOCALS for line in _lines_of(code)}
        heads = {line for begin, first, _ in self._functions for line in range(begin, first)}
        self._run = sorted((inside | outside) - (heads - inside))

    def _visit(self, tree: ast.AST, prefix: str) -> None:
        for node in ast.iter_child_nodes(tree):
            if isinstance(node, ast.ClassDef):
                name = prefix + node.name
                if _looks_like_actors(node) or self._is_actor(name):
                    self._classes.append((node.lineno, node.end_lineno or node.lineno, name))
                self._visit(node, f"{name}.")
            elif isinstance(node, Function):
                begin = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                self._functions.append((begin, _body(node), node.end_lineno or node.lineno))
                self._visit(node, f"{prefix}{node.name}.<locals>.")
            else:
                self._visit(node, prefix)

    def at(self, number: int) -> BreakableLine:
        """Returns the line for a click on line `number`: this line, or the next one that is executed."""
        if self._run:
            for begin, first, _ in self._functions:
                if begin <= number < first:
                    number = first
            index = bisect.bisect_left(self._run, number)
            number = self._run[min(index, len(self._run) - 1)]
        actor = max((span for span in self._classes if span[0] <= number <= span[1]), default=None)
        inside = any(first <= number <= end for _, first, end in self._functions)
        if actor is not None and inside:
            return BreakableLine(number, "actors", actor[2])
        return BreakableLine(number, "anybody" if inside or not self._run else "notebook")


def _body(node: Function) -> int:
    """Returns the first executed line of a function, which is not its docstring."""
    first = node.body[0]
    value = first.value if isinstance(first, ast.Expr) else None
    is_text = isinstance(value, ast.Constant) and isinstance(value.value, str)
    return node.body[1].lineno if is_text and len(node.body) > 1 else first.lineno


def _looks_like_actors(node: ast.ClassDef) -> bool:
    if any(_name(base) == "Actor" for base in node.bases):
        return True
    functions = (function for function in node.body if isinstance(function, Function))
    return any("endpoint" in _name(decorator) for function in functions for decorator in function.decorator_list)


def _name(node: ast.expr) -> str:
    node = node.func if isinstance(node, ast.Call) else node
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _inner(code: CodeType) -> Iterator[CodeType]:
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield const
            yield from _inner(const)


def _lines_of(code: CodeType) -> Iterator[int]:
    for _, _, line in code.co_lines():
        if line:
            yield line


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
