"""Errors of calls whose `.get()` was forgotten, shown in the cell that runs, or in the last one that did."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from monarch_nb.runtime import Future, unretrieved

from .display.errors import error_text
from .front import Front
from .namespace import is_hidden

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


class UnretrievedErrors:
    """Reports such errors from any thread; also those of futures that IPython alone keeps, as an output."""

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
