"""The process that users' code runs in when it names none, on any thread."""

import threading
from typing import TYPE_CHECKING

from monarch_nb._package import become_controller
from monarch_nb.runtime.context import current
from monarch_nb.transport import held_back

if TYPE_CHECKING:
    from monarch_nb.runtime.process import Runtime

_process: "Runtime | None" = None
_several = False  # several are simulated here, and an actor's context names its process
_starting = threading.RLock()


def process() -> "Runtime":
    """Returns the process of the calling code; one without a role yet becomes a controller now."""
    if _several:
        return _of_context() or _process or _start()
    return _process or _start()


def started() -> "Runtime | None":
    """Returns the process of the calling code, if it has a role yet."""
    return (_of_context() if _several else None) or _process


def install(new: "Runtime | None", *, several: bool = False) -> None:
    """Makes `new` the process of all code, or with `several` of the code that runs outside of actors.

    None after the old one was closed.
    """
    global _process, _several
    _process, _several = new, several


def _of_context() -> "Runtime | None":
    context = current.get()
    return None if context is None else context.actor_instance.process


def _start() -> "Runtime":
    with _starting:
        if _process is None:
            held_back(become_controller)
    assert _process is not None
    return _process
