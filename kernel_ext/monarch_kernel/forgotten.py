"""Errors of calls whose `.get()` was forgotten, shown in the cell that runs, or in the last one that did."""

from collections.abc import Callable
from typing import Any

from monarch_nb.runtime import Future, unretrieved

from .display.errors import story
from .front import Front
from .namespace import is_hidden


class Forgotten:
    """Tells of them from any thread; also of those whose future only IPython keeps, as an output."""

    def __init__(self, shell: Any, front: Front, flush: Callable[[], None]) -> None:
        self._shell = shell
        self._front = front
        self._flush = flush  # what was printed before comes before
        self._before = unretrieved.report

    def install(self) -> None:
        """From now on they are shown."""
        unretrieved.report = self._tell
        self._shell.events.register("post_run_cell", self._ran)

    def uninstall(self) -> None:
        """As it was before."""
        if unretrieved.report == self._tell:
            unretrieved.report = self._before
        self._shell.events.unregister("post_run_cell", self._ran)

    def _tell(self, error: BaseException, count: int) -> None:
        self._flush()
        more = f", nor for {count - 1} more that failed like it" if count > 1 else ""
        told = f"Nobody waited for this call{more}: `.get()` is missing.\n{story(error, self._shell)}\n"
        self._front.write(told, "stderr")

    def _ran(self, result: Any) -> None:
        shown = getattr(result, "result", None)
        if isinstance(shown, Future) and not shown.done():
            unretrieved.watch(shown, lambda: self._is_kept(shown))

    def _is_kept(self, future: Future[Any]) -> bool:
        """Whether a variable of the user refers to it, itself or in a collection."""
        for name, value in tuple(self._shell.user_ns.items()):
            if is_hidden(self._shell, name):
                continue
            if value is future:
                return True
            inside = value.values() if isinstance(value, dict) else value
            if isinstance(value, (list, tuple, set, frozenset, dict)) and any(one is future for one in tuple(inside)):
                return True
        return False
