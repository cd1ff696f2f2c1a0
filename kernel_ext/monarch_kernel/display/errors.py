"""Output of a cell for errors of the library and of calls: the cell's own lines and the error, without the library's
frames. `%tb` shows these, and so does a cell after `%xmode Verbose`. Errors of calls whose `.get()` was forgotten are
shown in the cell that runs, or in the last one that did.
"""

import asyncio
import contextlib
import linecache
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import IPython
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from monarch_nb.debug.records import DebugError, StoppedAtBreakpoint
from monarch_nb.runtime import Future, started, unretrieved
from monarch_nb.shape import places_of
from monarch_nb.store.failures import text
from monarch_nb.supervision import DeviceMeshError, MeshFailure, SupervisionError
from monarch_nb.wire import (
    ENGINE,
    ActorError,
    At,
    RemoteException,
    format_exception,
    harmless,
    is_mistake,
    text_of,
    without_engine,
)

from ..front import Front
from ..jupyter import last_lines, show_error, with_cells
from ..namespace import is_hidden
from .failures import FailureNotice, ansi, raised_title

_OWN = (ENGINE, f"{Path(__file__).parents[1]}/")
# The way through IPython to a magic, which old versions show.
_THROUGH = (f"{Path(IPython.__file__).parent}/", str(getattr(sys.modules.get("decorator"), "__file__", "decorator")))
_OURS = (DeviceMeshError, ActorError, StoppedAtBreakpoint, DebugError)
_SHOWN = (Exception, KeyboardInterrupt, asyncio.CancelledError)
_LINKS = 100  # errors behind an error; some are behind themselves
_CELL = "_monarch_cell"  # attribute of a SyntaxError in a cell that was to run on the ranks


class Errors:
    """IPython's custom exception handler. Exceptions that another handler was set for still go there."""

    def __init__(
        self,
        shell: InteractiveShell,
        notice_of: Callable[[MeshFailure], FailureNotice],
        announce: Callable[[FailureNotice], None],
        raised: Callable[[ActorError], None],
        stopped: Callable[[Future[Any]], str],
    ) -> None:
        self._shell: Any = shell  # its hooks have no types
        self._stopped = stopped  # describes what happened to an awaited call, where that is known
        self._notice_of = notice_of  # the notice for the failure behind an error
        self._announce = announce  # called before the text of such an error
        self._raised = raised  # called before the text of what an endpoint raised
        self._before: tuple[Any, Any] = (shell.custom_exceptions, getattr(shell, "CustomTB", None))

    def install(self) -> None:
        """Registers the handler."""
        self._shell.set_custom_exc((*_SHOWN, *self._before[0]), self._show)

    def uninstall(self) -> None:
        """Restores the handler that was set before."""
        types_before, handler = self._before
        self._shell.set_custom_exc((), None)
        self._shell.custom_exceptions, self._shell.CustomTB = types_before, handler

    def _show(
        self,
        shell: Any,
        kind: type[BaseException],
        error: BaseException,
        tb: types.TracebackType | None,
        tb_offset: int | None = None,
    ) -> list[str]:
        if self._before[0] and isinstance(error, self._before[0]):
            return list(self._before[1](kind, error, tb, tb_offset=tb_offset) or [])
        sys.last_type, sys.last_value, sys.last_traceback = kind, error, tb  # for %debug and %mpm
        try:
            if isinstance(error, (KeyboardInterrupt, asyncio.CancelledError)):
                text = fate(error, tb, self._stopped)
                if text:
                    stop = KeyboardInterrupt(text)
                    error.args = stop.args  # what headless runners quote
                    lines = [f"{ansi('KeyboardInterrupt', 'title')}: {text}"]
                    show_error(shell, KeyboardInterrupt, stop, lines)
                    return lines
            if isinstance(error, SyntaxError) and hasattr(error, _CELL):
                lines = list(shell.SyntaxTB.structured_traceback(kind, error, []))
            elif isinstance(error, SupervisionError) and error.failure is not None:
                notice = self._notice_of(error.failure)
                error.args = (notice.record["report"],)  # of all ranks: what headless runners quote
                lines = self._lines(shell, kind, error, tb, notice)
                self._announce(notice)
            elif isinstance(error, _OURS):
                lines = self._lines(shell, kind, error, tb)
            elif self._folds(shell, error, tb):
                lines = shell.InteractiveTB.structured_traceback(*_folded(error, tb), tb_offset=0)
            else:
                shell.showtraceback((kind, error, tb), tb_offset=tb_offset, running_compiled_code=True)
                return last_lines(shell)
            if isinstance(error, ActorError) and error.origin is not None:
                self._raised(error)
        except Exception:  # an error while showing an error must not hide it
            lines = format_exception(error)
        lines = [harmless(line) for line in lines]
        show_error(shell, kind, error, lines)
        return lines

    @staticmethod
    def _folds(shell: InteractiveShell, error: BaseException, tb: types.TracebackType | None) -> bool:
        """Returns whether an error is one of other code that is shown without the library's frames."""
        if isinstance(error, (SyntaxError, UsageError)) or shell.InteractiveTB.mode == "Verbose":
            return False
        return isinstance(error, KeyboardInterrupt) or is_mistake(_frames(tb), _OWN)

    @staticmethod
    def _lines(
        shell: InteractiveShell,
        kind: type[BaseException],
        error: BaseException,
        tb: types.TracebackType | None,
        notice: FailureNotice | None = None,
    ) -> list[str]:
        # Frames by IPython, for its look and its numbering of cells; with a stand-in, whose message is then replaced.
        # With tb_offset=0, since the frames of IPython, which old versions skip by number, are already removed.
        stand_in = type(kind.__name__, (Exception,), {"__module__": kind.__module__})
        frames = shell.InteractiveTB.structured_traceback(stand_in, stand_in(), without_own(tb), tb_offset=0)
        return [*frames[:-1], error_text(error, shell, notice)]


