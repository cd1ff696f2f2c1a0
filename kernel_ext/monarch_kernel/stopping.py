"""Ctrl-C while a cell waits: the first one stops waiting, the second interrupts the ranks."""

import asyncio
import signal
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

from monarch_nb.lifecycle.interrupts import interrupted
from monarch_nb.runtime import Doing, Future, MeshState, PendingCall, Runtime, waiting
from monarch_nb.wire import error_line

from .front import Front
from .reactions import FileName, anew, at, ended, stuck, what

AGAIN_SECONDS = 2.0  # within that long a second Ctrl-C means the ranks
GIVE_UP_SECONDS = 5.0  # how long interrupted ranks have to end what they run
LOOKS_EVERY = 0.1


class Stopping:
    """The two steps, for waits that block and for those that `await`; the same words for both."""

    def __init__(self, front: Front, engine: Runtime, name: FileName) -> None:
        self._front = front
        self._engine = engine
        self._name = name
        self._asking = False  # a blocking wait is in its two steps: its own wait is none to be stopped
        self._awaits = _Awaits(self)
        self._leave: Callable[[], None] = lambda: None

    def install(self) -> None:
        """From now on Ctrl-C has these two steps in waits of cells."""
        self._leave = waiting.join(words=self.stopped, await_guard=self._awaits.guard)

    def uninstall(self) -> None:
        """Not any more."""
        self._leave()

    def fate(self, future: Future[Any]) -> str:
        """What has become of an awaited call that Ctrl-C was pressed for; "" if that is not known."""
        return self._awaits.fates.pop(id(future), "")

    @property
    def in_cell(self) -> bool:
        """Whether this thread runs a cell."""
        return self._front.in_cell

    def stopped(self, future: Future[Any]) -> str:
        """A blocking wait of a cell was interrupted: the second step, and what has become of the call."""
        call = self.pending(future)
        if self._asking or call is None or not self.in_cell:
            return ""
        self._asking = True
        try:
            try:
                self.offer(call)  # the second may come before this is written
                return call.meanwhile() if future.wait(AGAIN_SECONDS) else call.goes_on()
            except KeyboardInterrupt:
                pass
            try:
                reactions = self.interrupt(call)
                return call.outcome(reactions) if future.wait(GIVE_UP_SECONDS) else call.offers(GIVE_UP_SECONDS)
            except KeyboardInterrupt:
                return call.goes_on()
        finally:
            self._asking = False

    def pending(self, future: Future[Any]) -> "Waited | None":
        """The call that a future waits for; None for what no rank can be interrupted for."""
        call = self._engine.calls.get(future.wait_id)
        state = self._engine.meshes.get(call.mesh) if call is not None else None
        return Waited(future, call, state) if call is not None and isinstance(state, MeshState) else None

    def offer(self, call: "Waited") -> None:
        """Says what a second Ctrl-C does."""
        self._front.write(
            f"Stopped waiting for {call.label}. "
            f"Interrupt again within {AGAIN_SECONDS:g} s to interrupt the ranks too.\n",
            "stderr",
        )

    def interrupt(self, call: "Waited") -> dict[int, Doing | None]:
        """Interrupts the ranks that are waited for, and says which do not react, within a second."""
        pending = tuple(self._engine.calls.values())
        of_cell = [other for other in pending if other.mesh == call.state.uid and _of_cell(other)]
        call.count_again()
        reactions = interrupted(call.state, call.ranks, [other.call for other in of_cell])
        for line in stuck(call.state, reactions, self._name):
            self._front.write(f"{line}\n", "stderr")
        return reactions


