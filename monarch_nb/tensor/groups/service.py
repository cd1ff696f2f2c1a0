"""Receives the messages about process groups while operations run, in workers and in the controller."""

import threading
from typing import TYPE_CHECKING

from monarch_nb.runtime import Feature, Runtime
from monarch_nb.tensor import verbs
from monarch_nb.tensor.verbs import (
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
    from monarch_nb.tensor.groups.member import Membership


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