@contextlib.contextmanager
def cell_syntax() -> Iterator[None]:
    """Marks a SyntaxError raised inside as one of a cell for the ranks: only its own line is shown."""
    try:
        yield
    except SyntaxError as error:
        setattr(error, _CELL, True)
        if (error.text or "").lstrip().startswith(("%", "!")):
            error.msg = f"{error.msg}: ranks run Python alone, without magics and !commands (subprocess.run runs those)"
        raise


def fate(
    error: BaseException, tb: types.TracebackType | None, stopped: Callable[[Future[Any]], str] = lambda future: ""
) -> str:
    """State of a call whose wait was interrupted; "" if the error did not interrupt one."""
    if isinstance(error.__cause__, KeyboardInterrupt):  # the waiter described it
        return text_of(error)
    notes = getattr(error, "__notes__", None)
    if notes:
        return "; ".join(map(text_of, notes))
    for frame, _ in traceback.walk_tb(tb):
        if frame.f_code is Future.__await__.__code__:
            future: Future[object] = frame.f_locals["self"]
            return stopped(future) or f"stopped waiting; {future.progress_text() or 'it goes on'}"
    return ""


def without_own(tb: types.TracebackType | None) -> types.TracebackType | None:
    """Returns the traceback without the library's frames; unchanged when there are no others."""
    parts = _parts(tb)
    new: types.TracebackType | None = None
    for index in reversed(without_engine(_frames(tb), _OWN, _THROUGH)):
        part = parts[index]
        new = types.TracebackType(new, part.tb_frame, part.tb_lasti, part.tb_lineno)
    return new or tb


def _parts(tb: types.TracebackType | None) -> list[types.TracebackType]:
    parts = []
    while tb is not None:
        parts.append(tb)
        tb = tb.tb_next
    return parts


def _frames(tb: types.TracebackType | None) -> list[At]:
    return [
        At(file, linecache.getline(file, part.tb_lineno).strip() if file.startswith(_OWN) else "")
        for part in _parts(tb)
        for file in [part.tb_frame.f_code.co_filename]
    ]


def _linked(error: BaseException) -> BaseException | None:
    return error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _likeness(error: BaseException) -> tuple[object, ...]:
    """Returns a key that is equal for errors with the same type, text and location."""
    last = _parts(error.__traceback__)[-1:]
    return type(error), text_of(error), *((part.tb_frame.f_code, part.tb_lineno) for part in last)