class Waited:
    """A call that a cell waited for when it was interrupted."""

    def __init__(self, future: Future[Any], call: PendingCall, state: MeshState) -> None:
        self.future = future
        self.state = state
        self.ranks = call.missing_ranks()  # base ranks
        self._call = call
        endpoint = call.title.removeprefix(f"{state.name}.") if "[" not in call.title else "__cell__"
        self._what = what(state, endpoint)
        self._told = call.story()

    def count_again(self) -> None:
        """Some ranks may have answered since the first Ctrl-C: they are not interrupted."""
        self.ranks = self._call.missing_ranks() or self.ranks

    @property
    def label(self) -> str:
        """`a.step() on a gpus=0-3`."""
        return f"{self._what} on {at(self.state, self.ranks)}"

    def goes_on(self) -> str:
        """It was left alone."""
        name = self.state.name
        return f"stopped waiting; {self._told}. It goes on: %interrupt {name} ends it there, .get() waits again"

    def meanwhile(self) -> str:
        """It ended by itself after the first Ctrl-C."""
        error = self.future.exception(0)
        came = f" with {next(iter(error_line(error).splitlines()))}" if error is not None else ""
        return f"stopped waiting; meanwhile {self.label} has ended{came}"

    def outcome(self, reactions: Mapping[int, Doing | None]) -> str:
        """It was interrupted, and is over."""
        lines = ended(self.state, reactions)
        ran = {doing.call for doing in reactions.values() if doing is not None and doing.call}
        if ran and self._call.call not in ran:
            lines.append(f"{self._what} had not begun, and does not")
        return "; ".join(lines) or f"interrupted {self.label}"

    def offers(self, seconds: float) -> str:
        """Some ranks have not stopped."""
        left = self._call.missing_ranks()
        late = f"{self._what} on {at(self.state, left)} has not stopped within {seconds:g} s"
        return f"{late}: {anew(self.state, left)}"


def _of_cell(call: PendingCall) -> bool:
    return call.caller.actor_instance.cell is None


class _Awaits:
    """The steps in a cell that awaits: they run on its loop, between two turns of it."""

    def __init__(self, stopping: Stopping) -> None:
        self.fates: dict[int, str] = {}  # by id of the awaited future
        self._stopping = stopping
        self._waiting: dict[asyncio.Future[None], Future[Any]] = {}
        self._before: Any = None  # the handler of SIGINT that was there
        self._timer: asyncio.TimerHandle | None = None
        self._presses = 0
        self._pending: list[Waited] = []
        self._reactions: dict[int, dict[int, Doing | None]] = {}

    def guard(self, future: Future[Any], sleeper: "asyncio.Future[None]") -> Callable[[], None] | None:
        """A cell begins to await a future, asleep on `sleeper`."""
        if not self._stopping.in_cell:
            return None
        if not self._waiting:
            before = signal.getsignal(signal.SIGINT)
            if not callable(before):
                return None
            self.fates.clear()
            self._before, self._presses, self._pending = before, 0, []
            signal.signal(signal.SIGINT, self._pressed)
        self._waiting[sleeper] = future
        return lambda: self._left(sleeper)

    def _left(self, sleeper: "asyncio.Future[None]") -> None:
        future = self._waiting.pop(sleeper)
        if not self._waiting:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            if signal.getsignal(signal.SIGINT) == self._pressed:
                signal.signal(signal.SIGINT, self._before)
        if self._presses and id(future) not in self.fates:  # it ended in between, and the cell is to end all the same
            call = next((call for call in self._pending if call.future is future), None)
            reactions = self._reactions.get(id(future))
            if call is not None:
                self.fates[id(future)] = call.meanwhile() if reactions is None else call.outcome(reactions)
            raise asyncio.CancelledError

    def _pressed(self, number: int, frame: FrameType | None) -> None:
        sleeper = next(iter(self._waiting), None)
        if sleeper is None:
            self._before(number, frame)
            return
        sleeper.get_loop().call_soon_threadsafe(self._step, sleeper.get_loop())

    def _step(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._waiting:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._presses += 1
        if self._presses == 1:
            calls = (self._stopping.pending(future) for future in dict.fromkeys(self._waiting.values()))
            self._pending = [call for call in calls if call is not None]
            for call in self._pending:
                self._stopping.offer(call)
            if not self._pending:
                self._end()
            else:
                self._timer = loop.call_later(AGAIN_SECONDS, self._end)
        elif self._presses == 2:
            self._reactions = {id(call.future): self._stopping.interrupt(call) for call in self._pending}
            self._timer = loop.call_later(GIVE_UP_SECONDS, self._end)
        else:
            self._end()

    def _end(self) -> None:
        """The cell ends, by what Ctrl-C would have done by itself."""
        for call in self._pending:
            if not call.future.done():
                late = self._presses == 2
                self.fates[id(call.future)] = call.offers(GIVE_UP_SECONDS) if late else call.goes_on()
        if self._before is not signal.default_int_handler:
            for sleeper in tuple(self._waiting):
                sleeper.cancel()
        self._before(signal.SIGINT, None)
