"""Interrupts of running code on the ranks of a mesh, and queries of its state."""

import secrets
from collections.abc import Callable, Sequence

from monarch_nb.mesh import Handle
from monarch_nb.mesh.handle import region_of, state_of
from monarch_nb.mesh.requests import ask_ranks
from monarch_nb.runtime import (
    COLLECTIVES,
    DOING,
    INTERRUPT,
    Future,
    Interrupt,
    MeshState,
    RunningEndpoint,
    WhatRuns,
    current_runtime,
    pending_future,
    proc_state_of,
    resolve_future,
)

SILENT_AFTER = 1.0  # seconds without an answer after which a rank counts as not answering
_ANSWERS_WITHIN = 4.0  # seconds for answers to an interrupt that is not awaited


def interrupt(mesh: Handle[MeshState]) -> None:
    """Raises KeyboardInterrupt in running code on the ranks of a mesh: cells of a ProcMesh, endpoints of an ActorMesh.

    Best effort: `time.sleep`, waits for other calls, collectives of torch.distributed, and Python code end. A rank in
    other C code reacts when it returns from it; `heal_mesh(mesh.slice(...), kill=True)` ends such a rank. Does not
    block.
    """
    runtime, state = current_runtime(), state_of(mesh)

    def renew(answers: dict[int, RunningEndpoint], _: set[int]) -> None:
        if any(doing.freed for doing in answers.values()):
            runtime.feature(COLLECTIVES).renew(proc_state_of(state), state.uid)

    _send(state, list(region_of(mesh).ranks()), (), renew, _ANSWERS_WITHIN)


def interrupted(state: MeshState, ranks: Sequence[int], drop: Sequence[str] = ()) -> dict[int, RunningEndpoint | None]:
    """Interrupts base ranks of a mesh; returns the running endpoint of each, None if it does not answer within 1 s.

    Ranks known to be dead are left out. Calls of `drop` that have not begun are not run. Process groups in which
    ranks waited are given up on all ranks. Blocks up to 1 s, or 2 s in that case.
    """
    runtime = current_runtime()
    done: Future[tuple[dict[int, RunningEndpoint], set[int]]] = pending_future(
        describe=lambda: f"interrupting {state.name}"
    )
    _send(state, ranks, drop, lambda answers, lost: resolve_future(done, (answers, lost)), SILENT_AFTER)
    answers, lost = done.get()
    if any(doing.freed for doing in answers.values()):
        # Before the next cell creates groups.
        runtime.feature(COLLECTIVES).renew(proc_state_of(state), state.uid).wait(SILENT_AFTER)
    return {rank: answers.get(rank) for rank in ranks if rank not in lost}


def _send(
    state: MeshState,
    ranks: Sequence[int],
    drop: Sequence[str],
    on_done: Callable[[dict[int, RunningEndpoint], set[int]], object],
    within: float,
) -> None:
    body = Interrupt(state.uid, secrets.token_hex(8), tuple(drop))
    ask_ranks(current_runtime(), proc_state_of(state), ranks, INTERRUPT, body, on_done, within=within)


def doing(state: MeshState, ranks: Sequence[int]) -> Future[dict[int, RunningEndpoint]]:
    """Returns the running endpoints of base ranks of a mesh that answer within 1 s. Does not block."""
    answers: Future[dict[int, RunningEndpoint]] = pending_future(describe=lambda: f"asking what {state.name} does")
    ask_ranks(
        current_runtime(),
        proc_state_of(state),
        ranks,
        DOING,
        WhatRuns(state.uid),
        lambda running, _: resolve_future(answers, running),
        within=SILENT_AFTER,
    )
    return answers
