"""The debugger of this process: both its sides, attached to the runtime when they are first needed."""

import types
from typing import Any

from monarch_nb.debug.control.controller import Controller
from monarch_nb.runtime import Runtime


class Service:
    """The controller's side at once; the side of stopped threads, and pdb with it, when something stops or asks."""

    def __init__(self, engine: Runtime) -> None:
        self.controller = Controller(engine)
        self._engine = engine
        self._worker: Any = None
        from monarch_nb.debug.session.worker import Worker

        self._worker = Worker(engine)

    def stop(self, frame: types.FrameType, reason: str) -> None:
        """Stops the calling thread."""
        self._worker.stop(frame, reason)

    def freeze(self, error: BaseException) -> None:
        """Stops the calling thread at an error's raise."""
        self._worker.freeze(error)


def attach(engine: Runtime) -> Service:
    """Takes the debugger's verbs from now on."""
    return Service(engine)
