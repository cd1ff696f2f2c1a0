"""Interrupting what runs on the ranks of a mesh, and seeing what they do."""

import time
from collections.abc import Sequence
from typing import Any

from monarch_nb.mesh.handle import region_of, state_of
from monarch_nb.mesh.requests import request, settle
from monarch_nb.runtime import (
    COLLECTIVES,
    DOING,
    INTERRUPT,
    Doing,
    Future,
    Interrupt,
    MeshState,
    WhatRuns,
    runtime,
    when_done,
)

SILENT_AFTER = 1.0  # seconds without a word after which a rank is taken for one that does not answer


def interrupt(mesh: Any) -> None:
    """Raises KeyboardInterrupt in what runs on the ranks of a mesh: cells of a ProcMesh, endpoints of an ActorMesh.

    Best effort: `time.sleep`, waits for other calls, collectives of torch.distributed, and Python code end; a rank that
    sits in other C code notices when it returns from it; that one is ended by `heal_mesh(mesh.slice(...), kill=True)`.
    Does not block.
    """
    engine = runtime()
    state = state_of(mesh)
    procs = _procs(state)
    asked = [
        request(engine, procs.address(rank), INTERRUPT, Interrupt(state.uid, rank)) for rank in region_of(mesh).ranks()
    ]

    def renew(_: object) -> None:
        if any(doing.freed for doing in map(answered, asked) if doing is not None):
            engine.feature(COLLECTIVES).renew(procs, state.uid)

    when_done(settle(asked, lambda: ""), renew)


def interrupted(state: MeshState, ranks: Sequence[int], drop: Sequence[str] = ()) -> dict[int, Doing | None]:
    """Interrupts base ranks of a mesh and gives what each was doing, None for those that do not answer within 1 s.

    Ranks that are known to be dead are left out. What had not ended by then is found where it is. Calls of `drop` that
    have not begun are not run. Process groups that ranks waited in are given up on all ranks. Blocks up to 1 s, and up
    to another where that is so.
    """
    engine, procs = runtime(), _procs(state)
    asked = {
        rank: request(engine, procs.address(rank), INTERRUPT, Interrupt(state.uid, rank, tuple(drop))) for rank in ranks
    }
    until = time.monotonic() + SILENT_AFTER
    settle(list(asked.values()), lambda: "").wait(until - time.monotonic())
    alive = {rank: future for rank, future in asked.items() if not (future.done() and future.exception(0) is not None)}
    found = {rank: answered(future) for rank, future in alive.items()}
    if any(one.freed for one in found.values() if one is not None):
        engine.feature(COLLECTIVES).renew(procs, state.uid).wait(SILENT_AFTER)  # before the next cell makes groups anew
    return found


def doing(state: MeshState, ranks: Sequence[int]) -> dict[int, Future[Doing]]:
    """Asks base ranks of a mesh what they do. Does not block."""
    engine, procs = runtime(), _procs(state)
    return {rank: request(engine, procs.address(rank), DOING, WhatRuns(state.uid, rank)) for rank in ranks}


def answered(future: Future[Doing]) -> Doing | None:
    """What a rank has answered; None if it has not."""
    return future.get(0) if future.done() and future.exception(0) is None else None


def _procs(state: MeshState) -> Any:
    return getattr(state, "procs", None) or state
