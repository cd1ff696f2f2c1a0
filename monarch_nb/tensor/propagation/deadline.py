"""A limit on how long Python code may think."""

import ctypes
import threading
from types import TracebackType

__all__ = ["Deadline", "TookTooLong"]


class TookTooLong(Exception):
    """The time was up."""


class Deadline:
    """Raises TookTooLong in the thread that entered it, once `seconds` have gone by there.

    It reaches Python code between two of its instructions; a call into C is left to end first.
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
            if self._raised and kind is not TookTooLong:  # on its way still: it must not arrive later
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), None)
            self._thread = 0

    def _end(self) -> None:
        with self._lock:
            if self._thread:
                self._raised = True
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), ctypes.py_object(TookTooLong))
