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

    def install(self) -> None:
        """From now on Ctrl-C has these two steps in waits of cells."""
        waiting.stop_words.append(self.stopped)
        waiting.await_guards.append(self._awaits.guard)

    def uninstall(self) -> None:
        """Not any more."""
        for registered, mine in (
            (waiting.stop_words, self.stopped),
            (waiting.await_guards, self._awaits.guard),
        ):
            if mine in registered:
                registered.remove(mine)  # type: ignore[arg-type]

    def fate(self, future: Future[Any]) -> str:
        """What has become of an awaited call that Ctrl-C was pressed for; "" if that is not known."""
        return self._awaits.told.pop(id(future), "")

    @property
    def in_cell(self) -> bool:
        """Whether this thread runs a cell."""
        return self._front.in_cell

    def stopped(self, future: Future[Any]) -> str:
        """A blocking wait of a cell was interrupted: the second step, and what has become of the call."""
        one = self.pending(future)
        if self._asking or one is None or not self.in_cell:
            return ""
        self._asking = True
        try:
            try:
                self.offer(one)  # the second may come before this is written
                return one.meanwhile() if future.wait(AGAIN_SECONDS) else one.goes_on()
            except KeyboardInterrupt:
                pass
            try:
                reactions = self.interrupt(one)
                return one.outcome(reactions) if future.wait(GIVE_UP_SECONDS) else one.offers(GIVE_UP_SECONDS)
            except KeyboardInterrupt:
                return one.goes_on()
        finally:
            self._asking = False

    def pending(self, future: Future[Any]) -> "Waited | None":
        """The call that a future waits for; None for what no rank can be interrupted for."""
        call = self._engine.calls.get(future.wait_id)
        state = self._engine.meshes.get(call.mesh) if call is not None else None
        return Waited(future, call, state) if call is not None and isinstance(state, MeshState) else None

    def offer(self, one: "Waited") -> None:
        """Says what a second Ctrl-C does."""
        self._front.write(
            f"Stopped waiting for {one.label}. "
            f"Interrupt again within {AGAIN_SECONDS:g} s to interrupt the ranks too.\n",
            "stderr",
        )

    def interrupt(self, one: "Waited") -> dict[int, Doing | None]:
        """Interrupts the ranks that are waited for, and says which do not react, within a second."""
        mine = [call for call in tuple(self._engine.calls.values()) if call.mesh == one.state.uid and _of_cell(call)]
        reactions = interrupted(one.state, one.ranks, [call.call for call in mine])
        for line in stuck(one.state, reactions, self._name):
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
        told = f"{self._what} on {at(self.state, left)} has not stopped within {seconds:g} s"
        return f"{told}: {anew(self.state, left)}"


def _of_cell(call: PendingCall) -> bool:
    return call.caller.actor_instance.cell is None


class _Awaits:
    """The steps in a cell that awaits: they run on its loop, between two turns of it."""

    def __init__(self, stopping: Stopping) -> None:
        self.told: dict[int, str] = {}  # by id of the awaited future
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
            self.told.clear()
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
        if self._presses and id(future) not in self.told:  # it ended in between, and the cell is to end all the same
            one = next((one for one in self._pending if one.future is future), None)
            reactions = self._reactions.get(id(future))
            if one is not None:
                self.told[id(future)] = one.meanwhile() if reactions is None else one.outcome(reactions)
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
            found = (self._stopping.pending(future) for future in dict.fromkeys(self._waiting.values()))
            self._pending = [one for one in found if one is not None]
            for one in self._pending:
                self._stopping.offer(one)
            if not self._pending:
                self._end()
            else:
                self._timer = loop.call_later(AGAIN_SECONDS, self._end)
        elif self._presses == 2:
            self._reactions = {id(one.future): self._stopping.interrupt(one) for one in self._pending}
            self._timer = loop.call_later(GIVE_UP_SECONDS, self._end)
        else:
            self._end()

    def _end(self) -> None:
        """The cell ends, by what Ctrl-C would have done by itself."""
        for one in self._pending:
            if not one.future.done():
                late = self._presses == 2
                self.told[id(one.future)] = one.offers(GIVE_UP_SECONDS) if late else one.goes_on()
        if self._before is not signal.default_int_handler:
            for sleeper in tuple(self._waiting):
                sleeper.cancel()
        self._before(signal.SIGINT, None)
