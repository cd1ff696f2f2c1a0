"""The controller's part in a process group: it hears of failures, asks how the others did, and ends a generation."""

import logging
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from enum import Enum
from typing import TypeVar

import msgspec

from monarch_nb.lifecycle.healing import MeshHealer
from monarch_nb.mesh.mesh_events import Event, HostLost, MeshEvents, MeshResized, ProcExited
from monarch_nb.mesh.requests import request, settle
from monarch_nb.runtime import Future, ProcState, Runtime, when_done
from monarch_nb.tensor.failure import Failure, ranks_text
from monarch_nb.tensor.groups.service import GROUPS
from monarch_nb.tensor.verbs import CUT, GO_ON, HOW_FAR, Cut, GoOn, HowFar, Interrupted, Progress, RankFailed
from monarch_nb.transport import UnreachableError
from monarch_nb.wire import Verb, host_of

Q = TypeVar("Q", bound=msgspec.Struct)

_ASK_AFTER_S = 0.002  # most operations that fail do so on all ranks, which have told of it by then
_ASK_AGAIN_S = 0.02
_SILENT_S = 1.0  # without an answer, as of a process that is stopped
LEAVE_S = 10.0  # for ranks to leave a generation that was ended: then their processes are
ANSWER_S = 2.0  # for a word of how they are, before that

logger = logging.getLogger(__name__)
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


