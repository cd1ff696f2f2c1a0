"""A process's part of timelines: calls and spans taken from its recorder at intervals, and sent to requesters."""

import gc
import itertools
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator

from msgspec.structs import replace

from monarch_nb.collectives.groups import PROCESS_GROUPS
from monarch_nb.profiling.verbs import Recorded, RecordedCall, RecordedSpan
from monarch_nb.runtime import EXEC, HOOK, RELOAD, CallRecorder, CollectionWatch, Runtime

SEND_S = 0.5
ASKS = 60  # intervals after which even an empty message is sent: its reply says whether the requester wants more
MOST_SPANS = 400  # of a process in one message: beyond, short successive calls are merged into one span
RUNNING_S = 0.2  # how long a call runs before it is reported as running
COLLECTIVES_COST = 0.004  # of the time: reading thousands of PyTorch's records takes a tenth of a second
NAMES = {EXEC: "cell", HOOK: "healed", RELOAD: "reload"}
Key = tuple[str, int, str, int]  # requester, its number of the timeline, recorded mesh ("": all) and rank
logger = logging.getLogger(__name__)


class _Unsent:
    """The records that are yet to be sent to one requester."""

    def __init__(self, send: Callable[[Recorded], bool], pace: float) -> None:
        self.send = send
        self.every = max(1, round(pace))  # sends at every so many intervals
        self.spans: list[RecordedSpan] = []
        self.sent: list[RecordedCall] = []
        self.running: tuple[RecordedSpan, ...] = ()  # as sent last


