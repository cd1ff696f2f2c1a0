"""Answers that a controller may not have read: stored by ranks, within bounds, for the next one that attaches.

An answer may be lost with a controller that is killed: on its way, or in an unread future. So each call names the
earlier ones whose results are still wanted, and ranks discard the answers of all others.
"""

import contextlib
import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

from monarch_nb.settings import settings
from monarch_nb.transport import Clock
from monarch_nb.wire import Header, OutFrame, Status, exception_text, in_memory, size_of
from monarch_nb.wire.header import MOST_NAMED

if TYPE_CHECKING:
    from monarch_nb.runtime.calls import PendingCall

MOST = 1000  # answers of one process; older ones are discarded
_PAUSE_S = 0.5  # without a call, after which ranks are sent which results have been read since the last one
Extent = tuple[tuple[str, ...], tuple[int, ...]]


class StoredAnswer(Struct):
    """One answer. `frames` is None if it was too large, or was discarded for later ones."""

    number: int  # in this process
    mesh: str
    rank: int
    endpoint: str
    call: str
    index: int  # its place in the call
    extent: Extent | None  # of the called slice; None for one rank of a call that was sent to each separately
    status: int
    at: float  # wall clock
    size: int  # bytes
    frames: list[bytes] | None
    error: str = ""  # the error, in one line
    sent_to: str = ""  # the controller that was sent it, and may not have read it; "" for one that has left
    unread: int = 0  # the number of the call there
    listed: bool = False  # `take_new` has returned it


class StoredAnswers:
    """The stored answers of one process. Thread-safe."""

    def __init__(self) -> None:
        self._all: deque[StoredAnswer] = deque()
        self._bytes = 0
        self._count = 0
        self._lock = threading.Lock()

    def store(self, request: Header, status: Status, frames: Sequence[OutFrame], sent_to: str = "") -> None:
        """Stores a copy of an answer; discards older ones to make room.

        An answer that was `sent_to` its controller is not returned before `release`.
        """
        most, failed = settings.kept_results_size, status == Status.FAILURE
        size = 0 if failed else size_of(frames)
        error = "its actor had failed" if failed else "" if status == Status.VALUE else exception_text(frames).line
        body = None if failed or size > most else [bytes(in_memory(frame)) for frame in frames]
        with self._lock:
            self._count += 1
            answer = StoredAnswer(
                self._count, request.mesh, request.rank, request.method, request.call, request.index, request.extent,
                int(status), time.time(), size, body, error, sent_to, request.unread[0] if sent_to else 0,
            )  # fmt: skip
            self._all.append(answer)
            self._bytes += size if body is not None else 0
            while len(self._all) > MOST:
                self._strip(self._all.popleft())
            for old in self._all:
                if self._bytes <= most:
                    break
                self._strip(old)

    def _strip(self, answer: StoredAnswer) -> None:
        if answer.frames is not None:
            answer.frames = None
            self._bytes -= answer.size

    def of(self, meshes: Collection[str]) -> list[StoredAnswer]:
        """Returns the answers of some meshes, the oldest first."""
        with self._lock:
            return [answer for answer in self._all if answer.mesh in meshes and not answer.sent_to]

    def take_new(self, meshes: Collection[str]) -> list[StoredAnswer]:
        """Returns the answers of some meshes that no earlier call has returned."""
        new = [answer for answer in self.of(meshes) if not answer.listed]
        for answer in new:
            answer.listed = True
        return new

    def body(self, number: int) -> list[bytes] | None:
        """Returns the frames of an answer, None if they were discarded."""
        with self._lock:
            return next((answer.frames for answer in self._all if answer.number == number), None)

    def discard_read(self, controller: str, unread: Sequence[int]) -> None:
        """Discards answers that a controller has read, by `Header.unread` of one of its messages, in any order."""
        following, *named = unread
        last = named[-1] if len(named) >= MOST_NAMED else following
        with self._lock:
            read = [
                answer
                for answer in self._all
                if answer.sent_to == controller and answer.unread < last and answer.unread not in named
            ]
            self._discard(read)

    def release(self, controllers: Collection[str]) -> None:
        """Makes answers that were sent to controllers which have left count as not received."""
        with self._lock:
            for answer in self._all:
                if answer.sent_to in controllers:
                    answer.sent_to = ""

    def forget(self, numbers: Collection[int]) -> None:
        """Discards these answers."""
        with self._lock:
            self._discard([answer for answer in self._all if answer.number in numbers])

    def _discard(self, answers: Sequence[StoredAnswer]) -> None:
        for answer in answers:
            self._strip(answer)
            self._all.remove(answer)


class UnreadCalls:
    """A controller's calls of one mesh of processes whose results have not been read, by number. Thread-safe.

    `announce` must send ranks the unread calls, as in `Header.unread`, when no further call does.
    """

    def __init__(self, clock: Clock, announce: Callable[[tuple[int, ...]], object]) -> None:
        self._clock, self._announce = clock, announce
        self._calls: dict[int, weakref.ref[PendingCall[object]]] = {}
        self._count = 0
        self._sent: tuple[int, ...] = ()  # numbers that ranks know as unread
        self._last_call = 0.0
        self._armed = self._closed = False
        self._lock = threading.Lock()

    def add(self, call: "PendingCall[object]") -> None:
        """Numbers a call that is about to be sent. It counts as read once its future has been read, or dropped."""
        with self._lock:
            self._count += 1
            number = self._count
            # The callback may run in the middle of anything: it does nothing else.
            self._calls[number] = weakref.ref(call, lambda _: self._calls.pop(number, None))
            self._last_call = self._clock.monotonic()
        call.on_read = lambda: self._read(number)
        earlier = self._unread(but=number)
        self._sent = (*earlier, number)
        self._arm()
        call.unread = (number, *earlier)

    def state(self, *, waiting_only: bool = False) -> tuple[int, ...]:
        """Returns `Header.unread` of a call after all others; with `waiting_only`, those with a result are read."""
        with self._lock:
            following = self._count + 1
        if not waiting_only:
            return (following, *self._unread())
        calls = [(number, call()) for number, call in tuple(self._calls.items())]
        waiting = [number for number, call in calls if call is not None and call.waits]
        return (following, *waiting[:MOST_NAMED])

    def close(self) -> None:
        """Stops announcements."""
        self._closed = True

    def _unread(self, but: int = 0) -> list[int]:
        while True:
            with contextlib.suppress(RuntimeError):  # a call was read meanwhile
                return [number for number in itertools.islice(self._calls, MOST_NAMED + 1) if number != but][
                    :MOST_NAMED
                ]

    def _read(self, number: int) -> None:
        self._calls.pop(number, None)
        self._arm()

    def _arm(self, seconds: float = _PAUSE_S) -> None:
        with self._lock:
            if self._armed or self._closed:
                return
            self._armed = True
        self._clock.later(seconds, self._pause)

    def _pause(self) -> None:
        with self._lock:
            self._armed = False
            seconds = self._last_call + _PAUSE_S - self._clock.monotonic()
        if seconds > 0:
            self._arm(seconds)
            return
        state = self.state()
        if state[1:] != self._sent and not self._closed:
            self._sent = state[1:]
            self._announce(state)
