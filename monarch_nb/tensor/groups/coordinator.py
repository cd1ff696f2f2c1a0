"""Controller side of a process group: collects failures, asks other ranks for progress, ends generations."""

import logging
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from enum import Enum
from typing import TypeVar

import msgspec

from monarch_nb.lifecycle.mesh_healer import MeshHealer
from monarch_nb.mesh.mesh_events import Event, HostLost, MeshEvents, MeshResized, ProcExited
from monarch_nb.mesh.requests import request, settle
from monarch_nb.runtime import Future, ProcState, Runtime, when_done
from monarch_nb.tensor.groups.service import GROUPS
from monarch_nb.tensor.verbs import (
    CUT,
    GO_ON,
    HOW_FAR,
    CutGroup,
    Failure,
    GoOn,
    HowFar,
    Interrupted,
    RankFailed,
    StreamProgress,
    ranks_text,
)
from monarch_nb.transport import UnreachableError
from monarch_nb.wire import Verb, host_of

Q = TypeVar("Q", bound=msgspec.Struct)

_ASK_AFTER_S = 0.002  # most failing operations fail on all ranks, whose reports have arrived by then
_ASK_AGAIN_S = 0.02
_ANSWER_WAIT_S = 1.0  # how long to wait for answers, which a stopped process does not give
LEAVE_TIMEOUT_S = 10.0  # time for ranks to leave an ended generation, after which their processes are killed
ANSWER_TIMEOUT_S = 2.0  # time for their answer before that

logger = logging.getLogger(__name__)
COLLECTIVE_WAIT_S = 0.05  # in the operation with no rank behind, after which a rank is assumed to wait in a collective
STEP_WAIT_S = 1.0  # the same for a compiled step
MAX_BEHIND_S = 5.0  # time for ranks that have not reached the operation


class Verdict(Enum):
    """Decision about the ranks of a failed operation."""

    GO_ON = "go on"
    CUT = "cut"


class FailedOperation:
    """An operation that failed on some rank. Times are seconds of any clock.

    An operation of a compiled step counts as reached once the step has `begun`: progress inside a step is unknown.
    """

    def __init__(self, ranks: tuple[int, ...], number: int, now: float, begun: int | None = None) -> None:
        self.ranks, self.number, self.since = ranks, number if begun is None else begun, now
        self._max_wait = COLLECTIVE_WAIT_S if begun is None else STEP_WAIT_S
        self.failures: dict[int, Failure] = {}
        self._all_inside_since: float | None = None  # when all other ranks were first seen in the operation

    @property
    def remaining(self) -> list[int]:
        """Ranks that have reported no failure."""
        return [rank for rank in self.ranks if rank not in self.failures]

    def failed(self, rank: int, failure: Failure) -> Verdict | None:
        """Records the failure of a rank."""
        self.failures[rank] = failure
        return None if self.remaining else Verdict.GO_ON

    def on_progress(self, done: Mapping[int, int], now: float) -> Verdict | None:
        """Takes the number of operations that each other rank has done. Ranks without an answer are missing."""
        remaining = self.remaining
        if not remaining:
            return Verdict.GO_ON
        if any(done.get(rank, 0) > self.number for rank in remaining) or now - self.since > MAX_BEHIND_S:
            return Verdict.CUT
        if any(done.get(rank, -1) < self.number for rank in remaining):
            self._all_inside_since = None
            return None
        if self._all_inside_since is None:
            self._all_inside_since = now
        return Verdict.CUT if now - self._all_inside_since >= self._max_wait else None


