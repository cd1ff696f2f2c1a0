"""What a process tells of itself while somebody watches: what its actors do, and what it uses."""

import contextlib
import linecache
import logging
import os
import sys
import threading
import time
import traceback
from typing import Any

from monarch_nb.runtime import EXEC, HOOK, RELOAD, Runtime
from monarch_nb.store.verbs import STACK, TOLD, WATCH, Activity, Doing, StackText, Used, Watch, WhichStack
from monarch_nb.transport import TransportError
from monarch_nb.wire import Asker

SAMPLE_S = 0.1
USAGE_S = 2.0
COUNTS_S = 1.0  # how often counts alone are worth a message

_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_NAMES = {EXEC: "cell", HOOK: "healed", RELOAD: "reload"}
logger = logging.getLogger(__name__)


class _Seen:
    """What was told last of one actor."""

    __slots__ = ("busy", "calls", "counted", "counts", "endpoint", "rate", "since", "told")

    def __init__(self) -> None:
        self.told: Doing | None = None
        self.busy = False
        self.endpoint = ""
        self.since = 0.0
        self.calls = 0  # at the last sample
        self.counts = 0  # when the rate was last worked out
        self.counted = 0.0
        self.rate = 0.0


class Reporter:
    """Looks at the actors of this process ten times a second while somebody watches; no call pays for it."""

    def __init__(self, engine: Runtime) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._watchers: set[str] = set()
        self._seen: dict[tuple[str, int], _Seen] = {}
        self._thread: threading.Thread | None = None
        self._cpu = (0.0, 0.0)
        engine.verbs.handle(WATCH, self._watch)
        engine.verbs.handle(STACK, self._stack)

    def _watch(self, watch: Watch, asker: Asker[None]) -> None:
        with self._lock:
            if not watch.on:
                self._watchers.discard(asker.src)
                return
            self._watchers.add(asker.src)
            self._seen = {}  # who is new is told of all
            self._cpu = (0.0, 0.0)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="monarch-activity", daemon=True)
                self._thread.start()

    def _stack(self, which: WhichStack, asker: Asker[StackText]) -> StackText:
        place = (which.mesh, which.rank)
        cells = [cell for key, cell in tuple(self._engine.cells.items()) if not which.mesh or key == place]
        return StackText("\n".join(map(stack_text, cells)) or "it has ended")

    def _run(self) -> None:
        used_at = 0.0
        while True:
            with self._lock:
                watchers = tuple(self._watchers)
                if not watchers or self._engine.closed:
                    self._thread = None
                    return
                seen = self._seen
            now = time.monotonic()
            used = None
            if now - used_at >= USAGE_S or not self._cpu[0]:
                used, used_at = self._used(now), now
            try:
                told = Activity(tuple(self._doings(seen, now)), used)
                if told.doings or used is not None:
                    self._tell(watchers, told)
            except Exception:
                logger.debug("activity could not be told", exc_info=True)
            time.sleep(SAMPLE_S)

    def _tell(self, watchers: tuple[str, ...], told: Activity) -> None:
        for address in watchers:
            try:
                self._engine.tell(address, TOLD, told)
            except TransportError:
                with self._lock:
                    self._watchers.discard(address)

    def _doings(self, seen: dict[tuple[str, int], _Seen], now: float) -> list[Doing]:
        found = []
        for key, cell in tuple(self._engine.cells.items()):
            known = seen.get(key)
            if known is None:
                known = seen[key] = _Seen()
                known.calls = known.counts = cell.calls
                known.counted = now
            told = self._doing(cell, known, now)
            if told is not None:
                found.append(told)
        return found

    def _doing(self, cell: Any, known: _Seen, now: float) -> Doing | None:
        running = cell.running
        began, known.calls = cell.calls - known.calls, cell.calls
        # Calls shorter than the sampling are not flickered through: one that answers all the time is busy.
        busy = running is not None or (began > 0 and known.busy)
        endpoint = known.endpoint
        if running is not None:
            endpoint = running[1].lstrip("@!")
            if not known.busy or endpoint != known.endpoint:
                known.since = running[2]
        elif known.busy and not busy:
            known.since = now
        known.busy, known.endpoint = busy, endpoint
        if now - known.counted >= COUNTS_S:
            known.rate = round((cell.calls - known.counts) / (now - known.counted), 1)
            known.counts, known.counted = cell.calls, now
        doing = "starting" if cell.state == "starting" else "busy" if busy else "idle"
        before = known.told
        since = time.time() - (now - known.since) if known.since else 0.0
        if before is not None and (before.doing, before.endpoint) == (doing, _named(endpoint) if busy else ""):
            if known.counted != now or (before.calls, before.rate) == (cell.calls, known.rate):
                return None
            since = before.since
        known.told = Doing(
            *(cell.mesh, cell.rank, cell.incarnation, doing, round(since, 3), _named(endpoint) if busy else ""),
            *(len(cell.queued()), cell.calls, known.rate, cell.errors),
        )
        return known.told

    def _used(self, now: float) -> Used:
        spent = time.process_time()
        before, self._cpu = self._cpu, (now, spent)
        cpu = (spent - before[1]) / (now - before[0]) if before[0] else 0.0
        return Used(round(cpu, 2), _resident(), *_gpu())


def stack_text(cell: Any) -> str:
    """Where an actor is right now, outermost frame first; the engine's own frames are left out."""
    running = cell.running
    name = f"{cell.spec.name} ({cell.spec.class_name.rpartition('.')[2]})"
    if running is None:
        return f"{name}: waits for messages"
    told = [f"{name}: {_named(running[1].lstrip('@!'))}, for {time.monotonic() - running[2]:.1f} s"]
    task = cell.task
    if task is not None and not task.done():
        frames: list[Any] = [(frame, frame.f_lineno) for frame in task.get_stack()]
    else:
        top = sys._current_frames().get(cell.executor.thread.ident)
        frames = [] if top is None else list(traceback.walk_stack(top))[::-1]
    shown = [(f, line) for f, line in frames if not f.f_code.co_filename.startswith(_PACKAGE)]
    while shown and shown[0][0].f_code.co_filename == threading.__file__:
        shown.pop(0)
    for frame, line in shown:
        code = frame.f_code
        told.append(f'  File "{code.co_filename}", line {line}, in {code.co_qualname}')
        text = linecache.getline(code.co_filename, line, frame.f_globals).strip()
        if text:
            told.append(f"    {text}")
    return "\n".join(told)


def _named(endpoint: str) -> str:
    return _NAMES.get(endpoint, endpoint)


def _resident() -> int:
    """Bytes of memory in use, in whole megabytes: less is of no interest."""
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/self/statm", "rb") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20 << 20
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10


def _gpu() -> tuple[float, int, int]:
    """Share in use, bytes in use and bytes there are, of the device this process computes on, if it does."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    try:
        if cuda is None or not cuda.is_initialized():
            return -1.0, 0, 0
        free, total = cuda.mem_get_info()
    except Exception:  # a device that has failed must not end the statistics
        return -1.0, 0, 0
    try:
        share = cuda.utilization() / 100
    except Exception:  # needs NVIDIA's own Python package
        share = -1.0
    return share, total - free, total


def attach(engine: Runtime) -> Reporter:
    """Takes `activity` messages from now on."""
    return Reporter(engine)
