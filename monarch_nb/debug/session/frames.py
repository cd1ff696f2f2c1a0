"""The frames of a stopped thread, with their expressions, statements and variables."""

import contextlib
import ctypes
import sys
import threading
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TextIO

from monarch_nb.debug.session import stack as stacks

FILE = "<mdb>"  # file name of typed code


class _Split:
    """Stands in for a stream: writes of one thread go to `target`, all others to `original`."""

    def __init__(self, original: TextIO, target: TextIO, thread: int) -> None:
        self._original, self._target, self._thread = original, target, thread

    @property
    def _current(self) -> TextIO:
        return self._target if threading.get_ident() == self._thread else self._original

    def write(self, text: str) -> int:
        """Writes."""
        return self._current.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._current, name)


_redirect_lock = threading.Lock()


@contextlib.contextmanager
def _redirected(target: TextIO) -> Iterator[None]:
    """Redirects what this thread prints to `target`."""
    with _redirect_lock:
        split = [(name, _Split(getattr(sys, name), target, threading.get_ident())) for name in ("stdout", "stderr")]
        for name, stream in split:
            setattr(sys, name, stream)
    try:
        yield
    finally:
        with _redirect_lock:
            for name, stream in split:
                if getattr(sys, name) is stream:
                    setattr(sys, name, stream._original)
                else:  # wrapped by that of another thread, which passes our output on
                    stream._thread = 0


class Frames:
    """Frames, outermost first. Evaluated code prints into `out`."""

    def __init__(self, entries: Sequence[stacks.Entry], out: TextIO) -> None:
        self.entries = list(entries)
        self._out = out
        self._locals: dict[int, object] = {}

    def __len__(self) -> int:
        return len(self.entries)

    def frame(self, index: int) -> types.FrameType:
        """Returns a frame by its index."""
        return self.entries[index][0]

    def locals(self, index: int) -> Any:
        """Its local variables, as one mapping during a stop, since changes are made in it."""
        if index not in self._locals:
            self._locals[index] = self.frame(index).f_locals
        return self._locals[index]

    def names(self, index: int) -> Mapping[str, Any]:
        """Returns all names of a frame in one dictionary, so that comprehensions see them, too."""
        return {**self.frame(index).f_globals, **self.locals(index)}

    def evaluate(self, expression: str, index: int) -> object:
        """Returns the value of an expression; raises its errors."""
        code = compile(expression.strip(), FILE, "eval")
        with _redirected(self._out):
            return eval(code, dict(self.names(index)))

    def execute(self, source: str, index: int) -> None:
        """Runs statements, whose assignments go to the frame. Raises what they raise."""
        code = compile(source if source.endswith("\n") else f"{source}\n", FILE, "exec")
        try:
            with _redirected(self._out):
                exec(code, self.frame(index).f_globals, self.locals(index))
        finally:
            _write_back(self.frame(index))

    def assign(self, name: str, value: object, index: int) -> None:
        """Assigns to a local variable."""
        self.locals(index)[name] = value
        _write_back(self.frame(index))

    def move(self, index: int, line: int) -> None:
        """Makes the frame run another line next. Raises ValueError if it cannot."""
        frame = self.frame(index)
        frame.f_lineno = line  # type: ignore[misc]
        self.entries[index] = frame, line


def is_expression(text: str) -> bool:
    """Returns whether a text is an expression; invalid text counts as statements."""
    try:
        compile(text.strip(), FILE, "eval")
    except SyntaxError:
        return False
    return True


def _write_back(frame: types.FrameType) -> None:
    """Makes assignments to locals take effect, which Python 3.13 does itself."""
    if sys.version_info < (3, 13):
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
