"""Interfaces of a network and of time, implemented by sockets and threads, and by the memory network; and the time of
this machine: its delayed calls run on one sleeping thread per process, started when first needed.
"""

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from monarch_nb.transport.parcel import Parcel
from monarch_nb.wire import OutFrame
from monarch_nb.wire.header import Header

if TYPE_CHECKING:
    from monarch_nb.transport.keys import Keys, KeyStep

logger = logging.getLogger(__name__)

LONGEST_PAUSE_S = 1e6  # of a thread that sleeps: some platforms refuse longer ones


class Clock(Protocol):
    """The time for decisions, and delayed calls. Functions that it runs must not block."""

    def monotonic(self) -> float:
        """Returns the seconds since some moment; never decreases."""

    def later(self, seconds: float, function: Callable[[], object]) -> None:
        """Runs `function` once, `seconds` from now."""

    def every(self, seconds: float, function: Callable[[], bool]) -> None:
        """Runs `function` every `seconds` while it returns True."""

    def close(self) -> None:
        """Drops all delayed calls."""


def repeat(
    schedule: Callable[[float, Callable[[], object]], object], seconds: float, function: Callable[[], bool]
) -> None:
    """Runs `function` by a clock's `later`, every `seconds`, while it returns True."""

    def again() -> None:
        if function():
            schedule(seconds, again)

    schedule(seconds, again)


class ThreadClock:
    """Runs short functions at given times, on a thread of its own; they must not block."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._heap: list[tuple[float, int, Callable[[], object]]] = []
        self._count = itertools.count()
        self._thread: threading.Thread | None = None
        self._closed = False

    @staticmethod
    def monotonic() -> float:
        """Returns the seconds since some moment; never decreases."""
        return time.monotonic()

    def later(self, seconds: float, function: Callable[[], object]) -> None:
        """Runs `function` once, `seconds` from now, on the clock's thread."""
        with self._changed:
            if self._closed:
                return
            heapq.heappush(self._heap, (time.monotonic() + seconds, next(self._count), function))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="monarch-clock", daemon=True)
                self._thread.start()
            self._changed.notify()

    def every(self, seconds: float, function: Callable[[], bool]) -> None:
        """Runs `function` every `seconds` while it returns True."""
        repeat(self.later, seconds, function)

    def close(self) -> None:
        """Drops all delayed calls; ends the thread."""
        with self._changed:
            self._closed = True
            self._heap.clear()
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._closed and (not self._heap or self._heap[0][0] > time.monotonic()):
                    pause = max(0.0, self._heap[0][0] - time.monotonic()) if self._heap else None
                    self._changed.wait(None if pause is None else min(pause, LONGEST_PAUSE_S))
                if self._closed:
                    return
                _, _, function = heapq.heappop(self._heap)
            try:
                function()
            except BaseException:
                logger.exception("a timed function failed")


class Transport(Protocol):
    """One process on a network. Messages and losses are passed to the functions given to its constructor."""

    @property
    def address(self) -> str:
        """The address of this process."""

    @property
    def incarnation(self) -> int:
        """The number of this process among those at its address, one after the other; later ones are larger."""

    @property
    def tcp_endpoint(self) -> str | None:
        """The endpoint at which other machines reach it, if it listens for them."""

    @property
    def run_folder(self) -> Path:
        """The folder of this process on its host."""

    def start(self) -> None:
        """Sends and receives from now on."""

    def close(self, linger_s: float = 1.0) -> None:
        """Leaves the network; blocks up to `linger_s` seconds until sent messages are acknowledged."""

    def listen(self, bind: str, keys: "Keys | None", insecure_loopback: bool = False) -> str:
        """Listens for other machines from now on; returns the endpoint. Raises TransportError if it is unavailable."""

    def change_keys(self, step: "KeyStep", old: "Keys", new: "Keys") -> None:
        """Takes one step of a change of the keys for connections to other machines."""

    def shares_gpu(self, address: str) -> bool:
        """Returns whether a process sees the same GPUs as this one, so that files of a GPU can be sent to it."""

    def snapshot(self, frames: Sequence[OutFrame]) -> Parcel:
        """Copies buffers into a parcel that may be sent many times."""

    def send(self, header: Header, parcel: Parcel, *, lane: int = 0) -> None:
        """Sends a message from any thread. Blocks, interruptibly, while the receiver is behind by its window.

        Raises TransportError when the destination is gone or no route to it is known.
        """

    def flush(self) -> None:
        """Writes messages that are held back in bursts."""

    def undeliverable(self, header: Header, parcel: Parcel, reason: str) -> None:
        """Returns a message that cannot be received to its sender."""

    def consumed(self, parcel: Parcel) -> None:
        """Records that the application took a message: its sender may send more."""

    def settled(self, function: Callable[..., object], *args: object) -> None:
        """Runs `function(*args)` once messages that have arrived by now are read."""

    def learn(
        self,
        target: str,
        endpoint: str | None = None,
        run_folder: Path | None = None,
        via: str | None = None,
        *,
        keys: "Keys | None" = None,
        insecure_loopback: bool = False,
        incarnation: int = 0,
    ) -> None:
        """Records a route to a host or a process."""

    def forget(self, target: str, reason: str, incarnation: int = 0) -> None:
        """Records the end of a process, or host: its unacknowledged messages are reported as lost."""

    def connected(self, target: str) -> bool:
        """Returns whether the connection to another machine's process is up."""

    def never_replied(self, address: str) -> bool:
        """Returns whether a process was written to and has never replied: it may not exist."""
