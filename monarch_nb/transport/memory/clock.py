"""Virtual time: a clock that passes when it is advanced, and the time of a cluster in memory, which passes by the
delay of each frame in flight.
"""

import heapq
import logging
import threading
from collections import deque
from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING

from monarch_nb.transport.protocols import repeat

if TYPE_CHECKING:
    from monarch_nb.transport.memory.network import MemoryNetwork

logger = logging.getLogger(__name__)


class VirtualClock:
    """Time that passes only when it is advanced, in seconds since it began."""

    __slots__ = ("_count", "_due", "now")

    def __init__(self, now: float = 0.0) -> None:
        self.now = now
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._count = count()

    def monotonic(self) -> float:
        """Returns the present time."""
        return self.now

    def later(self, seconds: float, function: Callable[[], object]) -> None:
        """Calls `function` after so many seconds; calls due at one moment keep their order."""
        heapq.heappush(self._due, (self.now + max(0.0, seconds), next(self._count), function))

    def every(self, seconds: float, function: Callable[[], bool]) -> None:
        """Calls `function` every `seconds` while it returns True."""
        repeat(self.later, seconds, function)

    def close(self) -> None:
        """Drops all delayed calls."""
        self._due.clear()

    @property
    def next_due(self) -> float | None:
        """The time of the next delayed call; None without one."""
        return self._due[0][0] if self._due else None

    def advance(self, seconds: float) -> None:
        """Lets time pass, making every delayed call at its time."""
        end = self.now + seconds
        while self._due and self._due[0][0] <= end:
            self.step()
        self.now = end

    def settle(self, limit: float = 3600.0) -> bool:
        """Lets time pass until no call is due, `limit` seconds at most; returns whether none is left."""
        end = self.now + limit
        while self._due and self._due[0][0] <= end:
            self.step()
        return not self._due

    def step(self) -> None:
        """Makes the next delayed call, at its time."""
        when, _, call = heapq.heappop(self._due)
        self.now = max(self.now, when)
        call()


class MemoryTime:
    """Makes due calls, one after the other, on a thread of its own, which is every process's reading thread.

    `lock` is held during access to the network; due calls of the processes are made without it.
    """

    def __init__(self, network: "MemoryNetwork") -> None:
        self.network = network
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)
        self._due: deque[Callable[[], object]] = deque()
        self._until = network.clock.now  # time may pass up to this moment
        self._busy = False
        self._closed = False
        self.deliveries = 0  # number so far
        self._thread = threading.Thread(target=self._run, name="monarch-memory", daemon=True)
        self._thread.start()

    def monotonic(self) -> float:
        """Returns the seconds since the cluster began."""
        return self.network.clock.now

    def call_soon(self, function: Callable[[], object]) -> None:
        """Calls a function on the time's own thread, after the calls due already."""
        with self._changed:
            self._due.append(function)
            self._changed.notify_all()

    def later(self, seconds: float, function: Callable[[], object]) -> None:
        """Calls a function on that thread after so much time."""
        with self._changed:
            self.network.clock.later(seconds, lambda: self._due.append(function))
            self._changed.notify_all()

    def on_its_way(self, seconds: float, function: Callable[[], object]) -> None:
        """As `later`, for messages, which arrive by themselves: time passes up to then by itself."""

        def arrive() -> None:
            self.network.travelling -= 1
            self._due.append(function)

        with self._changed:
            self.network.travelling += 1
            self.network.clock.later(seconds, arrive)
            self._changed.notify_all()

    def changed(self) -> None:
        """Wakes the thread after something was passed to the network."""
        with self._changed:
            self._changed.notify_all()

    def settle(self, seconds: float) -> bool:
        """Blocks until nothing is in flight or due, for so many real seconds at most; returns whether nothing is."""
        with self._changed:
            return self._changed.wait_for(lambda: self._idle, seconds)

    def pass_to(self, when: float) -> None:
        """Lets time pass up to a moment, and makes all calls due until then."""
        with self._changed:
            self._until = max(self._until, when)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._idle or self._closed)
            clock = self.network.clock
            clock.now = max(clock.now, when)

    @property
    def thread_ident(self) -> int:
        """The id of the thread on which all due calls are made."""
        assert self._thread.ident is not None
        return self._thread.ident

    @property
    def next_due(self) -> float | None:
        """The time of the next delayed call."""
        with self.lock:
            return self.network.clock.next_due

    def close(self) -> None:
        """Drops all calls."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(5.0)

    @property
    def _idle(self) -> bool:
        return self._closed or not (self._busy or self._due or self._may_step())

    def _may_step(self) -> bool:
        due = self.network.clock.next_due
        return due is not None and (due <= self._until or self.network.travelling > 0)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                while not self._closed and self._idle:
                    self._changed.notify_all()
                    self._changed.wait()
                if self._closed:
                    return
                if not self._due:
                    self.network.clock.step()
                    self._until = max(self._until, self.network.clock.now)
                    continue
                function = self._due.popleft()
                self._busy = True
                self.deliveries += 1
            try:
                function()
            except BaseException:
                logger.exception("a delivery failed")


class ProcessClock:
    """The same time for one process; `enter` runs a function in the context of this process."""

    def __init__(self, time: MemoryTime, enter: Callable[[Callable[[], object]], object]) -> None:
        self._time, self._enter = time, enter
        self._closed = False

    def monotonic(self) -> float:
        """Returns the seconds since the cluster began."""
        return self._time.monotonic()

    def later(self, seconds: float, function: Callable[[], object]) -> None:
        """Runs `function` once, `seconds` from now."""

        def run() -> None:
            if not self._closed:
                self._enter(function)

        self._time.later(seconds, run)

    def every(self, seconds: float, function: Callable[[], bool]) -> None:
        """Runs `function` every `seconds` while it returns True."""
        repeat(self.later, seconds, function)

    def close(self) -> None:
        """Drops all delayed calls."""
        self._closed = True
