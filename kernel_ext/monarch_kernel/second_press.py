"""The second Ctrl-C after the cell has ended: for some seconds an idle kernel takes it for the ranks."""

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

from monarch_nb.runtime import Future, waiting, when_done

from . import interrupted_calls
from .display.html import framed, lab_button
from .front import Front
from .interrupted_calls import InterruptedCall, Reactions

SECONDS = 10.0

Interrupt = Callable[[Sequence[InterruptedCall], Callable[[Sequence[str]], None]], dict[str, Reactions]]


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

    def install(self) -> None:
        """Follows cells and their waits."""
        self._front.beginning.append(self._on_cell_begin)
        waiting.join(self)

    def uninstall(self) -> None:
        """Withdraws the offer."""
        waiting.leave(self)
        if self._on_cell_begin in self._front.beginning:
            self._front.beginning.remove(self._on_cell_begin)
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
        until = time.monotonic() + SECONDS
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
        self._until = time.strftime("%H:%M:%S", time.localtime(time.time() + SECONDS))
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
