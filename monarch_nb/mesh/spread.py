"""One engine message to many ranks of a mesh, along a tree of agents, and their answers gathered on the way back.

It costs who asks a few messages, however many hosts there are, as a call of all of them does.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from monarch_nb.mesh.requests import request, settle
from monarch_nb.mesh.sending import DIRECT
from monarch_nb.routing import indices, plan_cast
from monarch_nb.runtime import ProcState, Runtime, when_done
from monarch_nb.wire import Flags, Header, Kind, Lane, Run, Status, Verb, encode_body, unfold

if TYPE_CHECKING:
    from monarch_nb.transport import Parcel

Q = TypeVar("Q", bound=msgspec.Struct)
R = TypeVar("R", bound=msgspec.Struct)


class _Answers(Generic[R]):
    """Those of one message, by the places of ranks in it; on the reading thread."""

    def __init__(self, engine: Runtime, verb: Verb[Any, R], size: int, over: Callable[[], None]) -> None:
        self.found: dict[int, R] = {}
        self._engine, self._verb, self._over = engine, verb, over
        self._left = set(range(size))
        self._lock = threading.Lock()
        self.number = engine.ports.open(self)

    def arrive(self, header: Header, parcel: "Parcel") -> None:
        """An answer, or several folded by a host agent."""
        try:
            if header.kind == Kind.FOLDED:
                for folded in unfold(header, parcel.frames):
                    self._take((place for span in folded.places for place in span), folded.header, folded.frames)
            else:
                self._take((header.index,), header, parcel.frames)
        finally:
            self._engine.node.consumed(parcel)

    def _take(self, places: Iterable[int], header: Header, frames: Sequence[Any]) -> None:
        answer = None
        if header.status == Status.VALUE and frames:
            answer = self._verb.decode_reply(frames[0])
        self._end(places, answer)

    def lost(self, header: Header, reason: str) -> None:
        """Some will not answer."""
        self._end((header.index,) if header.plan is None else indices(header.plan.runs), None)

    def _end(self, places: Iterable[int], answer: R | None) -> None:
        with self._lock:
            new = self._left.intersection(places)
            self._left -= new
            if answer is not None:
                self.found.update(dict.fromkeys(new, answer))
            last = bool(new) and not self._left
        if last:
            self._over()


def ask_ranks(
    engine: Runtime,
    procs: ProcState,
    ranks: Sequence[int],
    verb: Verb[Q, R],
    body: Q,
    then: Callable[[dict[int, R]], object],
    *,
    within: float,
) -> None:
    """Asks the processes of base ranks the same, and goes on with what was answered, by rank, after `within` seconds at
    the latest. Does not block.

    A request may come twice: who has not answered half-way is asked alone, for an agent on the way there may be stuck.
    """
    found: dict[int, R] = {}
    turns = iter((True,))

    def over() -> None:
        if next(turns, False):
            then(found)

    def each(left: Sequence[int]) -> None:
        asked = {rank: request(engine, procs.address(rank), verb, body) for rank in left}

        def take(_: object = None) -> None:
            done = ((rank, one) for rank, one in asked.items() if one.done() and one.exception(0) is None)
            found.update({rank: one.get(0) for rank, one in done})
            over()

        when_done(settle(list(asked.values()), lambda: ""), take)
        engine.later(within if left is ranks else within / 2, take)

    if _are_near(engine, procs, ranks):
        each(ranks)
        return
    halves = iter((True,))

    def rest() -> None:
        if next(halves, False):
            engine.ports.close(answers.number)
            found.update({ranks[place]: answer for place, answer in answers.found.items()})
            each([rank for rank in ranks if rank not in found])

    answers = _Answers(engine, verb, len(ranks), rest)
    parcel = engine.node.snapshot([encode_body(body)])
    for agent, plan in plan_cast(procs.layout, list(_runs(procs, ranks))):
        header = Header(
            Kind.CAST, agent, engine.address, method=verb.name, port=answers.number, plan=plan, flags=Flags.TO_ENGINES
        )
        try:
            engine.send(header, parcel, Lane.URGENT)
        except Exception as error:
            answers.lost(header, str(error))
    engine.later(within / 2, rest)


def _are_near(engine: Runtime, procs: ProcState, ranks: Sequence[int]) -> bool:
    """Few ranks, which can be reached without an agent."""
    if len(ranks) < 2:
        return True
    return len(ranks) <= DIRECT and all(procs.layout.host_of(rank) in engine.local_hosts for rank in ranks)


def _runs(procs: ProcState, ranks: Sequence[int]) -> Iterator[Run]:
    """Neighbours of the same incarnation together."""
    if isinstance(ranks, range) and ranks.step == 1 and not procs.incarnations:
        yield Run(ranks.start, len(ranks))
        return
    first = 0
    for place in range(1, len(ranks) + 1):
        rank, before = ranks[place] if place < len(ranks) else -1, ranks[place - 1]
        if rank != before + 1 or procs.incarnation(rank) != procs.incarnation(before):
            yield Run(ranks[first], place - first, proc_incarnation=procs.incarnation(before), index=first)
            first = place
