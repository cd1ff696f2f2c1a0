"""Calls to actors of other hosts that went through a process which has ended: what it had taken along is lost.

Each link on the way delivers what it was given, but a process between them may end with messages that it had received
and not passed on. Once another process is in its place, those whose calls may be among them ask the actors' processes.
"""

import functools
from collections.abc import Sequence
from typing import Any

from monarch_nb.host.verbs import RELAY_CHANGED
from monarch_nb.mesh.requests import request
from monarch_nb.runtime import Future, PendingCall, Runtime, calls_of, when_done
from monarch_nb.runtime.verbs import RECEIVED, AskReceived, CallsReceived, SentCall
from monarch_nb.wire import Asker, with_host_names

__all__ = ["RelayedCalls"]

WAITS = "waits"  # or runs, or will be answered by whoever has its port
NEVER_CAME = "never came"
ANSWERED = "answered"
_AGAIN_S = 2.0  # until the same is asked again: an answer may be on its way
_TIMES = 5  # that a process is asked that does not answer
_TEXTS = {
    NEVER_CAME: "it was passed on by {relay}, which has ended, and never arrived: it has not run",
    ANSWERED: "its answer was passed on by {relay}, which has ended, and never arrived: it has run",
}


class RelayedCalls:
    """Finds out which calls of this process are lost, and answers for its actors. The feature "relays"."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        runtime.verbs.handle(RELAY_CHANGED, lambda changed, asker: self._relay_changed(changed.relay))
        runtime.verbs.handle(RECEIVED, self._received)

    def _relay_changed(self, relay: str) -> None:
        """Ends the calls that are lost with a relay, now that another one is there. Does not block."""
        calls: dict[str, list[PendingCall]] = {}
        for call in tuple(self._runtime.calls.values()):
            if call.sent is not None and call.missing:
                calls.setdefault(call.sent.dst, []).append(call)
        for process, some in calls.items():
            self._ask(relay, process, some, {}, 1)

    def _ask(self, relay: str, process: str, calls: Sequence[PendingCall], before: dict[str, str], times: int) -> None:
        """Asks what has become of calls; one that is lost the second time, too, ends."""
        waiting = [call for call in calls if call.missing]
        if not waiting or self._runtime.closed:
            return
        asked = tuple(map(_sent, waiting))
        answer = request(self._runtime, process, RECEIVED, AskReceived(asked))
        when_done(answer, functools.partial(self._answered, relay, process, waiting, before, times))

    def _answered(
        self, relay: str, process: str, calls: Sequence[PendingCall], before: dict[str, str], times: int,
        answer: Future[Any],
    ) -> None:  # fmt: skip
        if answer.exception(0) is not None:  # those who are gone have failed their calls
            if times < _TIMES:
                self._runtime.later(_AGAIN_S, lambda: self._ask(relay, process, calls, before, times + 1))
            return
        lost: dict[str, str] = {}
        for call, state in zip(calls, answer.get(0).states, strict=True):
            if state not in _TEXTS or not call.missing:
                continue
            lost[call.call] = state
            if before.get(call.call) == state and call.sent is not None:
                self._runtime.undelivered(call.sent, with_host_names(_TEXTS[state].format(relay=relay)))
        if not before and lost:
            again = [call for call in calls if call.call in lost]
            self._runtime.later(_AGAIN_S, lambda: self._ask(relay, process, again, lost, times))

    def _received(self, asked: AskReceived, asker: Asker[CallsReceived]) -> CallsReceived:
        return CallsReceived(tuple(map(self._state_of, asked.calls)))

    def _state_of(self, sent: SentCall) -> str:
        cell = self._runtime.cells.get((sent.mesh, sent.rank))
        if cell is None or cell.incarnation != sent.incarnation or sent.seq < 0:
            return WAITS  # for its spawn; one that has ended refuses its calls by itself
        if not cell.inbox.has(sent.sender, sent.seq):
            return NEVER_CAME
        return WAITS if sent.call in calls_of(cell) or cell.is_explicit(sent.method) else ANSWERED


def attach(runtime: Runtime) -> RelayedCalls:
    """Registers the handlers of this process."""
    return RelayedCalls(runtime)


def _sent(call: PendingCall) -> SentCall:
    sent = call.sent
    assert sent is not None
    return SentCall(sent.mesh, sent.rank, sent.incarnation, sent.sender, sent.seq, call.call, sent.method)
