"""Membership of one process in a process group, used by its executing thread and by the threads that receive."""

import sys
import threading
from collections.abc import Callable

from monarch_nb.collectives.connections import CAN_CUT, Connections
from monarch_nb.runtime import Runtime
from monarch_nb.tensor.failure import Failure
from monarch_nb.tensor.groups.service import GROUPS
from monarch_nb.tensor.groups.world import GroupSpec, StoreAddress, TorchGroups
from monarch_nb.tensor.verbs import (
    FAILED,
    INTERRUPTED,
    AskValues,
    CutGroup,
    GoOn,
    Interrupted,
    MemoryUsed,
    RankFailed,
    Values,
)

INTERRUPT_GRACE_S = 0.3  # time for an interrupt to end the running code without further help


class Membership:
    """This process as a member of the group of a proc mesh.

    `group` is the uid of the proc mesh. `progress` returns the number of operations of a stream that this process has
    done, `running` the number of the batch that it executes (0 for none), `usage` the memory and time of a stream,
    `values` the local values of a tensor, which blocks. `settle` is called on any thread before the collectives of an
    ended generation are aborted: results that its device has not computed by then are lost.
    """

    def __init__(
        self,
        runtime: Runtime,
        progress: Callable[[int], int],
        running: Callable[[], int],
        usage: Callable[[int], MemoryUsed],
        values: Callable[[AskValues], Values],
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        self.world = TorchGroups()
        self.progress, self._running, self.usage, self.values = progress, running, usage, values
        self.group = ""
        self.over: CutGroup | None = None  # the message that ended this generation
        self._runtime, self._settle = runtime, settle
        self._controller, self._generation = "", -1
        self._failed_everywhere: dict[int, int] = {}  # by stream, the last operation known to have failed on all ranks
        self._cut: CutGroup | None = None  # the last one received
        self._changed = threading.Condition()
        runtime.feature(GROUPS).membership = self

    def join(self, store: StoreAddress, spec: GroupSpec, rank: int) -> None:
        """Joins the next generation; blocks and raises as `TorchGroups.join`."""
        with self._changed:
            self.group, self._controller, self._generation = spec.group, spec.controller, spec.generation
            self._failed_everywhere.clear()
            cut = self._cut
            self.over = (
                cut if cut is not None and (cut.group, cut.generation) == (spec.group, spec.generation) else None
            )
            connections = self.world.connections = Connections()
            if self.over is not None:
                connections.cut()
        self.world.join(store, spec, rank, connections)

    def all_failed(self, failure: Failure, ranks: tuple[int, ...], begun: int | None = None) -> bool:
        """Returns whether an operation that failed here failed on all its ranks; blocks until that is known.

        If it did not, this generation is over. `begun` is the first operation of the compiled step that it belongs to.
        """
        if len(ranks) == 1:
            return True
        if self.over is None:
            report = RankFailed(self.group, self._generation, self.world.rank, ranks, failure, begun)
            self._runtime.post(self._controller, FAILED, report)
        with self._changed:
            self._changed.wait_for(
                lambda: self.over is not None or self._failed_everywhere.get(failure.stream, -1) >= failure.number
            )
            return self.over is None

    # -- any thread -------------------------------------------------------------------------------------------------

    @property
    def held(self) -> str:
        """The reason why this process may be unable to leave an ended generation; "" if it can, or has."""
        if CAN_CUT or self.over is None or not self._running():
            return ""
        return f"connections of gloo cannot be cut on {sys.platform}"

    def interrupted(self, running: Callable[[], int]) -> None:
        """Reports an interrupt to the controller if it does not end the code of a thread, which `running` numbers."""
        before, report = running(), Interrupted(self.group, self._generation)

        def check() -> None:
            if before and running() == before:
                self._runtime.post(self._controller, INTERRUPTED, report)

        self._runtime.later(INTERRUPT_GRACE_S, check)

    def go_on(self, message: GoOn) -> None:
        """Releases the executing thread: all ranks have failed in the same operation."""
        with self._changed:
            if (message.group, message.generation) == (self.group, self._generation):
                # The message of an earlier operation may arrive once more after that of a later one.
                self._failed_everywhere[message.stream] = max(
                    message.number, self._failed_everywhere.get(message.stream, -1)
                )
                self._changed.notify_all()

    def cut(self, message: CutGroup) -> None:
        """Ends this generation, which frees a thread that waits in one of its collectives."""
        with self._changed:
            self._cut = message  # may be of a generation that will be joined later
            if (message.group, message.generation) != (self.group, self._generation) or self.over is not None:
                return
            self.over = message
            self._settle()
            self._changed.notify_all()
            connections = self.world.connections
        connections.cut()
        threading.Thread(target=self.world.abort, name="monarch-abort", daemon=True).start()
