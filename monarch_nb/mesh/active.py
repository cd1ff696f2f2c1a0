"""The active proc meshes of this process, and callbacks for new ones."""

import logging
from collections.abc import Callable

from monarch_nb.mesh.proc import ProcMesh
from monarch_nb.runtime import ProcState, started

logger = logging.getLogger(__name__)

Callback = Callable[[ProcMesh], object]
_callbacks: list[Callback] = []


def register_proc_mesh_spawn_callback(callback: Callback) -> None:
    """Calls `callback(proc_mesh)` whenever this process has spawned a mesh, before the caller gets it."""
    _callbacks.append(callback)


def unregister_proc_mesh_spawn_callback(callback: Callback) -> None:
    """Unregisters a callback. Raises ValueError if it is not registered."""
    _callbacks.remove(callback)


def announce(mesh: ProcMesh) -> None:
    """Runs the callbacks; logs errors in them, since the processes exist all the same."""
    for callback in tuple(_callbacks):
        try:
            callback(mesh)
        except Exception:
            logger.exception("a spawn callback failed on %r", mesh)


def get_active_proc_meshes() -> list[ProcMesh]:
    """Returns the proc meshes that this process has spawned and not stopped, referenced or not."""
    runtime = started()
    states = tuple(runtime.meshes.values()) if runtime is not None else ()
    return [
        ProcMesh(state, state.region)
        for state in states
        if isinstance(state, ProcState) and state.spawn_spec is not None and state.stopped is None
    ]
