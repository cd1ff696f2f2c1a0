"""What of an actor's thread an interrupt may break off, and how that is done."""

import contextlib
import signal
import threading
import time
from collections.abc import Iterator

from monarch_nb.runtime.actors.sleeping import wake
from monarch_nb.transport import AGAIN_S, Clock, take_back, throw_into

__all__ = ["Exposure"]

STRIKES_APART = 0.2  # seconds; an interrupt that comes sooner is the one before, which may not have arrived yet


class Exposure:
    """Whether a thread is in an endpoint, or in `__init__`: nothing else of it is ever interrupted.

    `begin` and `end` are called on that thread, `strike` on any other.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._exposed = False
        self._thrown = False  # an interrupt is on its way
        self._struck_at = float("-inf")  # when what runs was interrupted last

    def begin(self) -> None:
        """From now on an interrupt hits what runs."""
        self._exposed = True

    def end(self) -> None:
        """The endpoint is over: an interrupt that comes now is too late, and must not cut off the answer."""
        while self._exposed:
            try:
                with self._lock:
                    self._exposed = False
                    self._struck_at = float("-inf")
                    if self._thrown:
                        self._thrown = False
                        take_back()
            except KeyboardInterrupt:
                continue

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """What runs inside of it is what an interrupt hits."""
        try:
            self.begin()
            yield
        finally:
            self.end()

    def strike(self, thread: threading.Thread) -> None:
        """Raises KeyboardInterrupt in what runs, as soon as that is where an exception may end it. Does not block."""
        with self._lock:
            if not self._exposed or time.monotonic() - self._struck_at < STRIKES_APART:
                return
            struck_at = self._struck_at = time.monotonic()
            if thread is threading.main_thread():
                # To the thread itself: a signal to the process may be taken by any, and wakes only the one that does.
                signal.pthread_kill(thread.ident or 0, signal.SIGINT)
                return
        if self._throw(thread.ident or 0, struck_at):
            self._clock.every(AGAIN_S, lambda: self._throw(thread.ident or 0, struck_at))

    def _throw(self, thread: int, struck_at: float) -> bool:
        """Whether it is to be tried again."""
        with self._lock:
            if not self._exposed or self._struck_at != struck_at:
                return False
            self._thrown = throw_into(thread, KeyboardInterrupt)
            if not self._thrown:
                return True
        wake(thread)
        return False
