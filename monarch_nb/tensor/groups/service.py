"""What a process hears of process groups while operations run: in workers and in the controller."""

import threading
from typing import TYPE_CHECKING

from monarch_nb.runtime import Feature, Runtime
from monarch_nb.tensor import verbs
from monarch_nb.tensor.verbs import (
    AskUsed,
    AskValues,
    Cut,
    GoOn,
    HowFar,
    Interrupted,
    Progress,
    RankFailed,
    Used,
    Values,
)
from monarch_nb.wire import Asker

if TYPE_CHECKING:
    from monarch_nb.tensor.groups.keeper import Keeper
    from monarch_nb.tensor.groups.member import Membership


class Groups:
    """One per process. A worker has a membership; a controller keeps groups, by the uid of their proc mesh."""

    def __init__(self, engine: Runtime) -> None:
        self.membership: Membership | None = None
        self.kept: dict[str, Keeper] = {}
        engine.verbs.handle(verbs.FAILED, self._failed)
        engine.verbs.handle(verbs.INTERRUPTED, self._interrupted)
        engine.verbs.handle(verbs.GO_ON, self._go_on)
        engine.verbs.handle(verbs.CUT, self._cut)
        engine.verbs.handle(verbs.HOW_FAR, self._how_far)
        engine.verbs.handle(verbs.USED, self._used)
        engine.verbs.handle(verbs.VALUES, self._values)

    def _failed(self, told: RankFailed, asker: Asker[None]) -> None:
        keeper = self.kept.get(told.group)
        if keeper is not None:
            keeper.failed(told)

    def _interrupted(self, told: Interrupted, asker: Asker[None]) -> None:
        keeper = self.kept.get(told.group)
        if keeper is not None:
            keeper.interrupted(told)

    def _go_on(self, told: GoOn, asker: Asker[None]) -> None:
        if self.membership is not None:
            self.membership.go_on(told)

    def _cut(self, told: Cut, asker: Asker[None]) -> None:
        if self.membership is not None:
            self.membership.cut(told)

    def _how_far(self, asked: HowFar, asker: Asker[Progress]) -> Progress:
        member = self.membership
        if member is None or member.group != asked.group:
            return Progress(0)
        return Progress(member.progress(asked.stream), member.held)

    def _used(self, asked: AskUsed, asker: Asker[Used]) -> Used:
        member = self.membership
        return Used() if member is None or member.group != asked.group else member.usage(asked.stream)

    def _values(self, asked: AskValues, asker: Asker[Values]) -> None:
        member = self.membership
        if member is None or member.group != asked.group:
            asker.reply(Values("coming"))
            return
        values = member.values

        def answer() -> None:
            try:
                asker.reply(values(asked))
            except Exception as error:
                asker.refuse(f"{type(error).__name__}: {error}")

        threading.Thread(target=answer, name="monarch-values", daemon=True).start()


GROUPS: Feature[Groups] = Feature("tensor")


def attach(engine: Runtime) -> Groups:
    """What this process hears of process groups, from now on."""
    return Groups(engine)
