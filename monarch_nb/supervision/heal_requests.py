"""Requests for heals: who waits for them, and what is brought back for them on threads of its own."""

import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from monarch_nb.runtime import Cause, Future, fail_future, pending_future, resolve_future
from monarch_nb.supervision.actions import Action, Healed, HealRefused, Recreate, Respawn, SupervisorEffects
from monarch_nb.supervision.errors import HealError, SupervisionError
from monarch_nb.supervision.failure import gathered
from monarch_nb.supervision.machine import SupervisionMachine
from monarch_nb.supervision.ranks import RankIncarnation
from monarch_nb.wire import error_line


class HealRequests:
    """Of one process. `feed` gives its machine an event, and may be called from any thread."""

    def __init__(
        self, effects: SupervisorEffects, feed: Callable[[Callable[[SupervisionMachine], list[Action]]], None]
    ) -> None:
        self._effects, self._feed = effects, feed
        self._waiting: dict[int, Future[None]] = {}
        self._last = 0
        self._hasty: set[int] = set()  # heals that do not wait for the hooks of survivors

    def expect(self, *, await_hooks: bool) -> tuple[int, Future[None]]:
        """A number for a request of the machine, and what resolves when it is answered; under the driver's lock."""
        self._last += 1
        future: Future[None] = pending_future(describe=lambda: "the heal is not done yet")
        self._waiting[self._last] = future
        if not await_hooks:
            self._hasty.add(self._last)
        return self._last, future

    def carry_out(self, action: Respawn | Recreate | Healed | HealRefused) -> None:
        """Does not block."""
        match action:
            case Respawn(uid, back):
                _in_thread(lambda: self._bring_back(uid, back, self._effects.respawn, SupervisionMachine.respawned))
            case Recreate(uid, back):
                _in_thread(lambda: self._bring_back(uid, back, self._effects.recreate, SupervisionMachine.recreated))
            case Healed():
                _in_thread(lambda: self._healed(action))
            case HealRefused(request, _, text, _):
                future = self._waiting.pop(request, None)
                if future is not None:
                    fail_future(future, HealError(text))

    def _bring_back(
        self,
        uid: str,
        incarnations: tuple[RankIncarnation, ...],
        bring: Callable[[str, Sequence[RankIncarnation]], None],
        done: Callable[[SupervisionMachine, str, Sequence[RankIncarnation]], list[Action]],
    ) -> None:
        try:
            bring(uid, incarnations)
        except BaseException as error:
            cause = Cause(kind="spawn", text=error_line(error), at=time.time())
            if isinstance(error, SupervisionError) and error.failure is not None:
                cause = msgspec.structs.replace(error.failure.cause)
            self._feed(lambda machine: machine.heal_failed(uid, incarnations, cause))
            return
        self._feed(lambda machine: done(machine, uid, incarnations))

    def _healed(self, action: Healed) -> None:
        error: BaseException | None = None
        try:
            if action.incarnations:
                self._effects.healed(action.incarnations, not self._hasty.intersection(action.requests))
        except BaseException as raised:
            error = raised
        if action.again:
            failures = "\n".join(failure.report() for failure in gathered(action.again))
            error = HealError(f"not everything could be healed:\n{failures}", action.again)
        self._hasty.difference_update(action.requests)
        for request in action.requests:
            future = self._waiting.pop(request, None)
            if future is None:
                continue
            if error is None:
                resolve_future(future, None)
            else:
                fail_future(future, error)


def _in_thread(function: Callable[[], None]) -> None:
    threading.Thread(target=function, name="monarch-heal", daemon=True).start()