class Keeper:
    """Keeps the group of `members`, ranks of a proc mesh; its own ranks are their places in it.

    `lose` is told why a member is gone.
    """

    def __init__(
        self,
        engine: Runtime,
        state: ProcState,
        members: tuple[int, ...],
        lose: "weakref.WeakMethod[Callable[[str], None]]",
    ) -> None:
        self._engine, self._state, self._members, self._lose = engine, state, members, lose
        self.generation = -1
        self._troubles: dict[tuple[int, int], Trouble] = {}  # by stream and operation
        self._cut = -1  # the last generation that was ended
        self._closed = False
        self._lock = threading.Lock()
        engine.feature(GROUPS).kept[state.uid] = self
        engine.part(MeshEvents).listeners.append(self._heard)

    def close(self) -> None:
        """The group is not needed any more."""
        self._closed = True
        kept = self._engine.feature(GROUPS).kept
        if kept.get(self._state.uid) is self:
            del kept[self._state.uid]
        listeners = self._engine.part(MeshEvents).listeners
        if self._heard in listeners:
            listeners.remove(self._heard)

    def take_in(self, members: tuple[int, ...]) -> None:
        """It has more members, behind those that it has."""
        self._members = members

    @property
    def over(self) -> int:
        """The generation that is now, where it has been ended; -1 where it goes on."""
        generation = self.generation
        return generation if self._cut >= generation else -1

    def cut(self, reason: str, failures: tuple[Failure, ...] = ()) -> None:
        """Ends this generation: who waits in a collective is freed. Does not block."""
        generation = self.generation
        with self._lock:
            if self._cut >= generation:
                return
            self._cut = generation
            self._troubles.clear()
        told = Cut(self._state.uid, generation, reason, failures)
        for rank in range(len(self._members)):
            self._tell(rank, CUT, told)
        self._engine.later(LEAVE_S, lambda: self._look_who_left(generation))

    # -- engine threads ---------------------------------------------------------------------------------------------

    def failed(self, told: RankFailed) -> None:
        """An operation failed on one rank."""
        failure = told.failure
        key = (failure.stream, failure.number)
        with self._lock:
            if told.generation != self.generation or self._cut >= told.generation:
                return  # it has been told already
            trouble = self._troubles.get(key)
            first = trouble is None
            if trouble is None:
                trouble = self._troubles[key] = Trouble(told.ranks, failure.number, time.monotonic(), told.begun)
            verdict = trouble.failed(told.rank, failure)
        self._carry_out(key, trouble, verdict)
        if first and verdict is None:
            self._engine.later(_ASK_AFTER_S, lambda: self._ask(key))

    def interrupted(self, told: Interrupted) -> None:
        """A rank was interrupted, and is in what only the end of the generation ends."""
        if told.generation == self.generation:
            self.cut("it was interrupted")

    def _look_who_left(self, generation: int) -> None:
        """Ranks had their time to leave a generation."""
        if self.generation != generation or self._closed:
            return
        asked = {
            rank: request(self._engine, self._address(rank), HOW_FAR, HowFar(self._state.uid, 0))
            for rank in range(len(self._members))
        }
        self._engine.later(ANSWER_S, lambda: self._end_who_stays(generation, asked))

    def _end_who_stays(self, generation: int, asked: dict[int, Future[Progress]]) -> None:
        if self.generation != generation or self._closed or self._state.stopped is not None:
            return
        for rank, future in asked.items():
            if not future.done():
                self._end(rank, "does not answer")
            elif future.exception(0) is None and (held := future.get(0).held):
                self._end(rank, f"cannot leave it: {held}")

    def _end(self, rank: int, why: str) -> None:
        base = self._members[rank]
        text = (
            f"its process group was ended, {LEAVE_S:g} s ago and more, and it {why}. Nobody could use the mesh while "
            "it stays there"
        )
        logger.warning("rank %d of %s is killed: %s", base, self._state.name, text)
        self._engine.part(MeshHealer).kill(self._state, (base,), text)

    def _ask(self, key: tuple[int, int]) -> None:
        with self._lock:
            trouble = self._troubles.get(key)
            others = [] if trouble is None else trouble.others
        if trouble is None or not others:
            return
        asked: dict[int, Future[Progress]] = {
            rank: request(self._engine, self._address(rank), HOW_FAR, HowFar(self._state.uid, key[0]))
            for rank in others
        }
        left = iter((True,))  # answers are looked at once: when all are there, or when some do not come

        def look() -> None:
            if next(left, False):
                self._answered(key, trouble, asked)

        when_done(settle(list(asked.values()), lambda: ""), lambda _: look())
        self._engine.later(_SILENT_S, look)

    def _answered(self, key: tuple[int, int], trouble: Trouble, asked: dict[int, Future[Progress]]) -> None:
        done = {rank: one.get(0).done for rank, one in asked.items() if one.done() and one.exception(0) is None}
        with self._lock:
            if self._troubles.get(key) is not trouble:
                return
            verdict = trouble.told(done, time.monotonic())
        self._carry_out(key, trouble, verdict)
        if verdict is None:
            self._engine.later(_ASK_AGAIN_S, lambda: self._ask(key))

    def _carry_out(self, key: tuple[int, int], trouble: Trouble, verdict: Verdict | None) -> None:
        if verdict is Verdict.GO_ON:
            with self._lock:
                self._troubles.pop(key, None)
            told = GoOn(self._state.uid, self.generation, *key)
            for rank in trouble.ranks:
                self._tell(rank, GO_ON, told)
        elif verdict is Verdict.CUT:
            failures = tuple(trouble.failures.values())
            ranks = ranks_text([self._members[rank] for rank in trouble.failures])
            self.cut(f"{failures[0].operation} failed on {ranks} alone", failures)

    def _heard(self, event: Event) -> None:
        if isinstance(event, ProcExited):
            addresses = [self._address(rank) for rank in range(len(self._members))]
            if event.address in addresses:
                rank = self._members[addresses.index(event.address)]
                self._gone(f"rank {rank}, on host {host_of(event.address)}, {event.reason}")
        elif isinstance(event, HostLost):
            hosts = [host_of(self._address(rank)) for rank in range(len(self._members))]
            if event.host in hosts:
                self._gone(f"host {event.host} is lost")
        elif (
            isinstance(event, MeshResized)
            and event.mesh is self._state
            and not set(self._members) <= set(self._state.ranks)
        ):
            self._gone("it has shrunk")

    def _gone(self, reason: str) -> None:
        self.cut(reason)
        lose = self._lose()
        if lose is not None:
            lose(reason)

    def _address(self, rank: int) -> str:
        return self._state.address(self._members[rank])

    def _tell(self, rank: int, verb: Verb[Q, None], body: Q) -> None:
        try:
            self._engine.tell(self._address(rank), verb, body)
        except UnreachableError:  # it is gone, and so waits for nobody
            logger.debug("%s could not be told %s", self._address(rank), verb.name, exc_info=True)
