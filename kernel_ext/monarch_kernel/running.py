"""Running a cell on the ranks of a mesh, and what Ctrl-C does meanwhile."""

from typing import Any

from monarch_nb.mesh import ValueMesh, interrupt, run_on
from monarch_nb.mesh.places import places
from monarch_nb.runtime import Future

from .front import Front

AGAIN_SECONDS = 2.0  # within that long a second Ctrl-C means the ranks
GIVE_UP_SECONDS = 5.0  # how long interrupted ranks have to end their cells


def run_cell(front: Front, mesh: Any, name: str, source: str, filename: str) -> ValueMesh[Any] | None:
    """Runs source on every rank and waits; the values of its last expression, or None when all are None.

    The first Ctrl-C stops waiting, a second one within two seconds interrupts the ranks.
    """
    future: Future[Any] = run_on(mesh, source, filename=filename)
    try:
        values = future.get()
    except KeyboardInterrupt as stop:
        _stop(front, future, mesh, name)
        raise stop from None
    return values if any(value is not None for value in values.values()) else None


def _stop(front: Front, future: Future[Any], mesh: Any, name: str) -> None:
    extent = mesh.extent
    where = places(extent.labels, (tuple(extent.point(rank).values()) for rank in range(extent.nelements)))
    front.write(
        f"Stopped waiting; the cell goes on on {name} {where}".rstrip()
        + f".\nInterrupt again within {AGAIN_SECONDS:g} s to interrupt the ranks too, or later: %interrupt {name}\n",
        "stderr",
    )
    try:
        future.exception(AGAIN_SECONDS)
    except TimeoutError:
        return
    except KeyboardInterrupt:
        interrupt(mesh)
        front.write(f"Interrupting {name}.\n", "stderr")
        try:
            future.exception(GIVE_UP_SECONDS)
        except TimeoutError:
            front.write(f"{name} has not stopped within {GIVE_UP_SECONDS:g} s: %stop {name} ends it.\n", "stderr")
