"""Observers of threads and tasks that wait for futures: progress displays, deadlock detection, debuggers."""

import asyncio
import contextlib
import contextvars
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from monarch_nb.runtime.future import Future

Leave = Callable[[], None]  # called when a wait is over


class Waiter(Protocol):
    """Called while a thread blocks in `Future.get`."""

    def waiting(self, future: "Future[Any]", seconds: float) -> None:
        """Called on the waiting thread, first after `TICK` seconds and again each tick; may raise."""


TICK = 0.1
waiters: list[Waiter] = []

# Entered for the whole of a wait, with how many seconds it may last.
guards: list[Callable[["Future[Any]", float | None], Leave | None]] = []

# Entered for an `await`, with the asyncio future that it suspends on: an exception set there ends the wait.
await_guards: list[Callable[["Future[Any]", "asyncio.Future[None]"], Leave | None]] = []

# Called instead where no wait is needed, for the result is there: what came before it may have to be shown first.
ready: list[Callable[[], None]] = []

# Asked when Ctrl-C ends a blocking wait: what becomes of the operation, "" to say no more than the wait itself does.
stop_words: list[Callable[["Future[Any]"], str]] = []

# Asked before a thread blocks; may raise.
block_checks: list[Callable[["Future[Any]"], None]] = []

# What is awaited now: where it suspends, what for, on which loop and in whose context.
_awaits: dict["asyncio.Future[None]", tuple["Future[Any]", asyncio.AbstractEventLoop, contextvars.Context]] = {}


def enter(future: "Future[Any]", timeout: float | None) -> list[Leave]:
    """A wait begins; `leave` it with what this returns."""
    return [leave for guard in guards if (leave := guard(future, timeout)) is not None]


def enter_await(future: "Future[Any]", signal: "asyncio.Future[None]") -> list[Leave]:
    """A task of the running loop suspends on `signal`, until `leave_await`."""
    entered = enter(future, None)
    entered += [leave for guard in await_guards if (leave := guard(future, signal)) is not None]
    _awaits[signal] = (future, asyncio.get_running_loop(), contextvars.copy_context())
    return entered


def leave_await(signal: "asyncio.Future[None]", entered: list[Leave]) -> None:
    """It goes on."""
    del _awaits[signal]
    leave(entered)


def leave(entered: list[Leave]) -> None:
    """Each guard is left, also where one raises: that one ends the wait."""
    try:
        while entered:
            entered.pop(0)()
    except BaseException:
        leave(entered)
        raise


def enter_awaits(guard: Callable[["Future[Any]", "asyncio.Future[None]"], Leave | None]) -> None:
    """Has `guard` entered soon for the awaits that are under way, each on its own loop."""
    for signal, (future, loop, context) in tuple(_awaits.items()):
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(context.copy().run, guard, future, signal)


def join(
    *,
    waiter: Waiter | None = None,
    guard: Callable[["Future[Any]", float | None], Leave | None] | None = None,
    await_guard: Callable[["Future[Any]", "asyncio.Future[None]"], Leave | None] | None = None,
    words: Callable[["Future[Any]"], str] | None = None,
    when_ready: Callable[[], None] | None = None,
) -> Leave:
    """Takes part in the waits that begin from now on in this process; the function returned ends that.

    `waiter`, `guard`, `await_guard` and `words` are what the lists above hold.
    """
    parts: tuple[tuple[list[Any], Any], ...] = (
        (waiters, waiter),
        (guards, guard),
        (await_guards, await_guard),
        (stop_words, words),
        (ready, when_ready),
    )
    joined = [(members, member) for members, member in parts if member is not None]
    for members, member in joined:
        members.append(member)

    def leave_all() -> None:
        for members, member in joined:
            if member in members:
                members.remove(member)

    return leave_all
