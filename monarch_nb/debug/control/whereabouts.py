"""Who is not stopped where others are, and what those do: asked of their processes."""

from collections.abc import Sequence
from typing import Any

from monarch_nb.debug.control.controller import Controller
from monarch_nb.debug.records import Stopped, Thread
from monarch_nb.debug.render.groups import FileName, named, place, short, tree, tree_text
from monarch_nb.debug.render.table import Missing
from monarch_nb.shape import places_of
from monarch_nb.store import describe

LOOK_S = 0.3  # for ranks to say where they are, while a table waits for it
MOST = 256  # ranks of a mesh from which on they are not asked


def missing(
    controller: Controller, records: Sequence[Stopped], name: FileName = short
) -> tuple[dict[str, int], list[Missing]]:
    """The sizes of the meshes that the stopped ranks are of, and of each mesh those that are not stopped. Blocks a
    moment, for the answers of these.
    """
    sizes: dict[str, int] = {}
    elsewhere: list[Missing] = []
    for uid in dict.fromkeys(record.mesh for record in records if record.in_the_way):
        state: Any = controller.engine.meshes.get(uid)
        if state is None or getattr(state, "procs", None) is None:
            continue
        ranks = list(state.region.ndslice)
        sizes[uid] = len(ranks)
        stopped = {record.rank for record in records if record.mesh == uid}
        rest = [rank for rank in ranks if rank not in stopped]
        if not rest:
            continue
        what = _doing(controller, state, rest, name)
        points = {rank: tuple(state.region.point_of_base_rank(rank).values()) for rank in rest}
        elsewhere.append(Missing(state.name, state.region.extent, {points[rank]: what.get(rank, "") for rank in rest}))
    return sizes, elsewhere


def _doing(controller: Controller, state: Any, ranks: Sequence[int], name: FileName) -> dict[int, str]:
    how = {rank.rank: rank.state for rank in describe(state).ranks}
    doing: dict[int, str] = {rank: how[rank] for rank in ranks if how[rank] not in ("idle", "busy")}
    alive = [rank for rank in ranks if rank not in doing]
    if not alive or len(alive) > MOST:
        return doing
    threads = controller.threads([state.procs.address(rank) for rank in alive], LOOK_S)
    for rank in alive:
        answer = threads[state.procs.address(rank)]
        if isinstance(answer, str):
            doing[rank] = "does not answer: %stacks shows more"
            continue
        thread = next((t for t in answer if (t.mesh, t.rank) == (state.uid, rank)), None)
        if thread is not None:
            doing[rank] = _doing_text(thread, name)
    return doing


def _doing_text(thread: Thread, name: FileName) -> str:
    if not thread.doing:
        return "idle"
    where = f", at {place(thread.stack[-1], name)}" if thread.stack else ""
    return f"runs {thread.doing}{where}"


def running_text(controller: Controller, records: Sequence[Stopped], name: FileName = short) -> str:
    """The stacks of the ranks that run, of the meshes of which others are stopped."""
    stopped = {record.place for record in records}
    parts = []
    for uid in dict.fromkeys(record.mesh for record in records):
        state: Any = controller.engine.meshes.get(uid)
        if state is not None and getattr(state, "procs", None) is not None:
            ranks = [rank for rank in state.region.ndslice if (uid, rank) not in stopped]
            parts.append(stacks_text(controller, state, ranks, name))
    return "\n".join(parts) or f"no rank runs: {named(records)} are stopped"


def stacks_text(controller: Controller, state: Any, ranks: Sequence[int], name: FileName = short) -> str:
    """The Python stacks of some ranks of a mesh, merged into one tree. Blocks for at most some seconds."""
    procs = getattr(state, "procs", None) or state
    threads = controller.threads([procs.address(rank) for rank in ranks])

    def label(them: Sequence[str]) -> str:
        return places_of(state.region, map(int, them)) or "it"

    stacks, idle, silent = [], [], []
    for rank in ranks:
        answer = threads[procs.address(rank)]
        if isinstance(answer, str):
            silent.append(str(rank))
            continue
        of_rank = [t for t in answer if (t.mesh, t.rank) == (state.uid, rank) and t.stack]
        stacks += [(str(rank), t.stack) for t in of_rank]
        if not of_rank:
            idle.append(str(rank))
    lines = tree_text(tree(stacks), label, name)
    if idle:
        lines.append(f"{len(idle)}  idle  [{label(idle)}]")
    if silent:
        from monarch_nb.debug.control.stuck import look

        lines += look(controller, procs, [int(rank) for rank in silent], label, name)
    return "\n".join(lines)
