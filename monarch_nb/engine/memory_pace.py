"""How the time of a cluster in memory passes: not while anybody has something to do, by itself while code waits."""

import asyncio
import threading
import time as wall
from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import count
from typing import Any

from monarch_nb.runtime import ActorCell, Future, Runtime, current
from monarch_nb.runtime.actors.executors import AsyncExecutor
from monarch_nb.transport.memory.time import MemoryTime

QUIET_S = 1.0  # real seconds that actors may take for what falls due at one moment before time goes on without them
_LOOK_S = 0.0005


class MemoryPace:
    """Lets time pass while code outside actors waits: at once where all others wait too, else as real time does.

    `guard` is entered for each wait of this process, with the time-out of `Future.get`, which is real time: the
    simulated time does not run ahead of it by more.
    """

    def __init__(self, time: MemoryTime, engines: Callable[[], Iterable[Runtime]]) -> None:
        self._time, self._engines = time, engines
        self._changed = threading.Condition()
        self._inside: defaultdict[ActorCell, list[Future[Any]]] = defaultdict(list)  # what each actor waits for
        self._outside: dict[int, tuple[Future[Any], float]] = {}  # waits of other code: how far time may pass for them
        self._numbers = count()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="monarch-memory-pace", daemon=True)
        self._thread.start()

    def guard(self, future: Future[Any], timeout: float | None) -> Callable[[], None]:
        """A wait begins; what is returned ends it."""
        context = current.get()
        cell = context.actor_instance.cell if context is not None else None
        if isinstance(cell, ActorCell):
            return self._wait_inside(cell, future)
        number = next(self._numbers)
        with self._changed:
            limit = self._time.monotonic() + (float("inf") if timeout is None else timeout)
            self._outside[number] = future, limit
            if len(self._outside) == 1:
                self._changed.notify()
        return lambda: self._leave_outside(number)

    def settle(self) -> None:
        """Blocks until messages have arrived and actors do nothing but wait, for `QUIET_S` at most."""
        until = wall.monotonic() + QUIET_S
        before = -1
        while (left := until - wall.monotonic()) > 0:
            self._time.settle(left)
            before, deliveries = self._deliveries_at_rest(), before
            if before >= 0 and before == deliveries:
                return
            wall.sleep(_LOOK_S)

    def close(self) -> None:
        """Time passes for nobody any more; blocks."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(5.0)

    # -- how --------------------------------------------------------------------------------------------------------

    def _wait_inside(self, cell: ActorCell, future: Future[Any]) -> Callable[[], None]:
        def leave() -> None:
            with self._changed:
                self._inside[cell].remove(future)

        with self._changed:
            self._inside[cell].append(future)
        return leave

    def _leave_outside(self, number: int) -> None:
        with self._changed:
            del self._outside[number]

    def _run(self) -> None:
        while not self._closed:
            with self._changed:
                self._changed.wait_for(lambda: self._outside or self._closed)
            self._pass_while_waited_for()

    def _pass_while_waited_for(self) -> None:
        before, then = -1, wall.monotonic()
        while not self._closed:
            wall.sleep(_LOOK_S)
            with self._changed:
                if not self._outside:
                    return
                limit = max((limit for future, limit in self._outside.values() if not future.done()), default=0.0)
            before, deliveries = self._deliveries_at_rest(), before
            then, earlier = wall.monotonic(), then
            now = self._time.monotonic() + then - earlier
            due = self._time.next_due
            at_rest = before >= 0 and before == deliveries
            self._time.pass_to(max(now, due) if at_rest and due is not None and due <= limit else now)

    def _deliveries_at_rest(self) -> int:
        """How many messages have come so far; -1 while somebody has something to do."""
        deliveries = self._time.deliveries
        return deliveries if self._time.settle(0) and self._resting() else -1

    def _resting(self) -> bool:
        return all(self._rests(cell) for engine in self._engines() for cell in tuple(engine.cells.values()))

    def _rests(self, cell: ActorCell) -> bool:
        if cell.ended or cell.ending:
            return True
        executor = cell.executor
        if _loop_rests(executor.loop) if isinstance(executor, AsyncExecutor) else executor.resting:
            return True
        with self._changed:  # a thread whose future is done has something to do, though it may not have woken up yet
            waits = sum(not future.done() for future in self._inside[cell])
        return waits >= max(1, len(cell.running_now()))


def _loop_rests(loop: asyncio.AbstractEventLoop | None) -> bool:
    """Whether a loop runs nothing, waits for no point in time and for no thread of its own; False where asyncio does
    not show that."""
    if loop is None or asyncio.current_task(loop) is not None:
        return False
    return not any(getattr(loop, name, True) for name in ("_ready", "_scheduled", "_default_executor"))
