"""Whether an operation that failed on one rank has failed on all: a pure machine, for the controller.

Where all ranks fail alike, as for an index that is out of range everywhere, no collective waits for anybody, and they
go on. Where one fails alone, the others wait for it in this operation's collectives or in those of a later one, and
nothing but the end of the process group frees them. They are asked how far they are: who is past the operation has not
failed there, and who stays in it while nobody is behind waits for those who left it.
"""

from collections.abc import Mapping
from enum import Enum

from monarch_nb.tensor.failure import Failure

STAYS_S = 0.05  # in the operation, with nobody behind, after which a rank is taken to wait in a collective
STEP_STAYS_S = 1.0  # likewise, in a compiled step
MOST_S = 5.0  # for ranks that are still on their way to the operation


class Verdict(Enum):
    """What is to become of the ranks of an operation."""

    GO_ON = "go on"
    CUT = "cut"


class Trouble:
    """One operation that failed on some rank; times are seconds of any clock.

    One of a compiled step is known to be reached when the step has `begun`: how far it is in there, nobody tells.
    """

    def __init__(self, ranks: tuple[int, ...], number: int, at: float, begun: int | None = None) -> None:
        self.ranks, self.number, self.since = ranks, number if begun is None else begun, at
        self._stays = STAYS_S if begun is None else STEP_STAYS_S
        self.failures: dict[int, Failure] = {}
        self._there: float | None = None  # since when all others are in the operation

    @property
    def others(self) -> list[int]:
        """Ranks that have told of no failure."""
        return [rank for rank in self.ranks if rank not in self.failures]

    def failed(self, rank: int, failure: Failure) -> Verdict | None:
        """A rank tells of its failure."""
        self.failures[rank] = failure
        return None if self.others else Verdict.GO_ON

    def told(self, done: Mapping[int, int], at: float) -> Verdict | None:
        """How many operations the others have done. Those that do not answer are not in it."""
        others = self.others
        if not others:
            return Verdict.GO_ON
        if any(done.get(rank, 0) > self.number for rank in others) or at - self.since > MOST_S:
            return Verdict.CUT
        if any(done.get(rank, -1) < self.number for rank in others):
            self._there = None
            return None
        if self._there is None:
            self._there = at
        return Verdict.CUT if at - self._there >= self._stays else None
