"""What ranks use for the tensors of a stream, asked beside the operations: also of ranks that are busy."""

import time

from monarch_nb.mesh import ProcMesh, region_of, state_of
from monarch_nb.mesh.requests import request
from monarch_nb.runtime import Future, Runtime, error_of
from monarch_nb.tensor.verbs import USED, AskUsed, Used

MOST = 256  # ranks that are asked


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
