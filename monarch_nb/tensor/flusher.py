"""Batches of streams in flight, and the thread that flushes the queues of streams and ticks them."""

import threading
import time
import weakref
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

from monarch_nb.mesh import ValueMesh
from monarch_nb.runtime import Future
from monarch_nb.tensor.commands import Receipt
from monarch_nb.tensor.origin import CallSite

if TYPE_CHECKING:
    from monarch_nb.tensor.stream import Stream

WAIT_S = 0.001
WAIT_BUSY_S = 0.004  # delay while the workers have one batch; with two, the flush waits for a reply
TICK_S = 0.5  # after which released tensors are freed on workers although nothing else is sent
WINDOW = 4096  # operations in flight above which the controller waits
WINDOW_BYTES = 64 << 20  # the same for bytes of tensors


class CommandBatch:
    """Commands that were sent together: number of the first operation, and the call site of each, if there are any.

    `number` counts batches. `first_byte` counts the bytes of tensors that were sent before.
    """

    def __init__(
        self, number: int, first: int, sites: list[CallSite | None], first_byte: int, future: Future[ValueMesh[Receipt]]
    ) -> None:
        self.number, self.first, self.sites, self.first_byte, self.future = number, first, sites, first_byte, future


class BatchesInFlight(deque[CommandBatch]):
    """The batches of a stream whose replies are not processed yet, the oldest first. Any thread adds and removes."""

    @property
    def unanswered(self) -> int:
        """The number of batches that some rank has not replied to, or 2 if there are more."""
        count = 0
        with suppress(IndexError):
            for latest in (-1, -2):
                count += not self[latest].future.done()
        return count

    def exceed_window(self, issued: int, nbytes: int) -> bool:
        """Returns whether the controller has to wait before it sends more, given the operations and bytes so far."""
        try:
            oldest = self[0]
        except IndexError:
            return False
        return issued - oldest.first > WINDOW or nbytes - oldest.first_byte > WINDOW_BYTES


class Flusher:
    """Flushes streams on a thread of its own, which starts on first use and sleeps while idle.

    Each batch costs the controller as much as dozens of operations. So operations issued while workers are busy are
    collected until the workers are about to run out of work.
    """

    def __init__(self) -> None:
        self._scheduled: deque[tuple[float, bool, Stream]] = deque()
        self._registered: weakref.WeakSet[Stream] = weakref.WeakSet()
        self._wake = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def register(self, stream: "Stream") -> None:
        """Adds a stream for periodic ticks, by weak reference."""
        self._registered.add(stream)

    def schedule(self, stream: "Stream", after_s: float = WAIT_S, *, waits: bool = True) -> None:
        """Schedules a flush of a stream, in place of an earlier schedule.

        With `waits` the flush is delayed while workers have a batch, and follows a reply while they have two.
        """
        stream.due = time.monotonic() + after_s
        self._scheduled.append((stream.due, waits, stream))
        self._wake.set()
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="monarch-tensor-flush", daemon=True)
                    self._thread.start()

    def _run(self) -> None:
        pending: list[tuple[float, bool, Stream]] = []
        while True:
            pause = min(due for due, _, _ in pending) - time.monotonic() if pending else TICK_S
            if pause > 0 and self._wake.wait(pause):
                self._wake.clear()
            elif not pending:
                for stream in tuple(self._registered):
                    stream.tick()
            pending += [self._scheduled.popleft() for _ in range(len(self._scheduled))]
            now = time.monotonic()
            ready = [(waits, stream) for due, waits, stream in pending if due <= now and due == stream.due]
            pending = [entry for entry in pending if entry[0] > now]
            for waits, stream in ready:
                busy = stream.in_flight
                if busy == 0 or not waits:
                    stream.flush_nowait()
                elif busy == 1:
                    self.schedule(stream, WAIT_BUSY_S - WAIT_S, waits=False)


FLUSHER = Flusher()
