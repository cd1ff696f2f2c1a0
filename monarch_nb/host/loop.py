"""The agent's one selector loop: descriptors, timers, and calls handed over by other threads."""

import heapq
import itertools
import logging
import selectors
import signal
import socket
import time
from collections import deque
from collections.abc import Callable

log = logging.getLogger(__name__)

LONGEST_WAIT_S = 3600.0  # at a time: poll(2) and epoll(7) refuse more than 24 days
READ = selectors.EVENT_READ
WRITE = selectors.EVENT_WRITE


class Timer:
    """A call at a time; `cancel()` before it happens."""

    __slots__ = ("callback", "when")

    def __init__(self, when: float, callback: Callable[[], None]) -> None:
        self.when = when
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        """Prevents the call."""
        self.callback = None


class Loop:
    """Runs callbacks one at a time on the thread that calls `run()`. Only `post` may be called from other threads."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, int, Timer]] = []
        self._numbers = itertools.count()
        self._posted: deque[Callable[[], None]] = deque()
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._running = False
        self._signalled: Callable[[], None] | None = None
        self._child = False
        self.register(self._wake_read.fileno(), READ, self._woken)

    def register(self, fd: int, events: int, callback: Callable[[int], None]) -> None:
        """Calls `callback(events)` whenever `fd` is ready."""
        self._selector.register(fd, events, callback)

    def modify(self, fd: int, events: int, callback: Callable[[int], None]) -> None:
        """Changes the events that a registered `fd` waits for."""
        self._selector.modify(fd, events, callback)

    def unregister(self, fd: int) -> None:
        """Stops listening to `fd`; call before closing it. Unknown descriptors are ignored."""
        try:
            self._selector.unregister(fd)
        except (KeyError, ValueError):
            pass

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Timer:
        """Calls once, `seconds` from now."""
        timer = Timer(time.monotonic() + seconds, callback)
        heapq.heappush(self._timers, (timer.when, next(self._numbers), timer))
        return timer

    def post(self, callback: Callable[[], None]) -> None:
        """Calls soon on the loop's thread. From any thread; never blocks."""
        self._posted.append(callback)
        try:
            self._wake_write.send(b"\0")
        except (BlockingIOError, OSError):
            pass  # a full pipe wakes just as well

    def on_child_signal(self, callback: Callable[[], None]) -> None:
        """Calls soon after any SIGCHLD. Only on the main thread."""
        self._signalled = callback
        signal.signal(signal.SIGCHLD, self._on_child)
        signal.set_wakeup_fd(self._wake_write.fileno(), warn_on_full_buffer=False)

    def _on_child(self, *_: object) -> None:
        self._child = True  # the wake-up byte may have found no room

    def run(self) -> None:
        """Works until `stop()`."""
        self._running = True
        while self._running:
            for key, events in self._selector.select(self._patience()):
                self._call(key.data, events)
            self._run_timers()

    def stop(self) -> None:
        """Makes `run()` return once the present callback is done."""
        self._running = False

    def _patience(self) -> float | None:
        if self._posted:
            return 0.0
        while self._timers and self._timers[0][2].callback is None:
            heapq.heappop(self._timers)
        return min(max(0.0, self._timers[0][0] - time.monotonic()), LONGEST_WAIT_S) if self._timers else None

    def _run_timers(self) -> None:
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            callback = heapq.heappop(self._timers)[2].callback
            if callback is not None:
                self._call(callback)

    def _woken(self, _events: int) -> None:
        child = False
        try:
            while data := self._wake_read.recv(4096):
                child = child or signal.SIGCHLD in data
        except BlockingIOError:
            pass
        while self._posted:
            self._call(self._posted.popleft())
        if self._signalled is not None and (child or self._child):
            self._child = False
            self._call(self._signalled)

    def _call(self, callback: Callable[..., None], *args: object) -> None:
        try:
            callback(*args)
        except Exception:  # one broken request must not take the host down
            log.exception("in the agent's loop")
