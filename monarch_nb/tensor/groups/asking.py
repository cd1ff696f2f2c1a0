"""What ranks use for the tensors of a stream, and what they have of one: asked beside the operations, also while a rank
is busy, or no operation runs any more."""

import time
from collections.abc import Collection

from monarch_nb.mesh import ProcMesh, region_of, state_of
from monarch_nb.mesh.requests import UnansweredError, request
from monarch_nb.runtime import Future, Runtime, error_of
from monarch_nb.tensor.verbs import USED, VALUES, AskUsed, AskValues, Used, Values

MOST = 256  # ranks that are asked
ENDED = "its process has ended"


class Asked:
    """One question to all ranks of a mesh."""

    def __init__(self, engine: Runtime, procs: ProcMesh, stream: int) -> None:
        state = state_of(procs)
        about = AskUsed(state.uid, stream)
        ranks = list(region_of(procs).ranks())[:MOST]
        self._answers: list[Future[Used]] = [request(engine, state.address(rank), USED, about) for rank in ranks]

    def answered(self, timeout: float = 0.0) -> "tuple[Used, ...] | None":
        """What each rank has told; None where one has not yet, or is gone. Blocks up to `timeout` seconds."""
        until = time.monotonic() + timeout
        for each in self._answers:
            if not each.wait(max(0.0, until - time.monotonic())) or error_of(each) is not None:
                return None
        return tuple(each.get(0) for each in self._answers)


def values_on(
    engine: Runtime, procs: ProcMesh, asked: AskValues, failed: Collection[int], timeout: float
) -> list[Values | str]:
    """What each rank of a mesh has of a tensor, in their order, or why it does not say. Blocks up to `timeout` seconds.

    Those at `failed` are not asked.
    """
    state = state_of(procs)
    ranks = list(region_of(procs).ranks())[:MOST]
    answers = [
        None if index in failed else request(engine, state.address(rank), VALUES, asked)
        for index, rank in enumerate(ranks)
    ]
    until = time.monotonic() + timeout
    return [_answer(each, until) for each in answers]


def _answer(future: "Future[Values] | None", until: float) -> Values | str:
    if future is None:
        return ENDED
    if not future.wait(max(0.0, until - time.monotonic())):
        return "it has not answered in time"
    error = error_of(future)
    if error is None:
        return future.get(0)
    return ENDED if isinstance(error, UnansweredError) else str(error)
