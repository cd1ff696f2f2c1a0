"""Actors of the tests with real servers."""

import os

from monarch_nb.actor import Actor, endpoint


class Counter(Actor):
    """Counts calls, so that a rank that was started anew is told from one that lived on."""

    def __init__(self) -> None:
        self.count = 0

    @endpoint
    def add(self) -> tuple[int, int]:
        """How often it was called, and its process."""
        self.count += 1
        return self.count, os.getpid()
