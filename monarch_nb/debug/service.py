"""The debugger of this process: both its sides, attached to the runtime when they are first needed."""

import types
from typing import Any

from monarch_nb.debug.control.controller import Controller
from monarch_nb.debug.reproduce import reproduce
from monarch_nb.debug.session.debuggers import Debuggers
from monarch_nb.debug.session.handlers import DebugHandlers
from monarch_nb.debug.session.names import NameHandlers
from monarch_nb.runtime import DEBUG, ActorCell, Feature, Runtime, current_runtime
from monarch_nb.wire import ActorError


class DebugService:
    """The debugger of a process: collects stopped ranks and sends commands; stops threads and answers commands."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._debuggers = Debuggers(runtime)
        self.controller = Controller(runtime, attend=_attend, apply_locally=self._debuggers.take)
        self._handlers = DebugHandlers(runtime, self._debuggers)
        self._names = NameHandlers(runtime)

    def stop(self, frame: types.FrameType, reason: str) -> None:
        """Stops the calling thread."""
        self._debuggers.stop(frame, reason)

    def freeze(self, error: BaseException) -> None:
        """Stops the calling thread at an error's raise."""
        self._debuggers.freeze(error)

    def wanted(self) -> bytes:
        """Breakpoints for the spec of an actor that this process spawns."""
        return self._debuggers.sets.encoded()

    def arm(self, cell: ActorCell, cls: type) -> None:
        """Prepares the thread of an actor, before its construction."""
        self._debuggers.sets.prepare(cell, cls)

    def held_at(self, mesh: str, rank: int) -> str:
        """Returns the location at which an actor is stopped and takes no messages; "" if it is not."""
        record = self.controller.stopped.holding(mesh, rank)
        return f"{record.frame.function}, line {record.frame.line}" if record is not None else ""

    def reproduce(self, error: ActorError, **options: Any) -> Any:
        """Runs a failed call again in this process."""
        return reproduce(self._runtime, error, **options)


_SERVICE: Feature[DebugService] = Feature(DEBUG.name)


def _attend(controller: Controller) -> None:
    from monarch_nb.debug.prompt.waits import attend  # ranks need no prompt

    attend(controller)


def attach(runtime: Runtime) -> DebugService:
    """Registers the handlers of the debugger's verbs."""
    return DebugService(runtime)


def controller_of(runtime: Runtime) -> Controller:
    """Returns the controller's side of the debugger in a process."""
    return runtime.feature(_SERVICE).controller


def controller() -> Controller:
    """Returns the controller of this process."""
    return controller_of(current_runtime())
