"""A `time.sleep` that an interrupt ends, also on a thread that runs a sync actor.

Python runs signal handlers on the main thread alone, and all other threads resume their sleep: neither a signal nor an
exception thrown into a thread ends the C function there.
"""

import contextlib
import signal
import threading
import time
from typing import Any

_c_sleep = time.sleep
_LONGEST = threading.TIMEOUT_MAX
_WAKES: signal.Signals | None = getattr(signal, "SIGURG", None)  # ignored by default, and by nearly everybody
_wakers: dict[int, threading.Lock] = {}  # by thread of a sync actor; locked until it must wake up


def enter() -> None:
    """Notes that the calling thread runs a sync actor."""
    waker = _wakers[threading.get_ident()] = threading.Lock()
    waker.acquire()


def leave() -> None:
    """Notes that the calling thread runs no sync actor any more."""
    _wakers.pop(threading.get_ident(), None)


def wake(thread: int) -> None:
    """Ends a sleep of that thread (its ident), and C code that gives up at a signal.

    Most of Python's own blocking calls resume after a signal: those are not woken.
    """
    waker = _wakers.get(thread)
    if waker is None:
        return
    with contextlib.suppress(RuntimeError):  # it was woken already
        waker.release()
    if _WAKES is not None and callable(signal.getsignal(_WAKES)):  # else it would not interrupt anything
        signal.pthread_kill(thread, _WAKES)


def sleep(seconds: Any, /) -> None:
    """Delays execution for a number of seconds, which may be a fraction."""
    waker = _wakers.get(threading.get_ident())
    if waker is None or type(seconds) not in (int, float) or not 0 < seconds < _LONGEST:
        _c_sleep(seconds)
        return
    until = time.monotonic() + seconds
    while (remaining := until - time.monotonic()) > 0:
        waker.acquire(timeout=remaining)  # exceptions that woke it are raised here


def install() -> None:
    """Replaces `time.sleep` by `sleep`, in a process that was started to hold actors. On the main thread."""
    sleep.__module__ = "time"  # it is pickled by that name
    time.sleep = sleep
    if _WAKES is not None and signal.getsignal(_WAKES) is signal.SIG_DFL:
        signal.signal(_WAKES, lambda number, frame: None)
        signal.siginterrupt(_WAKES, True)
