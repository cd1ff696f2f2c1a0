"""Observers of threads and tasks that wait for futures: progress displays, deadlock detection, debuggers."""

import contextlib
import contextvars
from collections.abc import Callable
from typing import TYPE_CHECKING

from monarch_nb._deferred import asyncio

if TYPE_CHECKING:
    from monarch_nb.runtime.future import Future

Leave = Callable[[], None]  # called when a wait is over
TICK = 0.1  # seconds


class WaitObserver:
    """Takes part in the waits of this process between `join` and `leave`. Its methods run on the waiting thread."""

    explains_long_waits = False  # True if it shows why a call makes no progress

    def begin(self, future: "Future[object]", timeout: float | None) -> Leave | None:
        """Begins a wait of `timeout` seconds at most; calls the returned function when it is over."""

    def begin_await(self, future: "Future[object]", signal: "asyncio.Future[None]") -> Leave | None:
        """Begins a suspension of a task on `signal`: an exception set there ends the wait. Called after `begin`."""

    def tick(self, future: "Future[object]", seconds: float) -> None:
        """Called during a blocking `Future.get`: first after `TICK` seconds and again each tick; may raise."""

    def no_wait(self) -> None:
        """Called when the result is available without a wait: earlier output may have to be shown first."""

    def stop_text(self, future: "Future[object]") -> str:
        """Returns what happens to the operation when Ctrl-C ends a blocking wait; "" for nothing to add."""
        return ""


class _Observers:
    """The observers that have joined, and for each event the methods that are overridden, which alone are called."""

    def __init__(self) -> None:
        self.members: tuple[WaitObserver, ...] = ()
        self._sort()

    def change(self, members: tuple[WaitObserver, ...]) -> None:
        self.members = members
        self._sort()

    def _sort(self) -> None:
        members, base = self.members, WaitObserver
        self.begin = tuple(m.begin for m in members if type(m).begin is not base.begin)
        self.begin_await = tuple(m.begin_await for m in members if type(m).begin_await is not base.begin_await)
        self.tick = tuple(m.tick for m in members if type(m).tick is not base.tick)
        self.no_wait = tuple(m.no_wait for m in members if type(m).no_wait is not base.no_wait)
        self.stop_text = tuple(m.stop_text for m in members if type(m).stop_text is not base.stop_text)


observers = _Observers()

# Current awaits: the signal on which each suspends, its future, its loop and its context.
_awaits: dict["asyncio.Future[None]", "tuple[Future[object], asyncio.AbstractEventLoop, contextvars.Context]"] = {}


def join(observer: WaitObserver) -> None:
    """Makes `observer` take part in the waits that begin from now on in this process."""
    observers.change((*observers.members, observer))


def leave(observer: WaitObserver) -> None:
    """Removes `observer` from later waits; it stays in those that it has entered to their end."""
    observers.change(tuple(member for member in observers.members if member is not observer))


def enter(future: "Future[object]", timeout: float | None, entered: list[Leave]) -> None:
    """Begins a wait; pass `entered`, to which this appends, to `end` when it is over, also if this is interrupted."""
    for begin in observers.begin:
        if (finish := begin(future, timeout)) is not None:
            entered.append(finish)


def enter_await(future: "Future[object]", signal: "asyncio.Future[None]") -> list[Leave]:
    """Begins a suspension of a task of the running loop on `signal`, until `end_await`."""
    entered = list[Leave]()
    enter(future, None, entered)
    entered += [finish for begin in observers.begin_await if (finish := begin(future, signal)) is not None]
    _awaits[signal] = (future, asyncio.get_running_loop(), contextvars.copy_context())
    return entered


def end_await(signal: "asyncio.Future[None]", entered: list[Leave]) -> None:
    """Ends the suspension of a task."""
    del _awaits[signal]
    end(entered)


def end(entered: list[Leave]) -> None:
    """Calls all of `entered`, also if one raises: its error ends the wait."""
    try:
        while entered:
            entered.pop(0)()
    except BaseException:
        end(entered)
        raise


def enter_awaits(observer: WaitObserver) -> None:
    """Makes `observer` enter current awaits soon, each on its own loop."""
    for signal, (future, loop, context) in tuple(_awaits.items()):
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(context.copy().run, observer.begin_await, future, signal)
