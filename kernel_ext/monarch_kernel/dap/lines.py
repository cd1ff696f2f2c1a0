"""Source lines that can have breakpoints, and the kind of code they belong to. Pure."""

import ast
import bisect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Literal

from monarch_nb._parsing import parsed

NEW_LOCALS = 0x2  # a flag of the code of functions; that of classes is run when they are defined
Whose = Literal["actors", "anybody", "notebook"]
Function = ast.FunctionDef | ast.AsyncFunctionDef


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