class ProcessRecording:
    """Records while there are requesters. Without them the process has no recorder and no recording thread."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._parts: dict[Key, _Unsent] = {}
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._recorder: CallRecorder | None = None
        self._collections: CollectionWatch | None = None
        self._calls: dict[str, RecordedCall] = {}  # of this process, awaiting answers
        self._ahead = 0.0  # wall clock minus monotonic clock
        self._since_ns = self._collectives_due = 0.0
        self._cost = 0.0

    def begin(self, key: Key, send: Callable[[Recorded], bool], pace: float = 1.0) -> None:
        """Begins to record for a requester; `send` returns whether it wants more."""
        with self._lock:
            self._parts.setdefault(key, _Unsent(send, pace))
            if self._recorder is not None:
                return
            self._recorder = self._runtime.recorder = CallRecorder()
            self._ahead = time.time() - time.monotonic()
            self._since_ns = time.time_ns()
            self._collections = CollectionWatch(self._recorder)
            gc.callbacks.append(self._collections)
            self._wake = threading.Event()
            threading.Thread(target=self._run, args=(self._wake,), name="monarch-timeline", daemon=True).start()

    def end(self, key: Key) -> Recorded | None:
        """Ends the recording for a requester; returns the unsent rest, None if there was no recording."""
        with self._lock:
            if key not in self._parts:
                return None
            self._take()
            message = self._message(key, self._parts.pop(key), self._running(key))
            self._stop_if_unused()
            return message

    def send_now(self, key: Key) -> None:
        """Sends all records until now."""
        with self._lock:
            part = self._parts.get(key)
            if part is None:
                return
            self._take()
            message = self._message(key, part, self._running(key))
        part.send(message)

    def forget(self, key: Key) -> None:
        """Ends the recording for a requester that has ended."""
        with self._lock:
            self._parts.pop(key, None)
            self._stop_if_unused()

    def close(self) -> None:
        """Ends all recordings."""
        with self._lock:
            self._parts.clear()
            self._stop_if_unused()

    def _stop_if_unused(self) -> None:
        """Stops recording if no requester is left."""
        if self._parts or self._recorder is None:
            return
        self._runtime.recorder = self._recorder = None
        if self._collections is not None:
            gc.callbacks.remove(self._collections)
        self._calls.clear()
        self._wake.set()

    def _run(self, over: threading.Event) -> None:
        turns = itertools.count(1)
        while not over.wait(SEND_S):
            began, turn = time.thread_time(), next(turns)
            with self._lock:
                if over.is_set():
                    return
                self._take()
                due = [(key, part) for key, part in self._parts.items() if turn % part.every == 0]
                asks = turn % ASKS == 0
                messages = [(key, part, message) for key, part in due if (message := self._update(key, part, asks))]
            for key, part, message in messages:
                try:
                    if not part.send(message):
                        self.forget(key)
                except Exception:
                    logger.debug("a timeline could not be sent", exc_info=True)
                    self.forget(key)
            self._cost += time.thread_time() - began

    # -- records: under the lock ---------------------------------------------------------------------------------------

    def _take(self) -> None:
        recorder = self._recorder
        if recorder is None:
            return
        runs, sent, answered, stretches = recorder.take()
        ahead = self._ahead
        for record in sent:
            self._calls[record.call] = RecordedCall(
                record.call, record.title, record.mesh, record.size, record.began + ahead, 0.0, record.file, record.line
            )
        new = {record.call for record in sent}
        ended: list[RecordedCall] = []
        for call, end in answered:
            pending = self._calls.pop(call, None)
            if pending is not None:
                new.discard(call)
                ended.append(replace(pending, ended=end + ahead))
        ended += [self._calls[call] for call in new]
        collectives = tuple(self._collectives())
        for key, part in self._parts.items():
            mesh, rank = key[2], key[3]
            if rank >= 0:
                part.spans += (
                    RecordedSpan("call", name_of(endpoint), began + ahead, end + ahead, call, failed)
                    for uid, base, endpoint, call, began, end, failed in runs
                    if not mesh or (uid, base) == (mesh, rank)
                )
                part.spans += (
                    RecordedSpan(kind, name, began + ahead, end + ahead)
                    for kind, name, uid, base, began, end in stretches
                    if not mesh or not uid or (uid, base) == (mesh, rank)
                )
                part.spans += collectives
            part.sent += ended

    def _collectives(self) -> Iterator[RecordedSpan]:
        """Yields the collectives begun since the last call; PyTorch records the end only of those on GPUs."""
        if time.monotonic() < self._collectives_due or "torch.distributed" not in sys.modules:
            return
        began = time.thread_time()
        newest = self._since_ns
        for _, records in PROCESS_GROUPS.history(int(self._since_ns) + 1):
            for record in records:
                newest = max(newest, record.time_created_ns)
                start = record.time_created_ns / 1e9
                yield RecordedSpan(
                    "collective", record.profiling_name.partition(":")[2] or record.profiling_name, start, start
                )
        self._since_ns = newest
        self._collectives_due = time.monotonic() + (time.thread_time() - began) / COLLECTIVES_COST

    def _update(self, key: Key, part: _Unsent, asks: bool) -> Recorded | None:
        """Returns the news for a requester; None without any, unless `asks`: its reply says whether it wants more."""
        running = self._running(key)
        has_news = asks or part.spans or part.sent or running != part.running
        return self._message(key, part, running) if has_news else None

    def _message(self, key: Key, part: _Unsent, running: tuple[RecordedSpan, ...]) -> Recorded:
        spans, part.spans = part.spans, []
        sent, part.sent = part.sent, []
        if len(spans) > MOST_SPANS:
            spans = list(drawn_together(spans, SEND_S / MOST_SPANS))
        cost, self._cost = self._cost, 0.0
        part.running = running
        return Recorded(key[1], key[3], tuple(spans), running, tuple(sent), cost)

    def _running(self, key: Key) -> tuple[RecordedSpan, ...]:
        """Returns the running calls among those that a requester has asked for."""
        mesh, rank = key[2], key[3]
        if rank < 0:
            return ()
        now = time.monotonic()
        spans = []
        for (uid, base), cell in tuple(self._runtime.cells.items()):
            for running in cell.running_now().values() if not mesh or (uid, base) == (mesh, rank) else ():
                call, endpoint, since = running
                if running is not cell.recorded and now - since > RUNNING_S:
                    spans.append(RecordedSpan("call", name_of(endpoint), since + self._ahead, 0.0, call))
        return tuple(spans)


def name_of(endpoint: str) -> str:
    """Returns the display name of an endpoint."""
    return NAMES.get(endpoint, endpoint.lstrip("@!"))


def drawn_together(spans: Iterable[RecordedSpan], gap: float) -> Iterator[RecordedSpan]:
    """Merges successive spans of one kind and name, at most `gap` seconds apart, into one that counts them."""
    last: dict[tuple[str, str], RecordedSpan] = {}
    for span in sorted(spans, key=lambda span: span.began):
        key = (span.kind, span.name)
        before = last.get(key)
        if before is not None and span.began - before.ended <= gap and before.failed == span.failed:
            count, ended = before.count + span.count, max(before.ended, span.ended)
            last[key] = RecordedSpan(span.kind, span.name, before.began, ended, "", span.failed, count)
            continue
        if before is not None:
            yield before
        last[key] = span
    yield from last.values()
