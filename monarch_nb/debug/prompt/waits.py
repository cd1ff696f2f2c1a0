"""Brings the debugger into waits: those that block, and those that `await`."""

import asyncio
import sys
import threading
from collections.abc import Callable
from typing import Any

from monarch_nb.debug.control.controller import Controller, asking
from monarch_nb.debug.errors import StoppedAtBreakpoint
from monarch_nb.debug.prompt.conversation import NoPrompt, Waiting
from monarch_nb.runtime import Future, current, future, waiters
from monarch_nb.runtime.future import WAIT_TICK

HOW = "Look at them with monarch.debug (table, eval), continue them with debug.resume(); then .get() again"


class Attending:
    """A waiter: told by `Future.get` each tick, on the waiting thread; for `await` it ticks on the waiting loop."""

    def __init__(self, waiting: Waiting, here: Callable[[], bool]) -> None:
        self._waiting = waiting
        self._here = here  # whether a wait of this thread is one in which people are asked

    def install(self) -> None:
        """From now on waits show what is stopped."""
        self._waiting.controller.attended = True
        waiters.append(self)
        future._wait_guards.append(self._begin)
        future.guard_awaits(self._awaited)

    def uninstall(self) -> None:
        """Not any more."""
        for registered, mine in (
            (waiters, self),
            (future._wait_guards, self._begin),
            (future._await_guards, self._awaited),
        ):
            if mine in registered:
                registered.remove(mine)  # type: ignore[arg-type]

    def waiting(self, future: Future[Any], seconds: float) -> None:
        """A tick of a wait. Raises StoppedAtBreakpoint."""
        if not asking.now and self._here():
            self._waiting.look(future)

    def _begin(self, future: Future[Any], unlimited: bool) -> None:
        if not asking.now and self._here():
            self._waiting.begin()

    def _awaited(self, future: Future[Any], signal: "asyncio.Future[None]") -> Callable[[], None] | None:
        if not self._here():
            return None
        loop = asyncio.get_running_loop()
        handles: list[asyncio.TimerHandle] = []

        def tick() -> None:
            if signal.done():
                return
            try:
                self._waiting.look(future)
            except (StoppedAtBreakpoint, KeyboardInterrupt) as error:
                if not signal.done():
                    signal.set_exception(error)
                return
            handles[:] = [loop.call_later(WAIT_TICK, tick)]

        handles.append(loop.call_later(WAIT_TICK, tick))
        return lambda: handles[0].cancel()


class Console:
    """The terminal of a script."""

    @property
    def can_ask(self) -> bool:
        """Whether a person sits there."""
        return sys.stdin is not None and not sys.stdin.closed and sys.stdin.isatty()

    @property
    def echoes(self) -> bool:
        """What is typed stays on the screen."""
        return True

    def write(self, text: str) -> None:
        """Shows text."""
        sys.stdout.write(text)
        sys.stdout.flush()

    def table(self, text: str, *, again: bool) -> bool:
        """Shows what is stopped, once: what is on the screen stays as it is."""
        if not again:
            self.write(f"{text}\n")
        return not again

    def gone(self) -> None:
        """Says that there is nothing to ask for."""
        self.write("» no rank is stopped any more\n")

    def beside(self) -> None:
        """Nothing else."""

    def ask(self, prompt: str, vain: Callable[[], bool] = lambda: False) -> str:
        """One line; waits for it whatever becomes `vain`. Raises NoPrompt, EOFError, KeyboardInterrupt."""
        if not self.can_ask:
            raise NoPrompt
        return input(prompt)


def attend(controller: Controller) -> None:
    """Scripts: their main thread asks at the terminal; without one all their waits raise StoppedAtBreakpoint."""
    if controller.attended:
        return
    console = Console()

    def here() -> bool:
        running, thread = current.get(), threading.current_thread()
        outside = running is None or running.actor_instance.cell is None
        theirs = thread is threading.main_thread() or (not console.can_ask and not thread.name.startswith("monarch"))
        return outside and theirs and not controller.engine.closed

    Attending(Waiting(controller, console, how=HOW), here).install()
