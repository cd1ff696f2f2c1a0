"""Bursts: messages that a thread sends back to back leave in one write.

Nothing waits for company that may not come. The first messages of a row are written at once; later ones are held back
until the row is long, large or old enough, until its thread begins to wait (`flush`), or until the reading thread,
which is woken for that, comes by (`flush_old`).
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from monarch_nb.transport.streams import UnixStream


APART_S = 0.0003  # messages further apart are no burst
SINGLE_WRITES = 4  # the first of a row are written one by one
MOST = 16  # messages held back
LARGEST = 16 * 1024  # bytes held back
LONGEST_S = 0.0003  # the oldest message is held back


class Bursts:
    """The connections of one process that hold something back. Thread-safe."""

    __slots__ = ("_nudge", "holders", "last", "pauses")

    def __init__(self, nudge: Callable[[], None]) -> None:
        """`nudge` has `flush_old` called soon by the reading thread."""
        self._nudge = nudge
        self.holders: set[UnixStream] = set()  # those that hold something back, or did until just now
        self.pauses = 0  # how often a thread has begun to wait: what is sent after that begins a new row
        self.last = float("-inf")  # when a message was held back last

    def add(self, holder: "UnixStream", now: float) -> None:
        """A connection holds back a message."""
        self.last = now
        if holder not in self.holders:
            self.holders.add(holder)
            self._nudge()

    def flush(self) -> None:
        """Write all that is held back: the calling thread is about to wait, perhaps for an answer to it."""
        self.pauses += 1
        while self.holders:
            try:
                holder = self.holders.pop()
            except KeyError:  # another thread has taken it
                return
            holder.flush()

    def flush_old(self, now: float) -> None:
        """Write what has been held back for long enough: the thread that sent it does something else now."""
        for holder in tuple(self.holders):
            if now - holder.held_since() >= LONGEST_S:
                self.holders.discard(holder)
                holder.flush()


class Burst:
    """The row of messages on one connection."""

    __slots__ = ("_last", "_pauses", "_row", "count", "since", "size")

    def __init__(self) -> None:
        self._last = 0.0
        self._row = 0
        self._pauses = -1
        self.written()

    def written(self) -> None:
        """Notes that all messages that were held back have been written."""
        self.count = self.size = 0
        self.since = 0.0

    def holds(self, size: int, now: float, pauses: int) -> bool:
        """Returns whether a message of `size` bytes is to be held back; else it is written with those that were."""
        if now - self._last > APART_S or pauses != self._pauses:
            self._row, self._pauses = 0, pauses
        self._last = now
        self._row += 1
        if self._row <= SINGLE_WRITES:
            return False
        if not self.count:
            self.since = now
        self.count += 1
        self.size += size
        return self.count < MOST and self.size < LARGEST and now - self.since < LONGEST_S
