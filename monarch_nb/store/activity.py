"""What a process tells of itself while somebody watches: what its actors do, and what it uses."""

import logging
import threading
import time
from typing import Any

from monarch_nb.runtime import Runtime
from monarch_nb.store.stack import endpoint_name, stack_text
from monarch_nb.store.usage import Meter
from monarch_nb.store.verbs import STACK, TOLD, WATCH, Activity, Doing, StackText, Watch, WhichStack
from monarch_nb.transport import TransportError
from monarch_nb.wire import Asker

SAMPLE_S = 0.1
USAGE_S = 2.0
COUNTS_S = 1.0  # how often counts alone are worth a message

logger = logging.getLogger(__name__)


class Sample:
    """One actor as it was at the last sample, and as it was reported last."""

    __slots__ = ("busy", "calls", "counted", "counts", "endpoint", "rate", "reported", "since")

    def __init__(self, calls: int, now: float) -> None:
        self.reported: Doing | None = None
        self.busy = False
        self.endpoint = ""
        self.since = 0.0
        self.calls = calls  # at the last sample
        self.counts = calls  # when the rate was last worked out
        self.counted = now
        self.rate = 0.0

    def take(self, cell: Any, now: float, counts_s: float = COUNTS_S) -> Doing | None:
        """The actor as it is now; None if that is what was reported last. Counts alone are told each `counts_s`."""
        busy = self._follow(cell, now)
        if now - self.counted >= counts_s:
            self.rate = round((cell.calls - self.counts) / (now - self.counted), 1)
            self.counts, self.counted = cell.calls, now
        doing = "starting" if cell.state == "starting" else "busy" if busy else "idle"
        endpoint = endpoint_name(self.endpoint) if busy else ""
        since = time.time() - (now - self.since) if self.since else 0.0
        last = self.reported
        if last is not None and (last.doing, last.endpoint) == (doing, endpoint):
            if self.counted != now or (last.calls, last.rate) == (cell.calls, self.rate):
                return None
            since = last.since
        self.reported = Doing(
            *(cell.mesh, cell.rank, cell.incarnation, doing, round(since, 3), endpoint),
            *(len(cell.queued()), cell.calls, self.rate, cell.errors),
        )
        return self.reported

    def _follow(self, cell: Any, now: float) -> bool:
        """Whether the actor is busy; notes with what, and since when."""
        running = cell.running
        begun, self.calls = cell.calls - self.calls, cell.calls
        # Calls shorter than the sampling are not flickered through: an actor that answers all the time is busy.
        busy = running is not None or (begun > 0 and self.busy)
        endpoint = self.endpoint
        if running is not None:
            endpoint = running[1].lstrip("@!")
            if not self.busy or endpoint != self.endpoint:
                self.since = running[2]
        elif self.busy and not busy:
            self.since = now
        self.busy, self.endpoint = busy, endpoint
        return busy


class Reporter:
    """Looks at the actors of this process ten times a second while somebody watches; no call pays for it."""

    def __init__(self, engine: Runtime) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._watchers: set[str] = set()
        self._pace = 1.0
        self._samples: dict[tuple[str, int], Sample] = {}
        self._thread: threading.Thread | None = None
        self._meter = Meter()
        engine.verbs.handle(WATCH, self._watch)
        engine.verbs.handle(STACK, self._stack)

    def _watch(self, watch: Watch, asker: Asker[None]) -> None:
        with self._lock:
            if not watch.on:
                self._watchers.discard(asker.src)
                return
            self._watchers.add(asker.src)
            self._pace = max(1.0, watch.pace)
            self._samples, self._meter = {}, Meter()  # a new watcher is told of all actors
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="monarch-activity", daemon=True)
                self._thread.start()

    def _stack(self, which: WhichStack, asker: Asker[StackText]) -> StackText:
        place = (which.mesh, which.rank)
        cells = [cell for key, cell in tuple(self._engine.cells.items()) if not which.mesh or key == place]
        return StackText("\n".join(map(stack_text, cells)) or "it has ended")

    def _run(self) -> None:
        metered: Meter | None = None
        metered_at = 0.0
        while True:
            with self._lock:
                watchers = tuple(self._watchers)
                if not watchers or self._engine.closed:
                    self._thread = None
                    return
                samples, meter, pace = self._samples, self._meter, self._pace
            now = time.monotonic()
            used = None
            if now - metered_at >= pace * USAGE_S or meter is not metered:
                used, metered, metered_at = meter.read(), meter, now
            try:
                activity = Activity(tuple(self._changes(samples, now, pace * COUNTS_S)), used)
                if activity.doings or used is not None:
                    self._send(watchers, activity)
            except Exception:
                logger.debug("activity could not be told", exc_info=True)
            time.sleep(pace * SAMPLE_S)

    def _send(self, watchers: tuple[str, ...], activity: Activity) -> None:
        for address in watchers:
            try:
                self._engine.tell(address, TOLD, activity)
            except TransportError:
                with self._lock:
                    self._watchers.discard(address)

    def _changes(self, samples: dict[tuple[str, int], Sample], now: float, counts_s: float) -> list[Doing]:
        changes = []
        for key, cell in tuple(self._engine.cells.items()):
            sample = samples.get(key)
            if sample is None:
                sample = samples[key] = Sample(cell.calls, now)
            change = sample.take(cell, now, counts_s)
            if change is not None:
                changes.append(change)
        return changes


def attach(engine: Runtime) -> Reporter:
    """Takes `activity` messages from now on."""
    return Reporter(engine)
