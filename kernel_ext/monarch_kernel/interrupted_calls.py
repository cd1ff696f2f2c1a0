"""Calls that an interrupted cell waited for: what their ranks do, how they are interrupted, and their outcome."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from monarch_nb.lifecycle.interrupts import SILENT_AFTER, interrupted
from monarch_nb.runtime import EXEC, HOOK, RELOAD, Future, MeshState, PendingCall, ProcState, RunningEndpoint, Runtime
from monarch_nb.shape import places
from monarch_nb.wire import ActorError, error_line

OFFERED = 8  # the most ranks that are named one by one
_ENGINES = {EXEC: "the cell", HOOK: "__healed__()", RELOAD: "the reload"}
_CONSOLE = {"cell": "the cell", "setup": "the set-up"}  # endpoints of processes

FileName = Callable[[str], str]
GIVE_UP_SECONDS = 5.0  # for interrupted ranks to end their calls
Reactions = Mapping[int, RunningEndpoint | None]  # by base rank; None for a rank that has not answered


def call_text(state: MeshState, endpoint: str) -> str:
    """Returns the running call, `a.step()`, or the cell."""
    name = endpoint.lstrip("@!")
    title = _ENGINES.get(endpoint) or (_CONSOLE.get(name) if isinstance(state, ProcState) else None)
    return title or f"{state.name}.{name}()"


def ranks_text(state: MeshState, ranks: Iterable[int]) -> str:
    """Base ranks of a mesh, by its name: `a gpus=0-3`."""
    base = state.region
    text = places(base.labels, (tuple(base.point_of_base_rank(rank).values()) for rank in ranks))
    return f"{state.name} {text}".rstrip()


def restart_commands(state: MeshState, ranks: Sequence[int]) -> str:
    """Commands that kill and restart the processes of ranks that do not react."""
    base = state.region
    pick = places(base.labels, (tuple(base.point_of_base_rank(rank).values()) for rank in ranks))
    some = len(ranks) < len(base) and len(ranks) <= OFFERED
    picks = [f" {part.strip()}" for part in pick.split(";")] if some else [""]
    commands = "; ".join(f"%heal {state.name}{pick} --kill" for pick in picks)
    return (
        f"{commands} kills {'their processes and starts them' if len(ranks) > 1 else 'its process and starts it'} again"
    )


def grouped(
    doings: Mapping[int, RunningEndpoint], key: Callable[[RunningEndpoint], tuple[object, ...]]
) -> list[tuple[RunningEndpoint, list[int]]]:
    """Ranks that do the same, together."""
    groups: dict[tuple[object, ...], tuple[RunningEndpoint, list[int]]] = {}
    for rank, doing in doings.items():
        groups.setdefault(key(doing), (doing, []))[1].append(rank)
    return list(groups.values())


def ended(state: MeshState, reactions: Mapping[int, RunningEndpoint | None]) -> list[str]:
    """Description of the calls that an interrupt ended, and their ranks."""
    over = {rank: doing for rank, doing in reactions.items() if doing is not None and doing.ended}
    return [
        f"interrupted {call_text(state, doing.endpoint)} on {ranks_text(state, ranks)}"
        for doing, ranks in grouped(over, lambda doing: (doing.endpoint,))
    ]


def stuck(state: MeshState, reactions: Mapping[int, RunningEndpoint | None], name: FileName) -> list[str]:
    """Description of ranks that have not reacted to an interrupt, the reason, and what ends their calls."""
    running = {rank: doing for rank, doing in reactions.items() if doing is not None and doing.call and not doing.ended}
    lines = []
    for doing, ranks in grouped(running, lambda doing: (doing.endpoint, doing.file, doing.line)):
        location = f"{name(doing.file) or doing.file}, line {doing.line}" if doing.file else ""
        inside = f" in `{doing.source}` ({location})" if doing.source else f" ({location})" if location else ""
        single = len(ranks) == 1
        lines.append(
            f"{ranks_text(state, ranks)} {'has' if single else 'have'} not reacted within {SILENT_AFTER:g} s: "
            f"{call_text(state, doing.endpoint)} waits{inside} for something that an interrupt does not end. It ends "
            f"when that does, or {restart_commands(state, ranks)}"
        )
    silent = [rank for rank, doing in reactions.items() if doing is None]
    if silent:
        lines.append(
            f"{ranks_text(state, silent)} {'does' if len(silent) == 1 else 'do'} not answer: a long call in C, or "
            f"stopped. {restart_commands(state, silent)}"
        )
    return lines


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
