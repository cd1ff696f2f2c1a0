"""Bursts: messages that a thread sends back to back leave in one write.

No message waits for others that may not follow. The first messages of a burst are written at once; later ones are held
back until the burst is long, large or old enough, until its thread begins to wait (`flush`), or until the reading
thread, which is woken for that, calls `flush_old`.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from monarch_nb.transport.streams import UnixStream


APART_S = 0.0003  # messages further apart are no burst
SINGLE_WRITES = 4  # messages at the start of a burst that are written one by one
MOST = 16  # most messages held back
LARGEST = 16 * 1024  # most bytes held back
LONGEST_S = 0.0003  # longest time that a message is held back


class Bursts:
    """The connections of one process with messages held back. Thread-safe."""

    __slots__ = ("_nudge", "holders", "last", "pauses")

    def __init__(self, nudge: Callable[[], None]) -> None:
        """`nudge` makes the reading thread call `flush_old` soon."""
        self._nudge = nudge
        self.holders: set[UnixStream] = set()  # connections that hold messages back, or did until recently
        self.pauses = 0  # number of waits begun by threads; messages after one begin a new burst
        self.last = float("-inf")  # time of the last message held back

    def add(self, holder: "UnixStream", now: float) -> None:
        """Records that a connection holds back a message."""
        self.last = now
        if holder not in self.holders:
            self.holders.add(holder)
            self._nudge()

    def flush(self) -> None:
        """Writes all messages held back, since the calling thread is about to wait, perhaps for a reply to one."""
        self.pauses += 1
        while self.holders:
            try:
                holder = self.holders.pop()
            except KeyError:  # another thread has taken the last one
                return
            holder.flush()

    def flush_old(self, now: float) -> None:
        """Writes messages that were held back for long enough: their thread does something else now."""
        for holder in tuple(self.holders):
            if now - holder.held_since() >= LONGEST_S:
                self.holders.discard(holder)
                holder.flush()


class Burst:
    """The burst of messages on one connection."""

    __slots__ = ("_last", "_pauses", "_row", "count", "since", "size")

    def __init__(self) -> None:
        self._last = 0.0
        self._row = 0
        self._pauses = -1
        self.written()

    def written(self) -> None:
        """Records that all messages held back have been written."""
        self.count = self.size = 0
        self.since = 0.0

    def holds(self, size: int, now: float, pauses: int) -> bool:
        """Returns whether a message of `size` bytes is to be held back; else it is written with those held back."""
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