class GroupCoordinator:
    """Manages the group of `members`, which are ranks of a proc mesh; their positions are the ranks of the group.

    `on_loss` is called with the reason when a member is lost.
    """

    def __init__(
        self,
        runtime: Runtime,
        state: ProcState,
        members: tuple[int, ...],
        on_loss: "weakref.WeakMethod[Callable[[str], None]]",
    ) -> None:
        self._runtime, self._state, self._members, self._on_loss = runtime, state, members, on_loss
        self.generation = -1
        self._addresses: list[str] = []  # of its processes, which are new ones after a heal
        self._failing: dict[tuple[int, int], FailedOperation] = {}  # by stream and operation
        self._cut = -1  # the last generation that was ended
        self._closed = False
        self._lock = threading.Lock()
        runtime.feature(GROUPS).coordinators[state.uid] = self
        runtime.part(MeshEvents).listeners.append(self._on_mesh_event)

    def close(self) -> None:
        """Ends the coordination; the process group itself stays."""
        self._closed = True
        coordinators = self._runtime.feature(GROUPS).coordinators
        if coordinators.get(self._state.uid) is self:
            del coordinators[self._state.uid]
        listeners = self._runtime.part(MeshEvents).listeners
        if self._on_mesh_event in listeners:
            listeners.remove(self._on_mesh_event)

    def add_members(self, members: tuple[int, ...]) -> None:
        """Extends the group; existing members keep their ranks."""
        self._members = members

    def begin(self, generation: int) -> None:
        """Begins a generation, whose members are the processes that the ranks have now."""
        self.generation = generation
        self._addresses = [self._address(rank) for rank in range(len(self._members))]

    @property
    def over(self) -> int:
        """The current generation if it was ended, else -1."""
        generation = self.generation
        return generation if self._cut >= generation else -1

    def cut(self, reason: str, failures: tuple[Failure, ...] = ()) -> None:
        """Ends this generation, which frees ranks that wait in a collective. Does not block."""
        generation = self.generation
        with self._lock:
            if self._cut >= generation:
                return
            self._cut = generation
            self._failing.clear()
        message = CutGroup(self._state.uid, generation, reason, failures)
        for rank in range(len(self._members)):
            self._send(rank, CUT, message)
        self._runtime.later(LEAVE_TIMEOUT_S, lambda: self._check_departures(generation))

    # -- called on runtime threads ----------------------------------------------------------------------------------

    def failed(self, report: RankFailed) -> None:
        """Handles the report of an operation that failed on one rank."""
        failure = report.failure
        key = (failure.stream, failure.number)
        with self._lock:
            if report.generation != self.generation or self._cut >= report.generation:
                return  # reported before
            operation = self._failing.get(key)
            is_first = operation is None
            if operation is None:
                operation = self._failing[key] = FailedOperation(
                    report.ranks, failure.number, time.monotonic(), report.begun
                )
            verdict = operation.failed(report.rank, failure)
        self._apply(key, operation, verdict)
        if is_first and verdict is None:
            self._runtime.later(_ASK_AFTER_S, lambda: self._ask_progress(key))

    def interrupted(self, report: Interrupted) -> None:
        """Ends the generation for a rank whose running operation an interrupt could not end."""
        if report.generation == self.generation:
            self.cut("it was interrupted")

    def _check_departures(self, generation: int) -> None:
        if self.generation != generation or self._closed:
            return
        replies = {
            rank: request(self._runtime, self._address(rank), HOW_FAR, HowFar(self._state.uid, 0))
            for rank in range(len(self._members))
        }
        self._runtime.later(ANSWER_TIMEOUT_S, lambda: self._kill_remaining(generation, replies))

    def _kill_remaining(self, generation: int, replies: dict[int, Future[StreamProgress]]) -> None:
        if self.generation != generation or self._closed or self._state.stopped is not None:
            return
        for rank, future in replies.items():
            if not future.done():
                self._kill(rank, "does not answer")
            elif future.exception(0) is None and (obstacle := future.get(0).held):
                self._kill(rank, f"cannot leave it: {obstacle}")

    def _kill(self, rank: int, reason: str) -> None:
        base = self._members[rank]
        text = (
            f"its process group was ended more than {LEAVE_TIMEOUT_S:g} s ago, and it {reason}. The mesh cannot be "
            "used while it stays there"
        )
        logger.warning("rank %d of %s is killed: %s", base, self._state.name, text)
        self._runtime.part(MeshHealer).kill(self._state, (base,), text)

    def _ask_progress(self, key: tuple[int, int]) -> None:
        with self._lock:
            operation = self._failing.get(key)
            remaining = [] if operation is None else operation.remaining
        if operation is None or not remaining:
            return
        polls: dict[int, Future[StreamProgress]] = {
            rank: request(self._runtime, self._address(rank), HOW_FAR, HowFar(self._state.uid, key[0]))
            for rank in remaining
        }
        pending = iter((True,))  # answers are evaluated once: when all have arrived, or after the time-out

        def evaluate() -> None:
            if next(pending, False):
                self._on_answers(key, operation, polls)

        when_done(settle(list(polls.values()), lambda: ""), lambda _: evaluate())
        self._runtime.later(_ANSWER_WAIT_S, evaluate)

    def _on_answers(
        self, key: tuple[int, int], operation: FailedOperation, polls: dict[int, Future[StreamProgress]]
    ) -> None:
        done = {rank: poll.get(0).done for rank, poll in polls.items() if poll.done() and poll.exception(0) is None}
        with self._lock:
            if self._failing.get(key) is not operation:
                return
            verdict = operation.on_progress(done, time.monotonic())
        self._apply(key, operation, verdict)
        if verdict is None:
            self._runtime.later(_ASK_AGAIN_S, lambda: self._ask_progress(key))

    def _apply(self, key: tuple[int, int], operation: FailedOperation, verdict: Verdict | None) -> None:
        if verdict is Verdict.GO_ON:
            with self._lock:
                self._failing.pop(key, None)
            message = GoOn(self._state.uid, self.generation, *key)
            for rank in operation.ranks:
                self._send(rank, GO_ON, message)
        elif verdict is Verdict.CUT:
            failures = tuple(operation.failures.values())
            ranks = ranks_text([self._members[rank] for rank in operation.failures])
            self.cut(f"{failures[0].operation} failed on {ranks} alone", failures)

    def _on_mesh_event(self, event: Event) -> None:
        if isinstance(event, ProcExited):
            if event.address in self._addresses:
                rank = self._members[self._addresses.index(event.address)]
                self._on_member_lost(f"rank {rank}, on host {host_of(event.address)}, {event.reason}")
        elif isinstance(event, HostLost):
            hosts = [host_of(self._address(rank)) for rank in range(len(self._members))]
            if event.host in hosts:
                self._on_member_lost(f"host {event.host} is lost")
        elif (
            isinstance(event, MeshResized)
            and event.mesh is self._state
            and not set(self._members) <= set(self._state.ranks)
        ):
            self._on_member_lost("it has shrunk")

    def _on_member_lost(self, reason: str) -> None:
        self.cut(reason)
        on_loss = self._on_loss()
        if on_loss is not None:
            on_loss(reason)

    def _address(self, rank: int) -> str:
        return self._state.address(self._members[rank])

    def _send(self, rank: int, verb: Verb[Q, None], body: Q) -> None:
        try:
            self._runtime.post(self._address(rank), verb, body)
        except UnreachableError:  # a lost process waits for no message
            logger.debug("%s could not be sent %s", self._address(rank), verb.name, exc_info=True)
