"""Running a cell on the ranks of a mesh, and what Ctrl-C does meanwhile."""

from typing import Any

from monarch_nb.mesh import ValueMesh, interrupt, run_on
from monarch_nb.runtime import Future, runtime
from monarch_nb.shape import places

from .display.errors import cell_syntax
from .front import Front

AGAIN_SECONDS = 2.0  # within that long a second Ctrl-C means the ranks
OFFERED = 8  # more ranks than these are not named one by one
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
        return _offer(future, mesh, name)
    except KeyboardInterrupt:
        return goes_on


def _offer(future: Future[Any], mesh: Any, name: str) -> str:
    """What can be done about ranks that do not react, as commands that can be run as they are."""
    call = runtime().calls.get(future.wait_id)
    ranks = mesh._region.ranks()
    stuck = list(range(len(mesh))) if call is None else sorted(map(ranks.index, call.missing_ranks()))
    points = [mesh.extent.point(rank) for rank in stuck]
    where = places(mesh.extent.labels, (tuple(point.values()) for point in points))
    told = f"the cell on {f'{name} {where}'.rstrip()} has not stopped within {GIVE_UP_SECONDS:g} s"
    if len(stuck) == len(mesh._state.region) or len(stuck) > OFFERED:
        picks = [""]
    else:
        base = mesh._state.region
        lost = [base.point_of_base_rank(ranks[rank]) for rank in stuck]
        picks = ["".join(f" {label}={index}" for label, index in point.items()) for point in lost]
    commands = "; ".join(f"%heal {name}{pick} --kill" for pick in picks)
    return f"{told}: {commands} kills {'their processes' if len(stuck) > 1 else 'its process'} and starts anew"
