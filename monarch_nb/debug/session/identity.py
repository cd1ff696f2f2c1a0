"""Who a stopped thread is: which actor of which process it runs, and what it does there."""

import os
import threading

from monarch_nb.debug.records import Stopped
from monarch_nb.mesh.registry import MeshRegistry
from monarch_nb.runtime import ActorCell, Runtime, current
from monarch_nb.wire import parse_address


def identity(engine: Runtime, cell: ActorCell | None, thread: threading.Thread, session: str, number: int) -> Stopped:
    """What is known of a thread before it has stopped; `cell` is the actor that it runs, if it runs one."""
    context = current.get() or engine.root_context
    if cell is None:
        uid, rank, incarnation = parse_address(engine.address).place
        console = engine.cells.get((uid, rank))
        point = console.instance.rank if console is not None else context.message_rank
        name = console.spec.name if console is not None else "this process"
        about = {"mesh": uid, "rank": rank, "incarnation": incarnation, "thread": thread.name}
    else:
        point, name = cell.instance.rank, cell.spec.name
        about = {"mesh": cell.mesh, "rank": cell.rank, "incarnation": cell.incarnation}
    running = cell.running if cell is not None else None
    return Stopped(
        session=session,
        number=number,
        address=engine.address,
        host=engine.host,
        pid=os.getpid(),
        name=name,
        labels=tuple(point.extent.labels),
        point=tuple(point.values()),
        sizes=tuple(point.extent.sizes),
        endpoint=running[1] if running is not None else ("__init__" if cell is not None else ""),
        call=context.call,
        chain=context.chain,
        **about,  # type: ignore[arg-type]
    )


def home_of(engine: Runtime) -> str:
    """The process that has started this one; this one itself where nobody has."""
    home = engine.part(MeshRegistry).started_by
    if home:
        return home
    uid, rank, _ = parse_address(engine.address).place
    console = engine.cells.get((uid, rank)) if engine.is_worker else None
    return console.spec.owner_process if console is not None else engine.address
