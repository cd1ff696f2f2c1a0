"""A limit on how long Python code may think."""

import threading
from types import TracebackType

from monarch_nb.transport import take_back, throw_into

__all__ = ["Deadline", "TookTooLong"]


class TookTooLong(Exception):
    """The time was up."""


class Deadline:
    """Raises TookTooLong in the thread that entered it, once `seconds` have gone by there.

    It reaches Python code between two of its instructions; a call into C is left to end first. Code that C has called
    may have it and not hand it on: what was done within is not to be trusted then, and it is raised at the end.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._thread = 0
        self._raised = False

    def __enter__(self) -> None:
        self._thread = threading.get_ident()
        self._timer = threading.Timer(self._seconds, self._end)
        self._timer.daemon = True
        self._timer.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        with self._lock:
            self._thread = 0
            if self._raised and kind is not TookTooLong:  # on its way still: it must not arrive later
                take_back()
        if self._raised and kind is not TookTooLong and (kind is None or issubclass(kind, Exception)):
            raise TookTooLong from error

    def _end(self) -> None:
        with self._lock:
            if self._thread:
                self._raised = throw_into(self._thread, TookTooLong)
