"""The end of an actor: its meshes stop, its `__cleanup__` runs, and overdue steps are interrupted."""

import asyncio
import contextlib
import inspect
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from monarch_nb.runtime.actors.executors import aside
from monarch_nb.runtime.context import Context, current
from monarch_nb.settings import settings
from monarch_nb.wire import format_exception

if TYPE_CHECKING:
    from monarch_nb.runtime.actors.cell import ActorCell

logger = logging.getLogger(__name__)

CLEANUP = "__cleanup__"
OWNED = "wait for the meshes it owns"


class Cleanup:
    """The clean-up of one actor. It runs on the actor's thread; time-outs may be checked on any thread."""

    def __init__(self, cell: "ActorCell") -> None:
        self._cell = cell
        self._step = ""
        self._since = 0.0
        self._interrupted = ""  # the step that was interrupted last

    @property
    def begun(self) -> bool:
        """True once the clean-up of the actor has begun."""
        return bool(self._step)

    # -- on the actor's thread --------------------------------------------------------------------------------------

    def run(self) -> None:
        """Stops the owned meshes, then runs the user's clean-up: the thread's last act."""
        cell = self._cell
        self._enter(OWNED)
        error: BaseException | None = None
        try:
            with cell.acting():
                cell.process.supervisor.stop_children(cell.instance)
                hook = self._hook()
                if hook is not None:
                    self._enter(CLEANUP)
                    with cell.interruptible():
                        hook(cell.end_error)
        except BaseException as raised:
            error = raised
        self.finish(error)

    async def run_async(self) -> None:
        """Like `run`, on the actor's loop."""
        cell = self._cell
        self._enter(OWNED)
        error: BaseException | None = None
        current.set(Context(cell.instance, cell.instance.rank))
        try:
            await aside(cell.process.supervisor.stop_children, cell.instance)
            hook = self._hook()
            if hook is not None:
                self._enter(CLEANUP)
                result = hook(cell.end_error)
                if inspect.isawaitable(result):
                    await asyncio.wait_for(result, settings.cleanup_timeout)
        except BaseException as raised:
            error = raised
        self.finish(error)

    def _enter(self, step: str) -> None:
        self._step, self._since = step, time.monotonic()

    def _hook(self) -> Callable[..., object] | None:
        hook = getattr(self._cell.obj, "__cleanup__", None)
        return None if hook is None or self._cell.muted or getattr(hook, "_monarch_default", False) else hook

    def finish(self, error: BaseException | None) -> None:
        """Drops the object and counts the actor as ended; an `error` of the clean-up is reported."""
        cell = self._cell
        with contextlib.ExitStack() as steps:  # each runs, even if an earlier one fails
            steps.callback(cell.finish)
            steps.callback(cell.process.actor_ended, cell)
            steps.callback(cell.refuse_queued)
            cell.obj = None
            if error is not None and not isinstance(error, asyncio.CancelledError):
                text = "".join(format_exception(error))
                logger.error("%s: __cleanup__ failed:\n%s", cell.instance, text)
                cell.cause = cell.process.supervisor.cause_of("cleanup", error, text, cell, "__cleanup__")
                cell.process.supervisor.actor_failed(cell)  # ignored by an owner that stops it

    # -- time-outs --------------------------------------------------------------------------------------------------

    @property
    def patience(self) -> float:
        """Seconds from a stop until the actor's present step is interrupted: fewer before its construction."""
        return settings.cleanup_timeout if self._cell.obj is None else settings.stop_actor_timeout

    @property
    def doing(self) -> str:
        """The present step of the actor, in one or two words."""
        running = self._cell.running
        if self._step or self._cell.obj is None:
            return self._step or "__init__"
        return f"endpoint {running[1]}" if running is not None else "tasks"

    def interrupt_overdue(self) -> float | None:
        """Interrupts an actor that is late with its stop, each step once; returns the seconds to the next check.

        None if that did not help: the actor counts as ended, though its thread goes on.
        """
        cell, doing = self._cell, self.doing
        if cell.ended:
            return None
        if doing == OWNED:  # stops of meshes have their own time-outs
            return settings.cleanup_timeout
        if doing != self._interrupted:
            elapsed = time.monotonic() - self._since
            if doing == CLEANUP and elapsed < settings.stop_actor_timeout:
                return settings.stop_actor_timeout - elapsed
            self._interrupted = doing
            cell.interrupt()
            return settings.cleanup_timeout
        cell.give_up(doing)
        return None