def _folded(
    error: BaseException, tb: types.TracebackType | None, visited: frozenset[object] = frozenset()
) -> tuple[type[BaseException], BaseException, types.TracebackType | None]:
    """The arguments for IPython: a stand-in with the error's name and text, without the library's frames and without
    causes that were caught inside the library."""
    text = text_of(error)
    kind = type(type(error).__name__, (Exception,), {"__module__": type(error).__module__, "__str__": lambda _: text})
    stand_in = kind()
    for note in getattr(error, "__notes__", ()):
        stand_in.add_note(text_of(note))
    stand_in.__traceback__ = without_own(tb)
    linked, visited, links = _linked(error), visited | {_likeness(error)}, 0
    while linked is not None and _likeness(linked) in visited and links < _LINKS:  # the library has tried a second time
        linked, links = _linked(linked), links + 1
    if linked is not None and links < _LINKS and without_engine(_frames(linked.__traceback__), _OWN, _THROUGH):
        cause = _folded(linked, linked.__traceback__, visited)[1]
        stand_in.__cause__, stand_in.__context__ = cause if error.__cause__ else None, cause
        stand_in.__suppress_context__ = error.__cause__ is not None
    return kind, stand_in, stand_in.__traceback__


def error_text(error: BaseException, shell: InteractiveShell, notice: FailureNotice | None = None) -> str:
    """Returns the text of an error for display last and alone."""
    name = ansi(type(error).__name__, "title")
    if isinstance(error, ActorError):
        return f"{name}: {_actor_error(error, shell)}"
    if not isinstance(error, SupervisionError) or notice is None:
        return f"{name}: {text_of(error)}"
    called = f"{error.endpoint} cannot be answered: " if error.endpoint else ""
    notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
    return f"{name}: {called}{notice.record['title']}\n{notes}\n{text(notice.record, ansi, brief=notice.brief)}"


def _actor_error(error: ActorError, shell: InteractiveShell) -> str:
    raised: Any = error.exception
    kind = raised.type_name if issubclass(type(raised), RemoteException) else type(raised).__name__
    first = next(iter(text_of(raised).strip().splitlines()), "")
    remote = error.exception_formatted.rstrip()
    heading = f"On {_first_rank(error) or 'the rank'} (most recent call last):"
    remote = with_cells(shell, remote).replace("Traceback (most recent call last):", heading, 1)
    kinds = error.summary.partition("\n")[2]  # the kinds of errors, where they differ
    head = f"{raised_title(error)}\n{kinds}" if kinds else f"{raised_title(error)}: {kind}{': ' * bool(first)}{first}"
    frames = "\n\n%mpm opens its frames in the debugger" if error.origin is not None else ""
    return f"{head}\n\n{remote}{frames}"


def _first_rank(error: ActorError) -> str:
    """Returns the rank whose exception is shown."""
    runtime = started()
    state = runtime.meshes.get(error.origin[0]) if error.origin and runtime is not None else None
    return "" if state is None or error.origin is None else places_of(state.region, [error.origin[1]])


class UnretrievedErrors:
    """Reports errors of calls whose `.get()` was forgotten, from any thread.

    Also those of futures that IPython alone keeps, as an output.
    """

    def __init__(self, shell: "InteractiveShell", front: Front, flush: Callable[[], None]) -> None:
        self._shell = shell
        self._front = front
        self._flush = flush  # shows earlier output first
        self._before = unretrieved.report

    def install(self) -> None:
        """Starts reporting."""
        unretrieved.report = self._report
        self._shell.events.register("post_run_cell", self._on_cell_end)

    def uninstall(self) -> None:
        """Restores the reporter that was set before."""
        if unretrieved.report == self._report:
            unretrieved.report = self._before
        self._shell.events.unregister("post_run_cell", self._on_cell_end)

    def _report(self, error: BaseException, count: int) -> None:
        self._flush()
        more = f", nor for {count - 1} more that failed like it" if count > 1 else ""
        problem, advice = unretrieved.missing_of(error)
        text = f"{problem}{more}: {advice}.\n{error_text(error, self._shell)}\n"
        self._front.write(text, "stderr")

    def _on_cell_end(self, result: Any) -> None:
        shown = getattr(result, "result", None)
        if isinstance(shown, Future) and not shown.done():
            unretrieved.watch(shown, lambda: self._is_kept(shown))

    def _is_kept(self, future: Future[object]) -> bool:
        """Returns whether a variable of the user refers to the future, itself or in a collection."""
        for name, value in tuple(self._shell.user_ns.items()):
            if is_hidden(self._shell, name):
                continue
            if value is future:
                return True
            inside = value.values() if isinstance(value, dict) else value
            if isinstance(value, (list, tuple, set, frozenset, dict)) and any(item is future for item in tuple(inside)):
                return True
        return False
