"""How one rank is: the facts that were told of it, and the one word that follows from them. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from monarch_nb.store.events import Asked, Condition, Doings

RankState = Literal["starting", "idle", "busy", "paused", "unresponsive", "healing", "failed", "stopped"]


@dataclass(slots=True)
class Rank:
    """The facts about one rank of a mesh."""

    condition: Condition
    incarnation: int = 0
    since: float = 0.0  # of the condition
    unanswered: float | None = None  # procs: since when it does not answer
    paused: float | None = None  # since when the debugger holds it
    doing: Doings | None = None  # as its process reports, a little later than it is so
    asked: Asked | None = None  # a call of this process that it has not answered
    busy: dict[str, Doings | Asked] | None = None  # procs: what actors on it run, by the uid of their mesh
    shown: RankState = "starting"  # what the state says of it


class RankTable:
    """The ranks of one mesh by index. Those of which nothing was told are one record: most of ten thousand."""

    __slots__ = ("_count", "_own", "usual")

    def __init__(self, count: int, usual: Rank) -> None:
        self._count = count
        self.usual = usual
        self._own: dict[int, Rank] = {}

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Rank:
        """One of them, to be read."""
        return self._own.get(index, self.usual)

    def __iter__(self) -> Iterator[Rank]:
        return map(self.__getitem__, range(self._count))

    def own(self, index: int) -> Rank:
        """One of them, to be written: from now on it has a record of its own."""
        rank = self._own.get(index)
        if rank is None:
            rank = self._own[index] = replace(self.usual)
        return rank

    def give(self, index: int, other: "RankTable", place: int) -> None:
        """Hands the record of one on to another table, if it has one of its own."""
        if index in self._own:
            other._own[place] = self._own[index]

    def told(self) -> list[tuple[int, Rank]]:
        """Those with records of their own."""
        return list(self._own.items())

    @property
    def silent(self) -> int:
        """How many have none."""
        return self._count - len(self._own)

    def records(self) -> list[Rank]:
        """Each record there is, once."""
        return [self.usual, *self._own.values()]


def working(rank: Rank) -> Doings | Asked | None:
    """What it runs, as far as anybody has said; None if nothing."""
    return rank.doing if rank.doing is not None and rank.doing.doing == "busy" else rank.asked


class Shown(NamedTuple):
    """What is shown of a rank: the word, since when, and of a busy one what runs."""

    state: RankState
    since: float
    running: Doings | Asked | None = None


def rank_state(rank: Rank, proc: Rank | None) -> Shown:
    """The state of a rank; `proc` is the process that an actor is on, where that is known.

    What ended or heals it goes before what holds it up, and that before what it does.
    """
    if rank.condition != "alive":
        return Shown(rank.condition, rank.since)
    if rank.paused is not None:
        return Shown("paused", rank.paused)
    unanswered = rank.unanswered if proc is None else proc.unanswered
    if unanswered is not None:
        return Shown("unresponsive", unanswered)
    if rank.doing is not None and rank.doing.doing != "idle":
        return Shown(rank.doing.doing, rank.doing.since, rank.doing)
    if rank.asked is not None:
        return Shown("busy", rank.asked.since, rank.asked)
    if rank.busy:
        running = next(iter(rank.busy.values()))
        return Shown("busy", running.since, running)
    return Shown("idle", rank.since)
