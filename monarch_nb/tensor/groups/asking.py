"""Queries to ranks about memory, time and values of tensors. They are answered beside the operations, also while a rank
is busy or the mesh is broken."""

import time
from collections.abc import Collection

from monarch_nb.mesh import ProcMesh, region_of, state_of
from monarch_nb.mesh.requests import UnansweredError, request
from monarch_nb.runtime import Future, Runtime, error_of
from monarch_nb.tensor.verbs import USED, VALUES, AskUsed, AskValues, MemoryUsed, Values

MOST = 256  # ranks that are queried
ENDED = "its process has ended"


class Asked:
    """A pending query of memory and time to all ranks of a mesh."""

    def __init__(self, runtime: Runtime, procs: ProcMesh, stream: int) -> None:
        state = state_of(procs)
        question = AskUsed(state.uid, stream)
        ranks = list(region_of(procs).ranks())[:MOST]
        self._answers: list[Future[MemoryUsed]] = [
            request(runtime, state.address(rank), USED, question) for rank in ranks
        ]

    def answered(self, timeout: float = 0.0) -> "tuple[MemoryUsed, ...] | None":
        """Returns the answers of all ranks; None if one is missing or failed. Blocks up to `timeout` seconds."""
        until = time.monotonic() + timeout
        for answer in self._answers:
            if not answer.wait(max(0.0, until - time.monotonic())) or error_of(answer) is not None:
                return None
        return tuple(answer.get(0) for answer in self._answers)


def values_on(
    runtime: Runtime, procs: ProcMesh, query: AskValues, failed: Collection[int], timeout: float
) -> list[Values | str]:
    """Returns a tensor's local values by rank, or the reason why a rank has none. Blocks up to `timeout` seconds.

    Ranks at the indices `failed` are not queried.
    """
    state = state_of(procs)
    ranks = list(region_of(procs).ranks())[:MOST]
    answers = [
        None if index in failed else request(runtime, state.address(rank), VALUES, query)
        for index, rank in enumerate(ranks)
    ]
    until = time.monotonic() + timeout
    return [_answer(answer, until) for answer in answers]


def _answer(future: "Future[Values] | None", until: float) -> Values | str:
    if future is None:
        return ENDED
    if not future.wait(max(0.0, until - time.monotonic())):
        return "it has not answered in time"
    error = error_of(future)
    if error is None:
        return future.get(0)
    return ENDED if isinstance(error, UnansweredError) else str(error)
