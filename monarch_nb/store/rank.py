"""One rank: reported facts, and the state that follows from them. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from monarch_nb.store.events import ActivityChanged, CallPending, Condition
from monarch_nb.store.records import RankState


@dataclass(slots=True)
class Rank:
    """The facts about one rank of a mesh."""

    condition: Condition
    incarnation: int = 0
    since: float = 0.0  # of the condition
    unanswered: float | None = None  # procs: the time since which the process has not answered
    paused: float | None = None  # the time since which the debugger has held it
    doing: ActivityChanged | None = None  # reported by its process, with a small delay
    pending: CallPending | None = None  # a pending call of this process to the rank
    # Of procs: running calls of actors on it, by the uid of their mesh.
    busy: dict[str, ActivityChanged | CallPending] | None = None
    shown: RankState = "starting"  # in the document


class RankTable:
    """The ranks of one mesh by index. Ranks without reports share one record, as most of ten thousand do."""

    __slots__ = ("_count", "_own", "usual")

    def __init__(self, count: int, usual: Rank) -> None:
        self._count = count
        self.usual = usual
        self._own: dict[int, Rank] = {}

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Rank:
        """Returns a rank's record, for reading."""
        return self._own.get(index, self.usual)

    def __iter__(self) -> Iterator[Rank]:
        return map(self.__getitem__, range(self._count))

    def own(self, index: int) -> Rank:
        """Returns a rank's own record, for writing; created when needed."""
        rank = self._own.get(index)
        if rank is None:
            rank = self._own[index] = replace(self.usual)
        return rank

    def give(self, index: int, target: "RankTable", new_index: int) -> None:
        """Copies a rank's own record, if it has one, to another table."""
        if index in self._own:
            target._own[new_index] = self._own[index]

    def recorded(self) -> list[tuple[int, Rank]]:
        """Returns ranks with their own records."""
        return list(self._own.items())

    @property
    def silent(self) -> int:
        """The number of ranks without their own record."""
        return self._count - len(self._own)

    def records(self) -> list[Rank]:
        """Returns all records, the shared one included."""
        return [self.usual, *self._own.values()]


def working(rank: Rank) -> ActivityChanged | CallPending | None:
    """Returns the call that a rank runs, as far as known; None for none."""
    return rank.doing if rank.doing is not None and rank.doing.doing == "busy" else rank.pending


class ShownState(NamedTuple):
    """The state in the document, its beginning, and the running call of a busy rank."""

    state: RankState
    since: float
    running: ActivityChanged | CallPending | None = None


def rank_state(rank: Rank, proc: Rank | None) -> ShownState:
    """Returns the state of a rank; `proc` is the process of an actor, if known.

    The condition takes precedence, then causes that hold the rank up, then its activity.
    """
    if rank.condition != "alive":
        return ShownState(rank.condition, rank.since)
    if rank.paused is not None:
        return ShownState("paused", rank.paused)
    unanswered = rank.unanswered if proc is None else proc.unanswered
    if unanswered is not None:
        return ShownState("unresponsive", unanswered)
    if rank.doing is not None and rank.doing.doing != "idle":
        return ShownState(rank.doing.doing, rank.doing.since, rank.doing)
    if rank.pending is not None:
        return ShownState("busy", rank.pending.since, rank.pending)
    if rank.busy:
        running = next(iter(rank.busy.values()))
        return ShownState("busy", running.since, running)
    return ShownState("idle", rank.since)
