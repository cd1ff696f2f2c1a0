"""How one rank is: the facts that were told of it, and the one word that follows from them. Pure."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from monarch_nb.store.events import Condition, Doings

RankState = Literal["starting", "idle", "busy", "paused", "unresponsive", "healing", "failed", "stopped"]


@dataclass(slots=True)
class Rank:
    """The facts about one rank of a mesh."""

    condition: Condition
    incarnation: int = 0
    since: float = 0.0  # of the condition
    unanswered: float | None = None  # procs: since when it does not answer
    paused: float | None = None  # since when the debugger holds it
    doing: Doings | None = None
    busy: dict[str, Doings] | None = None  # procs: what actors on it run, by the uid of their mesh
    shown: RankState = "starting"  # what the state says of it


class Shown(NamedTuple):
    """What is shown of a rank: the word, since when, and of a busy one what runs."""

    state: RankState
    since: float
    running: Doings | None = None


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
    if rank.busy:
        running = next(iter(rank.busy.values()))
        return Shown("busy", running.since, running)
    return Shown("idle", rank.since)
