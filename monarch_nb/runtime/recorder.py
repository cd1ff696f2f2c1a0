"""The records of a process while a timeline is recorded: calls that it sends and runs, spans, transfers.

Each is appended when it is known on the thread where it happens; `take` removes and returns them. Nothing is recorded,
and one attribute is read, while `Runtime.recorder` is None.
"""

import sys
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from monarch_nb.runtime.context import current
from monarch_nb.wire import users_frame

if TYPE_CHECKING:
    from monarch_nb.runtime.actors.cell import ActorCell
    from monarch_nb.runtime.calls import PendingCall
    from monarch_nb.wire import Header

MOST = 20_000  # of each kind between two calls of `take`
T = TypeVar("T")


class RunCall(NamedTuple):
    """A call that ran here. Times are of the monotonic clock."""

    mesh: str
    rank: int
    endpoint: str
    call: str
    began: float
    ended: float
    failed: bool


class CallBegun(NamedTuple):
    """A call that was sent from here, with the innermost line of the user's program that led to it."""

    call: str
    title: str
    mesh: str
    size: int
    began: float
    file: str
    line: int


class CallEnded(NamedTuple):
    """The time at which all answers of a call have arrived, or will not arrive any more."""

    call: str
    ended: float


class TimeSpan(NamedTuple):
    """A named stretch of time: a span of the program, a transfer of memory, a pause of the interpreter."""

    kind: str
    name: str
    mesh: str
    rank: int
    began: float
    ended: float


class CallRecorder:
    """The records of one process since they were last taken; records beyond `MOST` replace the oldest."""

    def __init__(self) -> None:
        self._runs: deque[RunCall] = deque(maxlen=MOST)
        self._sent: deque[CallBegun] = deque(maxlen=MOST)
        self._answered: deque[CallEnded] = deque(maxlen=MOST)
        self._stretches: deque[TimeSpan] = deque(maxlen=MOST)
        self._raised: set[tuple[int, str]] = set()

    def raised(self, cell: "ActorCell", call: str) -> None:
        """Notes that a running call has raised."""
        self._raised.add((id(cell), call))

    def ran(self, cell: "ActorCell", header: "Header", began: float) -> None:
        """Records a call that has ended."""
        key, failed = (id(cell), header.call), False
        if self._raised and key in self._raised:
            self._raised.discard(key)
            failed = True
        now = time.monotonic()
        self._runs.append(RunCall(cell.mesh, cell.rank, header.method, header.call, began, now, failed))

    def sent(self, call: "PendingCall[object]") -> None:
        """Records a call that is about to be sent, on the thread that makes it."""
        frame = users_frame(sys._getframe(2))
        location = ("", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)
        self._sent.append(CallBegun(call.call, call.title, call.mesh, call.size, time.monotonic(), *location))

    def answered(self, call: str) -> None:
        """Records that a call waits for no more answers."""
        self._answered.append(CallEnded(call, time.monotonic()))

    def stretch(self, kind: str, name: str, began: float) -> None:
        """Records a span of the current actor that has ended; outside of actors, of the process."""
        context = current.get()
        mesh, rank = ("", 0) if context is None else (context.actor_instance.mesh, context.actor_instance.base_rank)
        self._stretches.append(TimeSpan(kind, name, mesh, rank, began, time.monotonic()))

    def take(self) -> tuple[list[RunCall], list[CallBegun], list[CallEnded], list[TimeSpan]]:
        """Returns the records since the last call."""
        return _emptied(self._runs), _emptied(self._sent), _emptied(self._answered), _emptied(self._stretches)


def _emptied(records: "deque[T]") -> list[T]:
    """Removes and returns all items of a deque to which other threads append."""
    return [records.popleft() for _ in range(len(records))]


class CollectionWatch:
    """Records collections of garbage that pause the interpreter for a while, as the hook of the garbage collector."""

    LEAST_S = 0.002

    def __init__(self, recorder: CallRecorder) -> None:
        self._recorder = recorder
        self._began = threading.local()

    def __call__(self, phase: str, facts: object) -> None:
        """Called by the collector on the thread that it runs on."""
        now = time.monotonic()
        if phase == "start":
            self._began.at = now
        elif now - getattr(self._began, "at", now) >= self.LEAST_S:
            self._recorder.stretch("pause", "garbage collection", self._began.at)
