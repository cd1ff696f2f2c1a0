"""The incarnations of processes, one after the other at the same address: whose a link is, and which are over. Pure.

An incarnation is numbered by when it began, in milliseconds of its own machine's clock. The incarnations of its links
hold that number, so that a link knows from which process a frame came, and a report that an incarnation is over hits no
later one, however late it comes.
"""

import itertools
import time

_LINKS_BITS = 22  # so many links an incarnation can number


def new_incarnation() -> int:
    """The number of an incarnation that begins now."""
    return time.time_ns() // 1_000_000


def process_incarnation(link: int) -> int:
    """The incarnation of the process that has a link of this incarnation; 0 for 0."""
    return link >> _LINKS_BITS


def first_link_incarnation(incarnation: int) -> int:
    """Links of that process and of later ones at its address have no smaller incarnation."""
    return incarnation << _LINKS_BITS


class LinkIncarnations:
    """Incarnations for the links of one process: each larger than those before, and than all of earlier processes."""

    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self._count = itertools.count(first_link_incarnation(incarnation) + 1)

    def next(self) -> int:
        """The incarnation of one more link. Thread-safe."""
        return next(self._count)


class Incarnations:
    """The ends of other processes that this one knows of, by address and incarnation. Not thread-safe."""

    def __init__(self, remembered: int = 4096) -> None:
        self.ended: dict[str, str] = {}  # why, of those at whose address nobody lives as far as is known
        self._over: dict[str, int] = {}  # the latest incarnation that is known to be over
        self._remembered = remembered

    def lost(self, address: str, incarnation: int, reason: str, last_seen: int = 0) -> bool:
        """Ends an incarnation and earlier ones (0: unknown which). `last_seen` is the latest that sent a frame.

        False if a later incarnation is known: the address stays as it is.
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
        """The earliest incarnation of a process that may still be there."""
        return self._over.get(address, -1) + 1

    def back(self, address: str, incarnation: int = 0) -> None:
        """Somebody lives there: this incarnation, if it is known which."""
        self.ended.pop(address, None)
        self._over.pop(address, None)
        if incarnation:
            self._over[address] = incarnation - 1

    def speaks(self, address: str, incarnation: int) -> bool:
        """Returns whether to listen to an incarnation: not to the late words of one that is over."""
        if incarnation < self.since(address):
            return False
        self.ended.pop(address, None)
        return True
