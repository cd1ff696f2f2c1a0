"""The lives of processes, one after the other at the same address: whose a link is, and which are over. Pure.

A life is numbered by when it began, in milliseconds of its own machine's clock. The epochs of its links hold that
number, so that a link knows which life it has heard, and the word that a life is over hits no later one, however late
it comes.
"""

import itertools
import time

__all__ = ["Epochs", "Lives", "first_epoch", "life_of", "new_life"]

_LINKS_BITS = 22  # so many links a life can number


def new_life() -> int:
    """The number of a life that begins now."""
    return time.time_ns() // 1_000_000


def life_of(epoch: int) -> int:
    """Which life of a process has a link with this epoch; 0 for 0."""
    return epoch >> _LINKS_BITS


def first_epoch(life: int) -> int:
    """Links of that life and of later ones have no smaller epoch."""
    return life << _LINKS_BITS


class Epochs:
    """Numbers for the links of one life: each larger than those before it, and than all of earlier lives."""

    def __init__(self, life: int) -> None:
        self.life = life
        self._count = itertools.count(first_epoch(life) + 1)

    def next(self) -> int:
        """The epoch of one more link. Any thread."""
        return next(self._count)


class Lives:
    """What one process knows of the ends of others: who is gone, and which lives are over. Not thread-safe."""

    def __init__(self, remembered: int = 4096) -> None:
        self.gone: dict[str, str] = {}  # why, of those at whose address nobody lives as far as is known
        self._over: dict[str, int] = {}  # the latest life that is known to be over
        self._remembered = remembered

    def lost(self, address: str, life: int, reason: str, heard: int = 0) -> bool:
        """That life and those before it are over (0: nobody knows which); `heard` is the latest that has spoken here.

        False if a later life is known: the address stays as it is.
        """
        over = self._over.get(address, 0)
        if life and (heard > life or (over >= life and address not in self.gone)):
            return False
        for known in (self.gone, self._over):
            known.pop(address, None)  # the latest last
            while len(known) >= self._remembered:
                del known[next(iter(known))]
        self.gone[address] = reason
        self._over[address] = max(life, over)
        return True

    def since(self, address: str) -> int:
        """The earliest life of a process that may still be there."""
        return self._over.get(address, -1) + 1

    def back(self, address: str, life: int = 0) -> None:
        """Somebody lives there: this life, if it is known which."""
        self.gone.pop(address, None)
        self._over.pop(address, None)
        if life:
            self._over[address] = life - 1

    def speaks(self, address: str, life: int) -> bool:
        """Whether to listen to a life: not to the late words of one that is over."""
        if life < self.since(address):
            return False
        self.gone.pop(address, None)
        return True
