"""The successive incarnations of processes at one address: which one a link belongs to, and which have ended. Pure.

The number of an incarnation is its start in milliseconds of its own machine's clock. The incarnations of its links
contain that number, so that a link knows the process that sent a frame, and a report that an incarnation has ended
affects no later one, however late it arrives.
"""

import itertools
import time

_LINKS_BITS = 22  # bits for the number of a link within an incarnation


def new_incarnation() -> int:
    """Returns the number of an incarnation that begins now."""
    return time.time_ns() // 1_000_000


def process_incarnation(link: int) -> int:
    """Returns the incarnation of the process that has a link of this incarnation; 0 for 0."""
    return link >> _LINKS_BITS


def first_link_incarnation(incarnation: int) -> int:
    """Returns the smallest incarnation of links of a process and of later ones at its address."""
    return incarnation << _LINKS_BITS


class LinkIncarnations:
    """Incarnations for the links of one process: each larger than those before, and than all of earlier processes."""

    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self._count = itertools.count(first_link_incarnation(incarnation) + 1)

    def next(self) -> int:
        """Returns the incarnation of one more link. Thread-safe."""
        return next(self._count)


class Incarnations:
    """The known ends of other processes, by address and incarnation. Not thread-safe."""

    def __init__(self, remembered: int = 4096) -> None:
        self.ended: dict[str, str] = {}  # reasons, by address without a known living process
        self._over: dict[str, int] = {}  # the latest incarnation known to have ended
        self._remembered = remembered

    def lost(self, address: str, incarnation: int, reason: str, last_seen: int = 0) -> bool:
        """Ends an incarnation and earlier ones (0: unknown which). `last_seen` is the latest that sent a frame.

        Returns False if a later incarnation is known: the address stays as it is.
        """
        over = self._over.get(address, 0)
        if incarnation and (last_seen > incarnation or (over >= incarnation and address not in self.ended)):
            return False
        for ends in (self.ended, self._over):
            ends.pop(address, None)  # the latest last
            while len(ends) >= self._remembered:
                del ends[next(iter(ends))]
        self.ended[address] = reason
        self._over[address] = max(incarnation, over)
        return True

    def since(self, address: str) -> int:
        """Returns the earliest incarnation of a process that may still live."""
        return self._over.get(address, -1) + 1

    def back(self, address: str, incarnation: int = 0) -> None:
        """Records that a process lives at an address: this incarnation, if known."""
        self.ended.pop(address, None)
        self._over.pop(address, None)
        if incarnation:
            self._over[address] = incarnation - 1

    def speaks(self, address: str, incarnation: int) -> bool:
        """Returns whether to accept frames of an incarnation, which may have ended."""
        if incarnation < self.since(address):
            return False
        self.ended.pop(address, None)
        return True
