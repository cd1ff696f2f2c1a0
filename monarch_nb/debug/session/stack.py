"""The stack of a stopped thread: frames of the user with source, variables, expressions and statements."""

import contextlib
import ctypes
import linecache
import os
import sys
import threading
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TextIO

from monarch_nb.debug.records import Frame
from monarch_nb.wire import is_users_file

_ENGINE = tuple(
    f"monarch_nb.{package}"
    for package in (
        "runtime",
        "supervision",
        "mesh",
        "lifecycle",
        "connect",
        "logs",
        "code",
        "host",
        "debug",
        "engine",
        "tensor",
    )
)
_PLUMBING = ("asyncio", "threading", "contextlib", "concurrent", "selectors", "runpy", "weakref", "bdb", "pdb")
AROUND = 5  # lines of source on either side
FILE = "<mdb>"  # file name of typed code

Entry = tuple[types.FrameType, int]

_redirect_lock = threading.Lock()


def _within(frame: types.FrameType, packages: Sequence[str]) -> bool:
    module = frame.f_globals.get("__name__") or ""
    return any(module == package or module.startswith(package + ".") for package in packages)


def is_engine(frame: types.FrameType) -> bool:
    """Returns whether a frame is one of the library."""
    return _within(frame, _ENGINE)


def is_users(frame: types.FrameType) -> bool:
    """Returns whether a frame is one of the user's code, neither of this library nor of an installed one."""
    return not is_engine(frame) and is_users_file(frame.f_code.co_filename)


def users_part(frame: types.FrameType | None, tb: types.TracebackType | None) -> tuple[list[Entry], int]:
    """The user's part of the stack of a frame, with the frames that an exception has passed below it, and the index of
    the entry to select: the frame itself, or the innermost one of the exception.
    """
    stack = walk(frame)
    entry = tb.tb_next if tb is not None and tb.tb_frame is frame else tb
    selected = len(stack) - 1
    while entry is not None:
        stack.append((entry.tb_frame, entry.tb_lineno))
        entry = entry.tb_next
    first = own_part(stack)
    if frame is None or selected < first:
        selected = len(stack) - 1
    return stack[first:], max(0, selected - first)


def own_part(stack: Sequence[Entry]) -> int:
    """Index in a stack (outermost first) at which the user's part begins; 0 if it has none."""
    first = 0
    for number, (frame, _) in enumerate(stack):
        if is_engine(frame):
            first = number + 1
    while first < len(stack) and _within(stack[first][0], _PLUMBING):
        first += 1
    return first if first < len(stack) else 0


def called_part(stack: Sequence[Entry]) -> Sequence[Entry]:
    """Returns the user's part of the stack of a running thread, without the call into this library that it is in."""
    foreign = [index for index, (frame, _) in enumerate(stack) if not _within(frame, ("monarch_nb", *_PLUMBING))]
    last = max((index for index in foreign if is_users(stack[index][0])), default=max(foreign, default=None))
    if last is None:
        return ()
    end = last + 1
    while end < len(stack) and not _within(stack[end][0], ("monarch_nb",)):
        end += 1
    return stack[own_part(stack[:end]) : end]


def bottom_of(frame: types.FrameType) -> types.FrameType:
    """Returns the outermost frame of the user's code that `frame` runs in: usually the endpoint itself."""
    bottom, outer = frame, frame.f_back
    while outer is not None and not is_engine(outer):
        if not _within(outer, _PLUMBING):
            bottom = outer
        outer = outer.f_back
    return bottom


def runs_for_user(frame: types.FrameType) -> bool:
    """Returns whether the user's code has called a frame, also through a library, but not the event loop."""
    outer: types.FrameType | None = frame
    while outer is not None and not is_engine(outer):
        if not _within(outer, _PLUMBING):
            return True
        outer = outer.f_back
    return False


def walk(frame: types.FrameType | None) -> list[Entry]:
    """Returns the stack of a frame, outermost first."""
    stack = []
    while frame is not None:
        stack.append((frame, frame.f_lineno or frame.f_code.co_firstlineno))
        frame = frame.f_back
    return stack[::-1]


def frames(stack: Sequence[Entry]) -> tuple[Frame, ...]:
    """Returns a stack as plain data."""
    return tuple(
        Frame(
            frame.f_code.co_filename,
            line,
            frame.f_code.co_qualname if hasattr(frame.f_code, "co_qualname") else frame.f_code.co_name,
            linecache.getline(frame.f_code.co_filename, line, frame.f_globals).strip(),
        )
        for frame, line in stack
    )


def around(frame: types.FrameType, line: int, *, span: int = AROUND) -> tuple[tuple[str, ...], int]:
    """Returns the lines of source around one, and the number of the first of them."""
    lines = linecache.getlines(frame.f_code.co_filename, frame.f_globals)
    first = max(1, line - span)
    return tuple(text.rstrip("\n") for text in lines[first - 1 : line + span]), first


_checked: dict[tuple[str, float, types.CodeType], bool] = {}


def has_changed(code: types.CodeType) -> bool:
    """Returns whether the file of a code object has changed: its displayed lines may be wrong."""
    try:
        modified = os.stat(code.co_filename).st_mtime
    except OSError:  # a cell, whose source was sent with it
        return False
    key = (code.co_filename, modified, code)
    changed = _checked.get(key)
    if changed is None:
        if len(_checked) > 256:
            _checked.clear()
        changed = _checked[key] = not _still_there(code)
    return changed


def _still_there(code: types.CodeType) -> bool:
    try:
        with open(code.co_filename, "rb") as file:
            codes: list[types.CodeType] = [compile(file.read(), code.co_filename, "exec", dont_inherit=True)]
    except (OSError, SyntaxError, ValueError):
        return False
    while codes:
        candidate = codes.pop()
        same = (candidate.co_name, candidate.co_firstlineno) == (code.co_name, code.co_firstlineno)
        if same and _parts(candidate) == _parts(code):
            return True
        codes += [const for const in candidate.co_consts if isinstance(const, types.CodeType)]
    return False


def _parts(code: types.CodeType) -> tuple[object, ...]:
    plain = [const for const in code.co_consts if not isinstance(const, types.CodeType)]
    # As texts, since 1 equals True.
    texts = [sorted(map(repr, const)) if isinstance(const, frozenset) else repr(const) for const in plain]
    return code.co_code, code.co_names, code.co_varnames, texts


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

    def __init__(self, entries: Sequence[Entry], out: TextIO) -> None:
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
