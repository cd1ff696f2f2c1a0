"""Ctrl-C while a cell waits: the first one stops waiting, the second interrupts the ranks. After the cell has ended, an
idle kernel takes the second one for some seconds.
"""

import asyncio
import queue
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from enum import Enum, auto
from html import escape
from types import FrameType
from typing import Any

from monarch_nb.runtime import Future, MeshState, Runtime, waiting, when_done

from . import interrupted_calls
from .display.html import framed, lab_button
from .front import Front
from .interrupted_calls import FileName, InterruptedCall, Reactions, interrupt

AGAIN_SECONDS = 2.0  # time in which a second Ctrl-C means the ranks, if the cell waits for it
OFFER_SECONDS = 10.0  # time in which an idle kernel takes a second Ctrl-C for the ranks
Interrupt = Callable[[Sequence[InterruptedCall], Callable[[Sequence[str]], None]], dict[str, Reactions]]


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
        for sleeper in tuple(self._waiting):
            sleeper.cancel()
        if self._handler is not signal.default_int_handler:  # a terminal's, which would end the loop and not the cell
            self._handler(signal.SIGINT, None)


class _News(Enum):
    """Events of an offer."""

    PRESSED = auto()
    ANSWERED = auto()  # a call has ended
    ELSEWHERE = auto()  # another cell has begun: stop means that cell
    CLOSED = auto()


class SecondPress(waiting.WaitObserver):
    """Offers, at the first press, that a second one interrupts the ranks; handles SIGINT in the meantime.

    A press means the newest cell: once another cell begins, the offer takes none, and only its button is left. A wait
    that begins in the cell that was stopped, as in `finally`, has its own first press.
    """

    def __init__(self, front: Front, interrupt: Interrupt) -> None:
        self._front = front
        self._interrupt = interrupt
        self._offer: _Offer | None = None  # the newest, while it is open
        self._in_cell: Any = None  # the handlers of SIGINT to restore
        self._idle: Any = None
        self._leave_awaits: Callable[[], None] = lambda: None

    def install(self) -> None:
        """Follows cells and their waits."""
        self._front.beginning.append(self._on_cell_begin)
        self._leave_awaits = self._front.before_awaits(self._on_await)
        waiting.join(self)

    def uninstall(self) -> None:
        """Withdraws the offer."""
        waiting.leave(self)
        if self._on_cell_begin in self._front.beginning:
            self._front.beginning.remove(self._on_cell_begin)
        self._leave_awaits()
        self._close()
        self._restore()

    @property
    def possible(self) -> bool:
        """True if this kernel lets SIGINT be handled between cells, and displays be updated."""
        return self._front.idle_handler is not None

    def offer(self, calls: Iterable[InterruptedCall], before: object = None, *, pressed: bool = False) -> None:
        """Offers a second press after a wait; `before` is its usual handler of SIGINT, `pressed` if it came twice.

        Called on the main thread. Does not wait. Until it returns a KeyboardInterrupt may come, as long as the handler
        is not in place; then it has done nothing.
        """
        previous = self._offer
        earlier = previous.pending() if previous is not None and previous.cell is self._front.parent else []
        offer = _Offer(self._front, [*earlier, *calls])
        current = before or signal.getsignal(signal.SIGINT)
        if current != self._pressed:
            self._in_cell = current
        signal.signal(signal.SIGINT, self._pressed)  # from now on no press raises KeyboardInterrupt
        if self._front.idle_handler != self._pressed:
            self._idle, self._front.idle_handler = self._front.idle_handler, self._pressed
        self._close()
        self._offer = offer
        if pressed:
            offer.press()
        offer.show()
        for call in offer.calls:
            when_done(call.future, offer.answered)
        threading.Thread(target=self._watch, args=(offer,), name="monarch-second-press", daemon=True).start()

    def press(self) -> bool:
        """Handles a Ctrl-C; returns whether it was meant for the ranks."""
        return self._offer is not None and self._offer.press()

    # -- SIGINT, on the main thread ----------------------------------------------------------------------------------

    def _pressed(self, number: int, frame: FrameType | None) -> None:
        if self.press():
            return
        before = self._in_cell if self._front.running else self._idle
        if callable(before):
            before(number, frame)
        elif before == signal.SIG_DFL:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.raise_signal(signal.SIGINT)

    def begin(self, future: Future[object], timeout: float | None) -> None:
        """Starts a wait: after the offer it has its own first press."""
        if self._offer is not None and self._front.in_cell and signal.getsignal(signal.SIGINT) == self._pressed:
            signal.signal(signal.SIGINT, self._in_cell)

    def _on_await(self) -> None:
        """Has the kernel restore this handler, not the usual one, which would end the kernel's reply to the cell."""
        handler = signal.getsignal(signal.SIGINT)
        if self.possible and handler != self._pressed and threading.current_thread() is threading.main_thread():
            self._in_cell = handler
            signal.signal(signal.SIGINT, self._pressed)

    def _on_cell_begin(self) -> None:
        if self._offer is not None and self._front.numbered:
            self._offer.leave(_News.ELSEWHERE)
            self._restore()

    def _close(self) -> None:
        if self._offer is not None:
            self._offer.leave(_News.CLOSED)
            self._offer = None

    def _restore(self) -> None:
        if self._front.idle_handler == self._pressed:
            self._front.idle_handler = self._idle
        if signal.getsignal(signal.SIGINT) == self._pressed:
            signal.signal(signal.SIGINT, self._in_cell if self._front.running else self._idle)

    # -- on a thread of the offer ------------------------------------------------------------------------------------

    def _watch(self, offer: "_Offer") -> None:
        offer.show(self._until_over(offer))
        self._front.call_soon(lambda: self._is_over(offer))

    def _until_over(self, offer: "_Offer") -> list[str]:
        until = time.monotonic() + OFFER_SECONDS
        while True:
            news = offer.next(until - time.monotonic())
            if news is _News.PRESSED:
                return self._end_ranks(offer)
            if news is _News.ELSEWHERE:
                offer.show()
            elif news is not _News.ANSWERED or not offer.pending():
                return offer.left_alone()

    def _end_ranks(self, offer: "_Offer") -> list[str]:
        calls = offer.pending()
        if not calls:
            return offer.left_alone()
        offer.show(["Interrupting the ranks…"])
        stuck: list[str] = []

        def say(lines: Sequence[str]) -> None:
            stuck.extend(lines)
            offer.show(["Interrupting the ranks…", *stuck])

        reactions = self._interrupt(calls, say)
        until = time.monotonic() + interrupted_calls.GIVE_UP_SECONDS
        for call in calls:
            call.future.wait(max(0.0, until - time.monotonic()))
        lines: list[str] = []
        for call in calls:
            if call.future.done():
                lines += call.outcomes(reactions[call.state.uid])
            else:
                lines.append(call.late() if stuck else call.offers())  # those lines say what ends them
        return [*(f"{line.replace('interrupted', 'Interrupted', 1)}." for line in dict.fromkeys(lines)), *stuck]

    def _is_over(self, offer: "_Offer") -> None:
        if self._offer is offer:
            self._offer = None
            self._restore()


