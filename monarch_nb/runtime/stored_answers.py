"""Answers for a controller that has detached: stored, within bounds, for the next one that attaches."""

import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from typing import Any

from msgspec import Struct

from monarch_nb.settings import settings
from monarch_nb.wire import Header, Status, exception_text

MOST = 1000  # answers of one process; older ones are discarded
Extent = tuple[tuple[str, ...], tuple[int, ...]]


class StoredAnswer(Struct):
    """One answer. `frames` is None if it was too large, or was discarded for later ones."""

    number: int  # in this process
    mesh: str
    rank: int
    endpoint: str
    call: str
    index: int  # its place in the call
    extent: Extent | None  # of what was called; None for one rank of a call that was sent to each by itself
    status: int
    at: float  # wall clock
    size: int  # bytes
    frames: list[bytes] | None
    error: str = ""  # what it raised, in a line
    listed: bool = False  # `take_new` has returned it


class StoredAnswers:
    """The stored answers of one process. Any thread."""

    def __init__(self) -> None:
        self._all: deque[StoredAnswer] = deque()
        self._bytes = 0
        self._count = 0
        self._lock = threading.Lock()

    def store(self, request: Header, status: Status, frames: Sequence[Any]) -> None:
        """Stores a copy of an answer; discards older ones to make room."""
        most, failed = settings.kept_results_size, status == Status.FAILURE
        size = 0 if failed else sum(memoryview(frame).nbytes for frame in frames)
        error = "its actor had failed" if failed else "" if status == Status.VALUE else exception_text(frames).line
        body = None if failed or size > most else [bytes(frame) for frame in frames]
        with self._lock:
            self._count += 1
            answer = StoredAnswer(
                self._count, request.mesh, request.rank, request.method, request.call, request.index, request.extent,
                int(status), time.time(), size, body, error,
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
            return [answer for answer in self._all if answer.mesh in meshes]

    def take_new(self, meshes: Collection[str]) -> list[StoredAnswer]:
        """Returns the answers of some meshes that no earlier call has returned."""
        fresh = [answer for answer in self.of(meshes) if not answer.listed]
        for answer in fresh:
            answer.listed = True
        return fresh

    def body(self, number: int) -> list[bytes] | None:
        """Returns the frames of an answer, None if they were discarded."""
        with self._lock:
            return next((answer.frames for answer in self._all if answer.number == number), None)

    def forget(self, numbers: Collection[int]) -> None:
        """Discards these answers."""
        with self._lock:
            for answer in [answer for answer in self._all if answer.number in numbers]:
                self._strip(answer)
                self._all.remove(answer)
