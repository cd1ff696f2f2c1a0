"""Brings the debugger into waiting cells: blocking ones, and those that `await`."""

import asyncio
from collections.abc import Callable
from typing import Any

from monarch_nb.debug.controller import Controller
from monarch_nb.debug.errors import StoppedAtBreakpoint
from monarch_nb.debug.groups import short
from monarch_nb.debug.prompt import Waiting
from monarch_nb.runtime import Future, Runtime, future, waiters
from monarch_nb.runtime.features import feature
from monarch_nb.runtime.future import WAIT_TICK

from ..display.errors import cell_name
from ..front import Front
from .broker import Broker


class Prompting:
    """A waiter: told by `Future.get` each tick, on the waiting thread; for `await` it ticks on the cell's loop."""

    def __init__(self, shell: Any, front: Front, engine: Runtime) -> None:
        self.controller: Controller = feature(engine, "debug").controller
        self._front = front
        self.asks = self._waiting = Waiting(
            self.controller, Broker(shell, front), lambda file: cell_name(shell, file) or short(file)
        )

    def install(self) -> None:
        """From now on cells show what is stopped."""
        waiters.append(self)
        future._wait_guards.append(self._begin)
        future._await_guards.append(self._awaited)

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
        if self._front.in_cell:
            self._waiting.look(future)

    def _begin(self, future: Future[Any], unlimited: bool) -> None:
        if self._front.in_cell:
            self._waiting.begin()

    def _awaited(self, future: Future[Any], signal: "asyncio.Future[None]") -> Callable[[], None] | None:
        if not self._front.in_cell:
            return None
        loop = asyncio.get_running_loop()
        handles: list[asyncio.TimerHandle] = []

        def tick() -> None:
            try:
                self._waiting.look(future)
            except (StoppedAtBreakpoint, KeyboardInterrupt) as error:
                if not signal.done():
                    signal.set_exception(error)
                return
            handles[:] = [loop.call_later(WAIT_TICK, tick)]

        handles.append(loop.call_later(WAIT_TICK, tick))
        return lambda: handles[0].cancel()