class _Offer:
    """The display in the interrupted cell, and the events of its offer."""

    def __init__(self, front: Front, calls: Sequence[InterruptedCall]) -> None:
        self.cell = front.parent
        self.calls = calls
        self._front = front
        self._id = f"monarch-{secrets.token_hex(8)}"
        # A time of day: the line may be saved, and read when this kernel and the button are gone.
        self._until = time.strftime("%H:%M:%S", time.localtime(time.time() + OFFER_SECONDS))
        self._shown = False
        self._takes = True  # a press
        self._superseded = False
        self._news: queue.SimpleQueue[_News] = queue.SimpleQueue()  # a handler of signals may put into it
        self._head = f"Stopped waiting for {' and '.join(dict.fromkeys(call.label for call in calls))}."
        self._names = list(dict.fromkeys(call.state.name for call in calls))

    def pending(self) -> list[InterruptedCall]:
        """Returns the calls that have not ended."""
        return [call for call in self.calls if not call.future.done()]

    def press(self) -> bool:
        """Handles a Ctrl-C; returns whether it was meant for the ranks."""
        takes, self._takes = self._takes, False
        if takes:
            self._news.put(_News.PRESSED)
        return takes

    def leave(self, news: _News) -> None:
        """Ends the offer: a press no longer concerns the ranks."""
        self._takes = False
        self._superseded = news is _News.ELSEWHERE
        self._news.put(news)

    def answered(self, future: Future[object]) -> None:
        """Records that one of the calls has ended."""
        self._news.put(_News.ANSWERED)

    def next(self, seconds: float) -> _News:
        """Returns the next event, `CLOSED` if there is none for some seconds. Blocks that long."""
        try:
            return self._news.get(timeout=max(0.0, seconds))
        except queue.Empty:
            self._takes = False
            return _News.CLOSED if self._news.empty() else self._news.get()

    def left_alone(self) -> list[str]:
        """State of calls for which no second press came."""
        ends = [f"Meanwhile {call.end()}." for call in self.calls if call.future.done()]
        return [*ends, f"It goes on: {self._magic()} ends it there."] if self.pending() else ends

    def show(self, lines: Sequence[str] | None = None) -> None:
        """Shows what a second press does, or lines in place of that."""
        buttons = ""
        if lines is None:
            hint = f"Press stop (Ctrl-C) again by {self._until} to interrupt the ranks too"
            lines = [f"{hint}; {self._magic()} does it at any time."]
            if self._superseded:
                lines = [f"It goes on: {self._magic()} ends it there. Stop means the cell that has begun since."]
            buttons = "".join(self._button(call) for call in {call.state.uid: call for call in self.calls}.values())
        head = [self._head, *lines]
        html = framed(f'<div class="mnb-h">{"<br>".join(map(escape, head))}</div>', buttons)
        bundle = {"text/plain": "\n".join(head), "text/html": html}
        self._front.display(bundle, self._id, update=self._shown, cell=self.cell)
        self._shown = True

    def _magic(self) -> str:
        return f"%interrupt {' '.join(self._names)}"

    def _button(self, call: InterruptedCall) -> str:
        owner = f" of {call.state.name}" if len(self._names) > 1 else ""
        return lab_button(f"Interrupt the ranks{owner}", "monarch-nb:interrupt", {"mesh": call.state.uid, "sure": True})
