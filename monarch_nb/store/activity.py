"""Activity of a process while it is watched: the running calls of its actors, and the resources that it uses."""

import linecache
import logging
import os
import resource
import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType

from monarch_nb.gpu import load
from monarch_nb.host.linux import memory_resident, memory_used
from monarch_nb.runtime import EXEC, HOOK, RELOAD, ActorCell, ByteCounts, Runtime
from monarch_nb.runtime.actors.executors import ActorRun, frames_of, runs_of
from monarch_nb.store.verbs import (
    ACTIVITY,
    STACK,
    WATCH,
    Activity,
    ActorActivity,
    ResourcesUsed,
    StackText,
    WatchActivity,
    WhichStack,
)
from monarch_nb.transport import TransportError
from monarch_nb.wire import Asker

SAMPLE_S = 0.1
USAGE_S = 2.0
LIGHT_S = 5.0  # without watchers, while the history of resources is kept
FIRST_USAGE_S = 0.5  # for the first reading, as a watcher has just begun
_PAGE = os.sysconf("SC_PAGE_SIZE")
_FEW_PAGES = (1 << 20) // _PAGE
_MEMORY_OLD_S = 60.0
COUNTS_S = 1.0  # between messages with counts alone
MOST_RUNS = 20  # of an actor whose stacks are shown

logger = logging.getLogger(__name__)
_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_NAMES = {EXEC: "cell", HOOK: "healed", RELOAD: "reload"}


class ActorSample:
    """An actor at the last sample, and its last report."""

    __slots__ = ("busy", "calls", "counted", "counts", "endpoint", "rate", "reported", "since")

    def __init__(self, calls: int, now: float) -> None:
        self.reported: ActorActivity | None = None
        self.busy = False
        self.endpoint = ""
        self.since = 0.0
        self.calls = calls  # at the last sample
        self.counts = calls  # at the last computation of the rate
        self.counted = now
        self.rate = 0.0

    def take(self, cell: ActorCell, now: float, counts_s: float = COUNTS_S) -> ActorActivity | None:
        """Returns the actor's activity; None if unchanged since the last report. Counts alone wait for `counts_s`."""
        busy = self._follow(cell, now)
        if now - self.counted >= counts_s:
            self.rate = round((cell.calls - self.counts) / (now - self.counted), 1)
            self.counts, self.counted = cell.calls, now
        doing = "starting" if cell.state == "starting" else "busy" if busy else "idle"
        endpoint = _endpoint_name(self.endpoint) if busy else ""
        since = time.time() - (now - self.since) if self.since else 0.0
        last = self.reported
        if last is not None and (last.doing, last.endpoint) == (doing, endpoint):
            if self.counted != now or (last.calls, last.rate) == (cell.calls, self.rate):
                return None
            since = last.since
        self.reported = ActorActivity(
            *(cell.mesh, cell.rank, cell.incarnation, doing, round(since, 3), endpoint),
            *(len(cell.queued()), cell.calls, self.rate, cell.errors),
        )
        return self.reported

    def _follow(self, cell: ActorCell, now: float) -> bool:
        """Returns whether the actor is busy; records the endpoint and the start time."""
        running = cell.running
        new_calls, self.calls = cell.calls - self.calls, cell.calls
        # Short calls between two samples do not count as idle time: an actor that answers continuously is busy.
        busy = running is not None or (new_calls > 0 and self.busy)
        endpoint = self.endpoint
        if running is not None:
            endpoint = running[1].lstrip("@!")
            if not self.busy or endpoint != self.endpoint:
                self.since = running[2]
        elif self.busy and not busy:
            self.since = now
        self.busy, self.endpoint = busy, endpoint
        return busy


class UsageMeter:
    """Measures resource use: processor share since the last reading, memory and GPU memory in bytes.

    Reading memory takes milliseconds in each of hundreds of processes. A new reading is taken only after pages were
    added or freed, for at most a thousandth of the processor's time, or after a minute, as sharing processes may end.
    """

    def __init__(self, traffic: ByteCounts) -> None:
        self._traffic = traffic
        self._counted = traffic.received, traffic.sent
        self._last = time.monotonic(), time.process_time()  # time of the last reading, and processor time until then
        self._memory = (0, "")
        self._memory_due = self._memory_old = 0.0
        self._pages = (0, 0)  # at that reading: resident pages, and faults so far

    def read(self) -> ResourcesUsed:
        """Returns the current resource use."""
        now, spent = time.monotonic(), time.process_time()
        (last, last_spent), self._last = self._last, (now, spent)
        seconds = max(now - last, 1e-3)
        cpu = (spent - last_spent) / seconds
        memory, kind = self._memory_used(now)
        before_in, before_out = self._counted
        self._counted = received, sent = self._traffic.received, self._traffic.sent
        rates = round((received - before_in) / seconds), round((sent - before_out) / seconds)
        # Less than a megabyte does not matter.
        return ResourcesUsed(round(cpu, 2), memory >> 20 << 20, *_gpu(), kind, *rates)

    def _memory_used(self, now: float) -> tuple[int, str]:
        if now < self._memory_due:
            return self._memory
        pages = memory_resident()[0] // _PAGE, resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        unchanged = all(abs(new - old) < _FEW_PAGES for new, old in zip(pages, self._pages, strict=True))
        if not unchanged or now >= self._memory_old:
            started = time.thread_time()
            self._memory, self._pages = memory_used(), pages
            self._memory_due = now + 1000 * (time.thread_time() - started)
            self._memory_old = now + _MEMORY_OLD_S
        return self._memory


