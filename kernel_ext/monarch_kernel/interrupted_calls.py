"""Calls that an interrupted cell waited for: their outcome, and how their ranks are interrupted."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from monarch_nb.lifecycle.interrupts import interrupted
from monarch_nb.runtime import Future, MeshState, PendingCall, RunningEndpoint, Runtime
from monarch_nb.wire import ActorError, error_line

from .reactions import FileName, call_text, ended, ranks_text, restart_commands, stuck

GIVE_UP_SECONDS = 5.0  # for interrupted ranks to end their calls

Reactions = Mapping[int, RunningEndpoint | None]  # by base rank; None for a rank that has not answered


class InterruptedCall:
    """A call that a cell waited for when it was interrupted."""

    def __init__(self, future: Future[Any], call: PendingCall[object], state: MeshState) -> None:
        self.future = future
        self.state = state
        self.ranks = call.missing_ranks()  # base ranks
        self._call = call
        endpoint = call.title.removeprefix(f"{state.name}.") if "[" not in call.title else "__cell__"
        self._call_text = call_text(state, endpoint)
        self._progress = call.describe()

    def count_again(self) -> None:
        """Updates the ranks to interrupt: some may have answered since the first Ctrl-C."""
        self.ranks = self._call.missing_ranks() or self.ranks

    @property
    def label(self) -> str:
        """`a.step() on a gpus=0-3`."""
        return f"{self._call_text} on {ranks_text(self.state, self.ranks)}"

    def goes_on(self) -> str:
        """Text for a call that was left alone."""
        name, finding = self.state.name, self._call.finding
        progress = f"{self._progress}. {finding}" if finding else self._progress
        abort = f"%why {name} --abort ends it with that, " if finding else ""
        ways = f"{abort}%interrupt {name} ends it there, .get() waits again"
        return f"stopped waiting; {progress}. It goes on: {ways}"

    def meanwhile(self) -> str:
        """Text for a call that ended by itself after the first Ctrl-C."""
        return f"stopped waiting; meanwhile {self.end()}"

    def end(self) -> str:
        """Text for its end."""
        error = self.future.exception(0)
        if error is None:
            return f"{self.label} has ended"
        raised = list(error.failures.values()) or [error.exception] if isinstance(error, ActorError) else [error]
        if all(isinstance(failure, KeyboardInterrupt) for failure in raised):
            return f"{self.label} was interrupted"
        return f"{self.label} has ended with {next(iter(error_line(error).splitlines()))}"

    def outcome(self, reactions: Reactions) -> str:
        """Text for an interrupted call that has ended."""
        return "; ".join(self.outcomes(reactions))

    def outcomes(self, reactions: Reactions) -> list[str]:
        """Texts for its parts."""
        lines = ended(self.state, reactions)
        ran = {doing.call for doing in reactions.values() if doing is not None and doing.call}
        if ran and self._call.call not in ran:
            lines.append(f"{self._call_text} had not begun, and does not")
        return lines or [f"interrupted {self.label}"]

    def late(self) -> str:
        """Text for ranks that have not stopped."""
        ranks = ranks_text(self.state, self._call.missing_ranks())
        return f"{self._call_text} on {ranks} has not stopped within {GIVE_UP_SECONDS:g} s"

    def offers(self) -> str:
        """Text for ranks that have not stopped, with the commands that end them."""
        return f"{self.late()}: {restart_commands(self.state, self._call.missing_ranks())}"


def interrupt(
    runtime: Runtime, calls: Iterable[InterruptedCall], name: FileName, say: Callable[[Sequence[str]], None]
) -> dict[str, Reactions]:
    """Interrupts the ranks that calls wait for, and says which do not react; by the uid of their mesh.

    Calls of the notebook that have not begun on these meshes do not begin. Blocks up to 2 s for each mesh.
    """
    by_mesh: dict[str, list[InterruptedCall]] = {}
    for call in calls:
        call.count_again()
        by_mesh.setdefault(call.state.uid, []).append(call)
    pending = tuple(runtime.calls.values())
    reactions: dict[str, Reactions] = {}
    for uid, of_mesh in by_mesh.items():
        state = of_mesh[0].state
        drop = [call.call for call in pending if call.mesh == uid and _of_cell(call)]
        reactions[uid] = interrupted(state, sorted({rank for call in of_mesh for rank in call.ranks}), drop)
        if lines := stuck(state, reactions[uid], name):
            say(lines)
    return reactions


def _of_cell(call: PendingCall[object]) -> bool:
    return call.caller.actor_instance.cell is None
