"""The frames of a thread that stands, and what can be asked of them: expressions, statements, variables."""

import ctypes
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from monarch_nb.debug.session import stack as stacks
from monarch_nb.debug.session.redirect import redirected

FILE = "<mdb>"  # what code that was typed is said to come from


class Frames:
    """Outermost first. What is evaluated prints into `out`."""

    def __init__(self, entries: Sequence[stacks.Entry], out: TextIO) -> None:
        self.entries = list(entries)
        self._out = out
        self._locals: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self.entries)

    def frame(self, index: int) -> types.FrameType:
        """One of them."""
        return self.entries[index][0]

    def locals(self, index: int) -> Any:
        """Its local variables, as a mapping; one for as long as the thread stands, for changes are made in it."""
        if index not in self._locals:
            self._locals[index] = self.frame(index).f_locals
        return self._locals[index]

    def names(self, index: int) -> Mapping[str, Any]:
        """All that an expression there can name, in one dictionary: what is inside of comprehensions sees it, too."""
        return {**self.frame(index).f_globals, **self.locals(index)}

    def evaluate(self, expression: str, index: int) -> Any:
        """The value of an expression; raises what it raises."""
        code = compile(expression.strip(), FILE, "eval")
        with redirected(self._out):
            return eval(code, dict(self.names(index)))

    def execute(self, source: str, index: int) -> None:
        """Runs statements; what they assign is assigned in the frame. Raises what they raise."""
        code = compile(source if source.endswith("\n") else f"{source}\n", FILE, "exec")
        try:
            with redirected(self._out):
                exec(code, self.frame(index).f_globals, self.locals(index))
        finally:
            _write_back(self.frame(index))

    def assign(self, name: str, value: Any, index: int) -> None:
        """Gives a local variable another value."""
        self.locals(index)[name] = value
        _write_back(self.frame(index))

    def move(self, index: int, line: int) -> None:
        """The frame runs another line next. Raises ValueError where that cannot be."""
        frame = self.frame(index)
        frame.f_lineno = line  # type: ignore[misc]
        self.entries[index] = frame, line


def is_expression(text: str) -> bool:
    """Whether a text is an expression, and not statements; one that is neither is taken for statements."""
    try:
        compile(text.strip(), FILE, "eval")
    except SyntaxError:
        return False
    return True


def _write_back(frame: types.FrameType) -> None:
    """Assignments to locals take effect; newer Pythons need no help."""
    if sys.version_info < (3, 13):
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