def _gpu() -> tuple[float, int, int]:
    """Returns the share in use of this process's GPU, its bytes there, and all bytes; -1 and 0 without a GPU.

    If only the bytes of all processes are known, these are returned.
    """
    usage = load()
    if usage is None:
        return -1.0, 0, 0
    return usage.share, usage.used if usage.own < 0 else usage.own, usage.total


class Reporter:
    """Samples the actors of this process ten times a second while it is watched; calls are not slowed down."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._lock = threading.Lock()
        self._watchers: dict[str, bool] = {}  # with True for those that want the resources alone
        self._wake = threading.Event()
        self._pace = self._used_pace = 1.0
        self._samples: dict[tuple[str, int], ActorSample] = {}
        self._thread: threading.Thread | None = None
        self._meter = UsageMeter(runtime.local.traffic)
        runtime.verbs.handle(WATCH, self._watch)
        runtime.verbs.handle(STACK, self._stack)

    def _watch(self, watch: WatchActivity, asker: Asker[None]) -> None:
        with self._lock:
            if not watch.on:
                self._watchers.pop(asker.src, None)
                return
            self._watchers[asker.src] = watch.used
            self._pace, self._used_pace = max(1.0, watch.pace), max(1.0, watch.used_pace)
            self._samples = {}  # a new watcher receives all actors
            self._meter = UsageMeter(self._runtime.local.traffic)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="monarch-activity", daemon=True)
                self._thread.start()
        self._wake.set()

    def _stack(self, query: WhichStack, asker: Asker[StackText]) -> StackText:
        key = (query.mesh, query.rank)
        cells = [cell for cell_key, cell in tuple(self._runtime.cells.items()) if not query.mesh or cell_key == key]
        return StackText("\n".join(map(_stack_text, cells)) or "it has ended")

    def _run(self) -> None:
        metered: UsageMeter | None = None
        due = 0.0
        while True:
            with self._lock:
                watchers = dict(self._watchers)
                closely = [src for src, used in watchers.items() if not used]
                if not watchers or self._runtime.closed:
                    self._thread = None
                    return
                samples, meter, pace, used_pace = self._samples, self._meter, self._pace, self._used_pace
            now = time.monotonic()
            used = None
            if meter is not metered:
                metered, due = meter, now + used_pace * FIRST_USAGE_S
            elif now >= due:
                used, due = meter.read(), now + used_pace * (USAGE_S if closely else LIGHT_S)
            try:
                doings = tuple(self._changes(samples, now, pace * COUNTS_S)) if closely else ()
                if doings or used is not None:
                    self._send(closely, Activity(doings, used))
                if used is not None:
                    self._send([src for src, only in watchers.items() if only], Activity((), used))
            except Exception:
                logger.debug("activity could not be reported", exc_info=True)
            self._wake.wait(pace * SAMPLE_S if closely else max(0.0, min(due - now, used_pace * LIGHT_S)))
            self._wake.clear()

    def _send(self, watchers: Sequence[str], activity: Activity) -> None:
        for address in watchers:
            try:
                self._runtime.post(address, ACTIVITY, activity)
            except TransportError:
                with self._lock:
                    self._watchers.pop(address, None)

    def _changes(self, samples: dict[tuple[str, int], ActorSample], now: float, counts_s: float) -> list[ActorActivity]:
        changes = []
        for key, cell in tuple(self._runtime.cells.items()):
            sample = samples.get(key)
            if sample is None:
                sample = samples[key] = ActorSample(cell.calls, now)
            change = sample.take(cell, now, counts_s)
            if change is not None:
                changes.append(change)
        return changes


def attach(runtime: Runtime) -> Reporter:
    """Registers the handlers of `activity` messages."""
    return Reporter(runtime)


def _stack_text(cell: ActorCell) -> str:
    """Returns the frames of an actor, outermost first, without the library's own; the longest of several runs first."""
    name = f"{cell.spec.name} ({cell.spec.class_name.rpartition('.')[2]})"
    runs, top = runs_of(cell)[::-1], sys._current_frames().get(cell.executor.thread.ident or 0)
    texts = [_run_text(name, run, top) for run in runs[:MOST_RUNS]] or [f"{name}: waits for messages"]
    more = [f"{name}: runs {len(runs) - MOST_RUNS:,} more"] if len(runs) > MOST_RUNS else []
    return "\n".join([*texts, *more])


def _run_text(name: str, run: ActorRun, top: FrameType | None) -> str:
    lines = [f"{name}: {_endpoint_name(run.endpoint.lstrip('@!'))}, for {time.monotonic() - run.since:.1f} s"]
    frames = [*frames_of(run, top)][::-1]
    shown = [frame for frame in frames if not frame.f_code.co_filename.startswith(_PACKAGE)]
    while shown and shown[0].f_code.co_filename == threading.__file__:
        shown.pop(0)
    for frame in shown:
        code, line = frame.f_code, frame.f_lineno
        lines.append(f'  File "{code.co_filename}", line {line}, in {code.co_qualname}')
        text = linecache.getline(code.co_filename, line, frame.f_globals).strip()
        if text:
            lines.append(f"    {text}")
    return "\n".join(lines)


def _endpoint_name(endpoint: str) -> str:
    """Returns the display name of an endpoint: cells, hooks and reloads have their own names."""
    return _NAMES.get(endpoint, endpoint)
