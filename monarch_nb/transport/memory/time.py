"""The time of a cluster in memory: it passes when it is advanced, and by the delay of each frame that travels."""

import logging
import threading
from collections import deque
from collections.abc import Callable

from monarch_nb.transport.clock import repeat
from monarch_nb.transport.memory.network import MemoryNetwork

logger = logging.getLogger(__name__)


class MemoryTime:
    """Delivers what is due, one after the other, on a thread of its own, which is every process's reading thread.

    `lock` is held by whoever touches the network; what is due for the processes is called without it.
    """

    def __init__(self, network: MemoryNetwork) -> None:
        self.network = network
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)
        self._due: deque[Callable[[], object]] = deque()
        self._until = network.clock.now  # time may pass up to there
        self._busy = False
        self._closed = False
        self.deliveries = 0  # so far
        self._thread = threading.Thread(target=self._run, name="monarch-memory", daemon=True)
        self._thread.start()

    def monotonic(self) -> float:
        """Seconds since the cluster began."""
        return self.network.clock.now

    def call_soon(self, function: Callable[[], object]) -> None:
        """Call it on the time's own thread, after what is due already."""
        with self._changed:
            self._due.append(function)
            self._changed.notify_all()

    def later(self, seconds: float, function: Callable[[], object]) -> None:
        """Call it there when so much time has passed."""
        with self._changed:
            self.network.clock.later(seconds, lambda: self._due.append(function))
            self._changed.notify_all()

    def on_its_way(self, seconds: float, function: Callable[[], object]) -> None:
        """The same for what comes by itself, as messages do: time passes up to there by itself."""

        def arrive() -> None:
            self.network.travelling -= 1
            self._due.append(function)

        with self._changed:
            self.network.travelling += 1
            self.network.clock.later(seconds, arrive)
            self._changed.notify_all()

    def changed(self) -> None:
        """Something was given to the network."""
        with self._changed:
            self._changed.notify_all()

    def settle(self, seconds: float) -> bool:
        """Blocks until nothing travels and nothing is due, so many real seconds at most; whether it came to that."""
        with self._changed:
            return self._changed.wait_for(lambda: self._idle, seconds)

    def pass_to(self, when: float) -> None:
        """Lets time pass up to a moment; what falls due until then is called."""
        with self._changed:
            self._until = max(self._until, when)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._idle or self._closed)
            clock = self.network.clock
            clock.now = max(clock.now, when)

    @property
    def thread_ident(self) -> int:
        """Of the thread on which all that is due is called."""
        assert self._thread.ident is not None
        return self._thread.ident

    @property
    def next_due(self) -> float | None:
        """When something falls due next."""
        with self.lock:
            return self.network.clock.next_due

    def close(self) -> None:
        """Nothing is called any more."""
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
    """The same time for one process; `enter` runs a function as this process does."""

    def __init__(self, time: MemoryTime, enter: Callable[[Callable[[], object]], object]) -> None:
        self._time, self._enter = time, enter
        self._closed = False

    def monotonic(self) -> float:
        """Seconds since the cluster began."""
        return self._time.monotonic()

    def later(self, seconds: float, function: Callable[[], object]) -> None:
        """Run `function` once, `seconds` from now."""

        def run() -> None:
            if not self._closed:
                self._enter(function)

        self._time.later(seconds, run)

    def every(self, seconds: float, function: Callable[[], bool]) -> None:
        """Run `function` each `seconds` for as long as it returns True."""
        repeat(self.later, seconds, function)

    def close(self) -> None:
        """Forget everything that was to be done later."""
        self._closed = True
