"""Whether the page whose debugger has stopped ranks is still there: it says so at intervals while they stand."""

import threading
import time
from collections.abc import Callable

from monarch_nb.settings import settings


class Presence:
    """Pages that never say so, as those without the extension of JupyterLab, are taken to be there."""

    def __init__(self, holds: Callable[[], bool], gone: Callable[[float], None]) -> None:
        """`holds()` says whether anything stands for the page; `gone(seconds)` is called, on a thread, when it has
        been silent for that long meanwhile.
        """
        self._holds = holds
        self._gone = gone
        self._heard = 0.0
        self._changed = threading.Condition()
        self._watched = False

    def beat(self) -> float:
        """The page is there. Gives the seconds within which it has to say so again."""
        with self._changed:
            self._heard = time.monotonic()
            if not self._watched:
                self._watched = True
                threading.Thread(target=self._watch, name="monarch-dap-presence", daemon=True).start()
        return settings.debug_page_lease

    def heard(self) -> None:
        """The page has asked for something."""
        self._heard = time.monotonic()

    def forget(self) -> None:
        """Nobody is waited for."""
        with self._changed:
            self._watched = False
            self._changed.notify_all()

    def _watch(self) -> None:
        with self._changed:
            while self._watched and self._holds():
                silent = time.monotonic() - self._heard
                if silent >= settings.debug_page_lease:
                    break
                self._changed.wait(settings.debug_page_lease - silent)
            else:  # it is heard again before anything stands for it
                self._watched = False
                return
            self._watched = False
        self._gone(silent)
