"""Calls to other hosts through a process that has ended: the messages that it carried are lost.

Each link on the way delivers all its messages, but a process between them may end with messages that it had received
and not passed on. Once another process has replaced it, processes with calls that may be among them ask for their
state: the actors' processes, or the agents that spread calls to several ranks, which ask further (`host.casting`).
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

from monarch_nb.host import protocol as p
from monarch_nb.host.casting import AGAIN_S, lost_with
from monarch_nb.host.verbs import CASTS, RELAY_CHANGED
from monarch_nb.mesh.requests import request
from monarch_nb.routing import indices
from monarch_nb.runtime import Future, PendingCall, Runtime, calls_of, when_done
from monarch_nb.runtime.verbs import RECEIVED, AskReceived, CallsReceived, SentCall
from monarch_nb.transport import Parcel
from monarch_nb.wire import Asker, Header, Kind, with_host_names
from monarch_nb.wire.header import SKIP

WAITS = "waits"  # or runs, or will be answered by the holder of its port
NEVER_CAME = "never came"
ANSWERED = "answered"
_MAX_TRIES = 5  # to ask a process that does not answer


class _SentPart(NamedTuple):
    """The part of a call that was sent to one actor, or to a subtree of hosts."""

    call: PendingCall[object]
    header: Header

    @property
    def unanswered(self) -> list[int]:
        plan = self.header.plan
        return self.call.unanswered([self.header.index] if plan is None else indices(plan.runs))


_Doubtful = dict[tuple[str, int], str]  # why answers seem lost, by call and index


class RelayedCalls:
    """Finds out which calls of this process are lost, and answers for its actors. The feature "relays"."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        runtime.verbs.handle(RELAY_CHANGED, lambda changed, asker: self._relay_changed(changed.relay))
        runtime.verbs.handle(RECEIVED, self._on_query)

    def _relay_changed(self, relay: str) -> None:
        """Ends the calls that are lost with a relay, once another one runs. Does not block."""
        parts: dict[str, list[_SentPart]] = {}
        for call in tuple(self._runtime.calls.values()):
            for header in tuple(call.sent):
                parts.setdefault(header.dst, []).append(_SentPart(call, header))
        for address, group in parts.items():
            self._ask(relay, address, group, {}, 1)

    def _ask(self, relay: str, address: str, parts: Sequence[_SentPart], before: _Doubtful, tries: int) -> None:
        """Asks for the state of calls; a part that is lost the second time too fails its call."""
        waiting = [part for part in parts if part.call.missing and part.unanswered]
        if not waiting or self._runtime.closed:
            return
        answer: Future[CallsReceived] | Future[p.CastStates]
        if waiting[0].header.plan is None:
            query = AskReceived(tuple(map(_sent_call, waiting)), final=bool(before))
            answer = request(self._runtime, address, RECEIVED, query)
        else:
            ports = tuple(part.header.port for part in waiting)
            answer = request(self._runtime, address, CASTS, p.AskCasts(ports, final=bool(before)))
        when_done(answer, functools.partial(self._on_answer, relay, address, waiting, before, tries))

    def _on_answer(
        self,
        relay: str,
        address: str,
        parts: Sequence[_SentPart],
        before: _Doubtful,
        tries: int,
        answer: Future[CallsReceived] | Future[p.CastStates],
    ) -> None:
        if answer.exception(0) is not None:  # calls to ended processes have failed already
            if tries < _MAX_TRIES:
                self._runtime.later(AGAIN_S, lambda: self._ask(relay, address, parts, before, tries + 1))
            return
        doubtful: _Doubtful = {}
        states: Sequence[str | p.CastState] = answer.get(0).states
        for part, state in zip(parts, states, strict=True):
            arrived = _arrived(state)
            positions = part.unanswered if arrived is not None else []
            lost = {
                (part.call.call, index): lost_with(relay, arrived=bool(arrived))
                for index in positions
                if not (isinstance(state, p.CastState) and state.waits_for(index))
            }
            doubtful |= lost
            reasons = [reason for key, reason in lost.items() if before.get(key) == reason]
            if reasons and part.call.missing:
                self._runtime.undelivered(part.header, with_host_names(reasons[0]))
        if not before and doubtful:
            retries = [part for part in parts if any((part.call.call, index) in doubtful for index in part.unanswered)]
            self._runtime.later(AGAIN_S, lambda: self._ask(relay, address, retries, doubtful, tries))

    def _on_query(self, message: AskReceived, asker: Asker[CallsReceived]) -> CallsReceived:
        return CallsReceived(tuple(self._state_of(call, message.final) for call in message.calls))

    def _state_of(self, call: SentCall, final: bool) -> str:
        cell = self._runtime.cells.get((call.mesh, call.rank))
        if cell is None or cell.incarnation != call.incarnation or call.seq < 0:
            return WAITS  # for its spawn; an ended actor refuses its calls by itself
        if not cell.inbox.has(call.sender, call.seq):
            if final:  # should it still arrive, it must not run: its caller gets an error that says so
                skip = Header(
                    Kind.CALL, self._runtime.address, self._runtime.address, call.mesh, call.rank, call.incarnation,
                    call.sender, call.seq, SKIP,
                )  # fmt: skip
                cell.arrive(skip, Parcel([b""]))
            return NEVER_CAME
        return WAITS if call.call in calls_of(cell) or cell.is_explicit(call.method) else ANSWERED


def attach(runtime: Runtime) -> RelayedCalls:
    """Registers the handlers of this process."""
    return RelayedCalls(runtime)


def _arrived(state: str | p.CastState) -> bool | None:
    """Returns whether a call arrived that is answered or lost; None while it waits."""
    if isinstance(state, p.CastState):
        return state.came
    return None if state == WAITS else state == ANSWERED


def _sent_call(part: _SentPart) -> SentCall:
    call, header = part
    return SentCall(header.mesh, header.rank, header.incarnation, header.sender, header.seq, call.call, header.method)
