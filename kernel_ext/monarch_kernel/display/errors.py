"""Errors of the engine as the output of a cell: the cell's own lines, the story, and none of the engine's frames."""

import asyncio
import traceback
import types
from pathlib import Path
from typing import Any

import monarch_nb
from monarch_nb.supervision import DeviceMeshError, SupervisionError
from monarch_nb.wire import ActorError

from .failures import ansi, failure_text, title

_OWN = (str(Path(monarch_nb.__file__).parent) + "/", str(Path(__file__).parent.parent) + "/")
SHOWN = (DeviceMeshError, ActorError, KeyboardInterrupt, asyncio.CancelledError)


class Errors:
    """Takes IPython's one place for custom exceptions, and leaves to who was there before what is theirs."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._before: tuple[Any, Any] = (shell.custom_exceptions, getattr(shell, "CustomTB", None))

    def install(self) -> None:
        """From now on these errors are shown our way."""
        self._shell.set_custom_exc((*SHOWN, *self._before[0]), self._show)

    def uninstall(self) -> None:
        """As it was before."""
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
        try:
            lines = self._lines(shell, kind, error, tb, tb_offset)
        except Exception:  # nobody is helped by an error about showing an error
            lines = traceback.format_exception(kind, error, tb)
        shell._showtraceback(kind, error, lines)
        return lines

    def _lines(
        self,
        shell: Any,
        kind: type[BaseException],
        error: BaseException,
        tb: types.TracebackType | None,
        tb_offset: int | None,
    ) -> list[str]:
        if isinstance(error, (KeyboardInterrupt, asyncio.CancelledError)):
            notes = getattr(error, "__notes__", None)
            if not notes:  # not a wait of ours
                return list(shell.InteractiveTB.structured_traceback(kind, error, tb, tb_offset=tb_offset))
            return [f"{ansi('KeyboardInterrupt', 'title')}: {'; '.join(notes)}"]
        # Frames by IPython, for its look and its numbering of cells; with a stand-in, whose message is then replaced.
        stand_in = type(kind.__name__, (Exception,), {"__module__": kind.__module__})
        frames = shell.InteractiveTB.structured_traceback(stand_in, stand_in(), without_own(tb), tb_offset=tb_offset)
        return [*frames[:-1], story(error)]


def without_own(tb: types.TracebackType | None) -> types.TracebackType | None:
    """The traceback without the engine's frames; as it is when there are no others."""
    kept: list[types.TracebackType] = []
    at = tb
    while at is not None:
        if not at.tb_frame.f_code.co_filename.startswith(_OWN):
            kept.append(at)
        at = at.tb_next
    new: types.TracebackType | None = None
    for part in reversed(kept):
        new = types.TracebackType(new, part.tb_frame, part.tb_lasti, part.tb_lineno)
    return new or tb


def story(error: BaseException) -> str:
    """What happened, to be read last and alone."""
    name = ansi(type(error).__name__, "title")
    if isinstance(error, ActorError):
        return f"{name}: {error}".rstrip()
    failure = error.failure if isinstance(error, SupervisionError) else None
    if failure is None:
        return f"{name}: {error}"
    called = f"{error.endpoint} cannot be answered: " if getattr(error, "endpoint", None) else ""
    return f"{name}: {called}{title(failure)}\n\n{failure_text(failure, ansi)}"
