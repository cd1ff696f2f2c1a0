"""One process's membership in a world: where its executing thread asks, and what other threads tell it meanwhile."""

import sys
import threading
from collections.abc import Callable

from monarch_nb.collectives.connections import CAN_CUT, Connections
from monarch_nb.runtime import Runtime
from monarch_nb.tensor.failure import Failure
from monarch_nb.tensor.groups.service import GROUPS
from monarch_nb.tensor.groups.world import Place, StoreAt, World
from monarch_nb.tensor.verbs import FAILED, INTERRUPTED, AskValues, Cut, GoOn, Interrupted, RankFailed, Used, Values

REACTS_S = 0.3  # for an interrupt to end what runs by itself


class Membership:
    """`group` is the uid of the proc mesh, `progress` how many operations of a stream this process has done, `runs`
    what it does now: a number that is another one for each batch, 0 for nothing; `usage` what a stream takes here;
    `values` what there is of a tensor, for which it blocks.
    """

    def __init__(
        self,
        engine: Runtime,
        progress: Callable[[int], int],
        runs: Callable[[], int],
        usage: Callable[[int], Used],
        values: Callable[[AskValues], Values],
    ) -> None:
        self.world = World()
        self.progress, self._runs, self.usage, self.values = progress, runs, usage, values
        self.group = ""
        self.over: Cut | None = None  # what ended this generation
        self._engine = engine
        self._controller, self._generation = "", -1
        self._may_go_on: dict[int, int] = {}  # by stream, the last operation that is known to have failed on all ranks
        self._cut: Cut | None = None  # the last that came
        self._told = threading.Condition()
        engine.feature(GROUPS).membership = self

    def join(self, at: StoreAt, place: Place, rank: int) -> None:
        """Becomes a member of the next generation. As `World.join`."""
        with self._told:
            self.group, self._controller, self._generation = place.group, place.controller, place.generation
            self._may_go_on.clear()
            cut = self._cut
            self.over = (
                cut if cut is not None and (cut.group, cut.generation) == (place.group, place.generation) else None
            )
            connections = self.world.connections = Connections()
            if self.over is not None:
                connections.cut()
        self.world.join(at, place, rank, connections)

    def all_failed(self, failure: Failure, ranks: tuple[int, ...], begun: int | None = None) -> bool:
        """Whether an operation failed on all its ranks as it did here; blocks until that is known.

        If not, this generation is over. `begun` is the first operation of the compiled step that it is of.
        """
        if len(ranks) == 1:
            return True
        if self.over is None:
            told = RankFailed(self.group, self._generation, self.world.rank, ranks, failure, begun)
            self._engine.tell(self._controller, FAILED, told)
        with self._told:
            self._told.wait_for(
                lambda: self.over is not None or self._may_go_on.get(failure.stream, -1) >= failure.number
            )
            return self.over is None

    # -- any thread -------------------------------------------------------------------------------------------------

    @property
    def held(self) -> str:
        """What this process is still in of a generation that is over, and why it may stay there; "" for nothing."""
        if CAN_CUT or self.over is None or not self._runs():
            return ""
        return f"connections of gloo cannot be cut on {sys.platform}"

    def interrupted(self) -> None:
        """Somebody interrupts this process; what that does not end is ended with the generation."""
        was, told = self._runs(), Interrupted(self.group, self._generation)

        def look() -> None:
            if was and self._runs() == was:
                self._engine.tell(self._controller, INTERRUPTED, told)

        self._engine.later(REACTS_S, look)

    def go_on(self, told: GoOn) -> None:
        """All ranks have failed alike."""
        with self._told:
            if (told.group, told.generation) == (self.group, self._generation):
                # The word for an earlier operation may come twice, and after that for a later one.
                self._may_go_on[told.stream] = max(told.number, self._may_go_on.get(told.stream, -1))
                self._told.notify_all()

    def cut(self, told: Cut) -> None:
        """This generation is over: who waits in one of its collectives is freed."""
        with self._told:
            self._cut = told  # it may be of a generation that is yet to be joined
            if (told.group, told.generation) != (self.group, self._generation) or self.over is not None:
                return
            self.over = told
            self._told.notify_all()
            connections = self.world.connections
        connections.cut()
