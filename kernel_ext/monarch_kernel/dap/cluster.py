"""The cluster's debugger, as the adapter needs it."""

from collections.abc import Callable, Sequence

from monarch_nb.debug import Stopped
from monarch_nb.debug import messages as m
from monarch_nb.debug.control import Controller
from monarch_nb.debug.service import controller_of
from monarch_nb.runtime import Runtime


class ClusterRanks:
    """Ranks of the current runtime: there is a new one after shutdown_context()."""

    def __init__(self, runtime: Callable[[], Runtime | None]) -> None:
        self._runtime = runtime

    @property
    def controller(self) -> Controller | None:
        """The controller; None while this process is in no cluster."""
        runtime = self._runtime()
        return controller_of(runtime) if runtime is not None and not runtime.closed else None

    def records(self) -> list[Stopped]:
        """Returns all stopped threads."""
        controller = self.controller
        return controller.stopped.records() if controller is not None else []

    def ask(self, records: Sequence[Stopped], command: m.Command) -> list[m.CommandAnswer]:
        """Sends a command to each record; blocks for the answers."""
        controller = self.controller
        if controller is None:
            return [
                m.CommandAnswer(session=record.session, error="the cluster was left", resumed=True)
                for record in records
            ]
        return controller.ask(records, command)

    def arm(self, lines: Sequence[m.BreakLine], raised: str | None, uncaught: str | None) -> None:
        """Replaces the breakpoints of all actors."""
        controller = self.controller
        if controller is not None:
            controller.breakpoints.set_everywhere(lines, raised=raised, uncaught=uncaught)

    def release(self) -> None:
        """Removes all breakpoints of actors and resumes all ranks. Blocks until that is done, for a bounded time."""
        controller = self.controller
        if controller is None:
            return
        controller.breakpoints.set_everywhere((), release=True)
        stopped = [record for record in controller.stopped.records() if record.blocks_actor]
        if stopped:  # their messages that they have resumed may still be on the way
            controller.ask(stopped, m.Go(session="", force=True))

    def pause(self) -> str:
        """Stops running actors at their next line; returns the reason if none will stop."""
        controller = self.controller
        return controller.breakpoints.pause() if controller is not None else "this process is in no cluster"
