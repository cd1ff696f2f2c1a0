"""%notify: front ends are notified when a cell that takes long, or a call, has ended or failed."""

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import line_magic, magics_class

from monarch_nb.runtime import Future, when_done
from monarch_nb.settings import DurationError, format_duration, parse_duration
from monarch_nb.wire import error_line

from .session import Session, SessionMagics

LONG_S = 60.0  # from which on the end of a cell is always reported


@magics_class
class NotifyMagics(SessionMagics):
    """%notify."""

    def __init__(self, shell: InteractiveShell, session: Session, announce: Callable[[dict[str, Any]], None]) -> None:
        """`announce` sends a message to all pages with the panel, from any thread."""
        super().__init__(shell, session)
        self._announce = announce
        self._threshold_s: float | None = None  # duration from which on cell ends are shown on the desktop
        self._began = time.monotonic()

    def install(self) -> None:
        """Times the cells from now on."""
        self.shell.events.register("pre_run_cell", self._on_cell_begin)
        self.shell.events.register("post_run_cell", self._on_cell_end)

    def uninstall(self) -> None:
        """Times them no longer."""
        self.shell.events.unregister("pre_run_cell", self._on_cell_begin)
        self.shell.events.unregister("post_run_cell", self._on_cell_end)

    @line_magic
    def notify(self, line: str) -> None:
        """Have the desktop show when a cell that takes long, or a call, has ended or failed.

        %notify            # cells of more than a minute, from this one on
        %notify 10m        # of more than ten minutes
        %notify losses     # once, when the call of this future has ended
        %notify off

        The notification comes from the page: JupyterLab with the panel, which asks for the permission once. Its status
        bar, and the title of the browser's tab, show the ends of cells of more than a minute also without %notify.
        """
        word = line.strip()
        if word == "off":
            self._threshold_s = None
            self._say("notifications are off")
            return
        future = self.shell.user_ns.get(word)
        if isinstance(future, Future):
            began = time.monotonic()
            when_done(future, lambda done: threading.Thread(target=self._call_ended, args=(word, began, done)).start())
            self._say(f"the end of {word} will be notified")
        else:
            nanoseconds = _duration(word)
            self._threshold_s = nanoseconds / 1e9
            self._say(f"cells of more than {format_duration(nanoseconds)} will be notified; %notify off ends that")
        self._announce({"type": "notify"})

    @staticmethod
    def _say(text: str) -> None:
        sys.stdout.write(f"{text}\n")

    def _on_cell_begin(self, info: object) -> None:
        self._began = time.monotonic()

    def _on_cell_end(self, result: Any) -> None:
        seconds = time.monotonic() - self._began
        requested = self._threshold_s is not None and seconds >= self._threshold_s
        error = result.error_before_exec or result.error_in_exec
        if (requested or seconds >= LONG_S) and not isinstance(error, KeyboardInterrupt):  # its user is at the page
            self._announce_end(f"In[{result.execution_count}]", self._began, error, requested=requested)

    def _call_ended(self, label: str, began: float, future: Future[object]) -> None:
        """On its own thread: the first access to an error decodes it."""
        self._announce_end(label, began, future.exception(0), requested=True)

    def _announce_end(self, label: str, began: float, error: BaseException | None, *, requested: bool) -> None:
        message = {"type": "ended", "what": label, "seconds": time.monotonic() - began, "asked": requested}
        self._announce({**message, "error": error_line(error) if error is not None else ""})


def _duration(word: str) -> int:
    try:
        return parse_duration(word or LONG_S)
    except DurationError:
        raise UsageError(
            f"%notify: {word!r} is no duration and no future: write %notify 10m, or the name of a future"
        ) from None
