"""Messages about process groups, handled while operations run, and queries to ranks about memory, time and values of
tensors. Ranks answer them also while they are busy or the mesh is broken.
"""

import threading
import time
from collections.abc import Collection
from typing import TYPE_CHECKING

from monarch_nb.mesh import ProcMesh, region_of, state_of
from monarch_nb.mesh.requests import UnansweredError, request
from monarch_nb.runtime import Feature, Future, Runtime, error_of
from monarch_nb.tensor import verbs
from monarch_nb.tensor.verbs import (
    USED,
    VALUES,
    AskUsed,
    AskValues,
    CutGroup,
    GoOn,
    HowFar,
    Interrupted,
    MemoryUsed,
    RankFailed,
    StreamProgress,
    Values,
)
from monarch_nb.wire import Asker

if TYPE_CHECKING:
    from monarch_nb.tensor.groups.coordinator import GroupCoordinator
    from monarch_nb.tensor.groups.world import Membership

MOST = 256  # ranks that are queried
ENDED = "its process has ended"


class Groups:
    """Handlers of one process. A worker has a membership, a controller has coordinators by the uid of the proc mesh."""

    def __init__(self, runtime: Runtime) -> None:
        self.membership: Membership | None = None
        self.coordinators: dict[str, GroupCoordinator] = {}
        runtime.verbs.handle(verbs.FAILED, self._failed)
        runtime.verbs.handle(verbs.INTERRUPTED, self._interrupted)
        runtime.verbs.handle(verbs.GO_ON, self._go_on)
        runtime.verbs.handle(verbs.CUT, self._cut)
        runtime.verbs.handle(verbs.HOW_FAR, self._how_far)
        runtime.verbs.handle(verbs.USED, self._used)
        runtime.verbs.handle(verbs.VALUES, self._values)

    def _failed(self, message: RankFailed, asker: Asker[None]) -> None:
        coordinator = self.coordinators.get(message.group)
        if coordinator is not None:
            coordinator.failed(message)

    def _interrupted(self, message: Interrupted, asker: Asker[None]) -> None:
        coordinator = self.coordinators.get(message.group)
        if coordinator is not None:
            coordinator.interrupted(message)

    def _go_on(self, message: GoOn, asker: Asker[None]) -> None:
        if self.membership is not None:
            self.membership.go_on(message)

    def _cut(self, message: CutGroup, asker: Asker[None]) -> None:
        if self.membership is not None:
            self.membership.cut(message)

    def _how_far(self, message: HowFar, asker: Asker[StreamProgress]) -> StreamProgress:
        member = self.membership
        if member is None or member.group != message.group:
            return StreamProgress(0)
        return StreamProgress(member.progress(message.stream), member.held)

    def _used(self, message: AskUsed, asker: Asker[MemoryUsed]) -> MemoryUsed:
        member = self.membership
        return MemoryUsed() if member is None or member.group != message.group else member.usage(message.stream)

    def _values(self, message: AskValues, asker: Asker[Values]) -> None:
        member = self.membership
        if member is None or member.group != message.group:
            asker.reply(Values("coming"))
            return
        values = member.values

        def answer() -> None:
            try:
                asker.reply(values(message))
            except Exception as error:
                asker.refuse(f"{type(error).__name__}: {error}")

        threading.Thread(target=answer, name="monarch-values", daemon=True).start()


GROUPS: Feature[Groups] = Feature("tensor")


def attach(runtime: Runtime) -> Groups:
    """Registers the handlers of group messages in this process."""
    return Groups(runtime)


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
