"""Ctrl-C while a cell waits: the first one stops waiting, the second interrupts the ranks."""

import asyncio
import signal
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from monarch_nb.runtime import Future, MeshState, Runtime, waiting

from . import interrupted_calls
from .front import Front
from .interrupted_calls import InterruptedCall, Reactions, interrupt
from .reactions import FileName
from .second_press import SecondPress

AGAIN_SECONDS = 2.0  # time in which a second Ctrl-C means the ranks, if the cell waits for it


class Stopping(waiting.WaitObserver):
    """The two steps, for waits that block and for waits by `await`, with the same texts.

    In a notebook the first step ends the cell, and the kernel takes the second while it is idle. Where it cannot, as in
    a terminal, the cell waits for the second step.
    """

    def __init__(self, front: Front, runtime: Runtime, name: FileName) -> None:
        self._front = front
        self._runtime = runtime
        self._name = name
        self._asking = False  # a blocking wait is in its two steps, whose own wait must not start them again
        self.second = SecondPress(front, self.interrupt)
        self._awaits = _Awaits(self)

    def install(self) -> None:
        """Installs the two steps of Ctrl-C in waits of cells."""
        self.second.install()
        waiting.join(self)

    def uninstall(self) -> None:
        """Removes them."""
        waiting.leave(self)
        self.second.uninstall()

    def fate(self, future: Future[object]) -> str:
        """State of an awaited call that Ctrl-C was pressed for; "" if unknown."""
        return self._awaits.fates.pop(id(future), "")

    def begin_await(self, future: Future[object], signal: "asyncio.Future[None]") -> Callable[[], None] | None:
        """Starts the wait of a cell for a future."""
        return self._awaits.begin(future, signal)

    @property
    def in_cell(self) -> bool:
        """True on the thread that runs a cell."""
        return self._front.in_cell

    def stop_text(self, future: Future[object]) -> str:
        """Runs the second step of an interrupted blocking wait; returns the state of the call."""
        call = self.pending(future)
        if self._asking or call is None or not self.in_cell:
            return ""
        if self.second.possible:
            try:
                self.second.offer([call])
            except KeyboardInterrupt:
                self.second.offer([call], pressed=True)
            return call.goes_on()
        self._asking = True
        try:
            try:
                self.offer(call)  # the second press may come before this is written
                return call.meanwhile() if future.wait(AGAIN_SECONDS) else call.goes_on()
            except KeyboardInterrupt:
                pass
            try:
                reactions = self.interrupt([call])[call.state.uid]
                return call.outcome(reactions) if future.wait(interrupted_calls.GIVE_UP_SECONDS) else call.offers()
            except KeyboardInterrupt:
                return call.goes_on()
        finally:
            self._asking = False

    def pending(self, future: Future[object]) -> InterruptedCall | None:
        """Returns the call that a future waits for; None if it has no ranks that can be interrupted."""
        call = self._runtime.calls.get(future.wait_id)
        state = self._runtime.meshes.get(call.mesh) if call is not None else None
        return InterruptedCall(future, call, state) if call is not None and isinstance(state, MeshState) else None

    def offer(self, call: InterruptedCall) -> None:
        """Shows what a second Ctrl-C does while the cell waits for the call."""
        self._front.write(
            f"Stopped waiting for {call.label}. "
            f"Interrupt again within {AGAIN_SECONDS:g} s to interrupt the ranks too.\n",
            "stderr",
        )

    def interrupt(
        self, calls: Sequence[InterruptedCall], say: Callable[[Sequence[str]], None] | None = None
    ) -> dict[str, Reactions]:
        """Interrupts the ranks that are waited for, and says which do not react."""
        return interrupt(self._runtime, calls, self._name, say or self._write)

    def _write(self, lines: Sequence[str]) -> None:
        self._front.write("".join(f"{line}\n" for line in lines), "stderr")


class _Awaits:
    """The steps in a cell that awaits; they run on its loop."""

    def __init__(self, stopping: Stopping) -> None:
        self.fates: dict[int, str] = {}  # by id of the awaited future
        self._stopping = stopping
        self._waiting: dict[asyncio.Future[None], Future[Any]] = {}
        self._handler: Any = None  # the former handler of SIGINT
        self._timer: asyncio.TimerHandle | None = None
        self._presses = 0
        self._pending: list[InterruptedCall] = []
        self._reactions: dict[str, Reactions] = {}  # by uid of the mesh

    def begin(self, future: Future[object], sleeper: "asyncio.Future[None]") -> Callable[[], None] | None:
        """Starts the wait of a cell for a future, asleep on `sleeper`."""
        if not self._stopping.in_cell:
            return None
        if not self._waiting:
            handler = signal.getsignal(signal.SIGINT)
            if not callable(handler):
                return None
            self.fates.clear()
            self._handler, self._presses, self._pending, self._reactions = handler, 0, [], {}
            signal.signal(signal.SIGINT, self._pressed)
        self._waiting[sleeper] = future
        return lambda: self._finish(sleeper)

    def _finish(self, sleeper: "asyncio.Future[None]") -> None:
        future = self._waiting.pop(sleeper)
        if not self._waiting:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            if signal.getsignal(signal.SIGINT) == self._pressed:
                signal.signal(signal.SIGINT, self._handler)
        if self._presses and id(future) not in self.fates:  # the call ended meanwhile; the cell has to end too
            call = next((call for call in self._pending if call.future is future), None)
            if call is not None:
                reactions = self._reactions.get(call.state.uid)
                self.fates[id(future)] = call.meanwhile() if reactions is None else call.outcome(reactions)
            raise asyncio.CancelledError

    def _pressed(self, number: int, frame: FrameType | None) -> None:
        sleeper = next(iter(self._waiting), None)
        if sleeper is None:
            self._handler(number, frame)
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
            if not self._pending:
                self._end()
            elif self._stopping.second.possible:
                self._stopping.second.offer(self._pending, self._handler)
                self._end()
            else:
                for call in self._pending:
                    self._stopping.offer(call)
                self._timer = loop.call_later(AGAIN_SECONDS, self._end)
        elif self._stopping.second.possible:  # the press came before the cell could end
            self._stopping.second.press()
        elif self._presses == 2:
            self._reactions = self._stopping.interrupt(self._pending)
            self._timer = loop.call_later(interrupted_calls.GIVE_UP_SECONDS, self._end)
        else:
            self._end()

    def _end(self) -> None:
        """Ends the cell as Ctrl-C alone would have done."""
        for call in self._pending:
            if not call.future.done():
                late = self._presses == 2
                self.fates[id(call.future)] = call.offers() if late else call.goes_on()
        if self._handler is not signal.default_int_handler:
            for sleeper in tuple(self._waiting):
                sleeper.cancel()
        self._handler(signal.SIGINT, None)
