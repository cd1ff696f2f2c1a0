"""Running a cell on the ranks of a mesh, and what Ctrl-C does meanwhile."""

from typing import Any

from monarch_nb.mesh import ValueMesh, interrupt, run_on
from monarch_nb.mesh.places import places
from monarch_nb.runtime import Future

from .display.errors import cell_syntax
from .front import Front

AGAIN_SECONDS = 2.0  # within that long a second Ctrl-C means the ranks
GIVE_UP_SECONDS = 5.0  # how long interrupted ranks have to end their cells


def run_cell(front: Front, mesh: Any, name: str, source: str, filename: str) -> ValueMesh[Any] | None:
    """Runs source on every rank and waits; the values of its last expression, or None when all are None.

    The first Ctrl-C stops waiting, a second one within two seconds interrupts the ranks.
    """
    with cell_syntax():
        future: Future[Any] = run_on(mesh, source, filename=filename)
    try:
        values = future.get()
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt(_stop(front, future, mesh, name)) from stop
    return values if any(value is not None for value in values.values()) else None


def _stop(front: Front, future: Future[Any], mesh: Any, name: str) -> str:
    extent = mesh.extent
    where = places(extent.labels, (tuple(extent.point(rank).values()) for rank in range(extent.nelements)))
    label = f"{name} {where}".rstrip()
    goes_on = f"stopped waiting; the cell goes on on {label} (%interrupt {name} ends it there)"
    try:
        front.write(
            f"Stopped waiting for {label}. Interrupt again within {AGAIN_SECONDS:g} s to interrupt the ranks too.\n",
            "stderr",
        )
        future.exception(AGAIN_SECONDS)
        return f"stopped waiting; meanwhile the cell has ended on {label}"
    except TimeoutError:
        return goes_on
    except KeyboardInterrupt:
        pass
    try:
        interrupt(mesh)
        future.exception(GIVE_UP_SECONDS)
        return f"interrupted the cell on {label}"
    except TimeoutError:
        return f"the cell on {label} has not stopped within {GIVE_UP_SECONDS:g} s; %stop {name} ends its processes"
    except KeyboardInterrupt:
        return goes_on
