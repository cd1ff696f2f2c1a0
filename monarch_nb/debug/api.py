"""The debugger for programs, without a prompt."""

from collections.abc import Callable, Sequence
from typing import Any

from monarch_nb.debug import verbs
from monarch_nb.debug.control import whereabouts
from monarch_nb.debug.control.controller import STEP_S, Breakpoint
from monarch_nb.debug.prompt.prompt import DebugPrompt
from monarch_nb.debug.records import DebugError, Motion, Stopped, Value
from monarch_nb.debug.render.merge import Answers, Pair, diff_text, merged_text, outliers, plain
from monarch_nb.debug.service import controller
from monarch_nb.mesh import ActorMesh, AnyMesh, ProcMesh, part_of, region_of, state_of
from monarch_nb.runtime import proc_state_of
from monarch_nb.wire import ActorError, counted, kind_of


class Group:
    """A selection of stopped ranks; each command goes to all of them. The selection is evaluated at each command."""

    def __init__(self, choose: Callable[[], list[Stopped]]) -> None:
        self._choose = choose
        self._prompt = DebugPrompt(controller(), choose, everybody=True)

    @property
    def sessions(self) -> list[Stopped]:
        """Its ranks that are stopped now."""
        return self._choose()

    def run(self, command: str, *, timeout: float = STEP_S) -> Answers:
        """Runs a command as typed at the prompt; a step waits up to `timeout` seconds for the next stop.

        Raises DebugError if nothing is stopped.
        """
        self._stopped()
        self._prompt.step_s = timeout
        return self._prompt.do(command)

    def eval(self, expression: str) -> Answers:
        """Evaluates an expression in the frame of each; `.values` has the results by rank."""
        pairs = self._ask(expression)
        return Answers(expression, merged_text(pairs), pairs)

    def _ask(self, expression: str) -> tuple[Pair, ...]:
        records = self._stopped()
        return tuple(zip(records, controller().evaluate(records, expression), strict=True))

    def step(self, timeout: float = STEP_S) -> Answers:
        """Runs each to its next line, into functions."""
        return self._move("in", timeout)

    def next(self, timeout: float = STEP_S) -> Answers:
        """Runs each to its next line, over functions."""
        return self._move("over", timeout)

    def finish(self, timeout: float = STEP_S) -> Answers:
        """Runs each to the end of its function."""
        return self._move("out", timeout)

    def _move(self, motion: Motion, timeout: float) -> Answers:
        self._stopped()
        self._prompt.step_s = timeout
        return self._prompt.move(motion)

    def resume(self) -> None:
        """Resumes the ranks, up to the next breakpoint."""
        controller().go(self._stopped())

    def quit(self) -> None:
        """Ends their endpoints: the calls fail with QuitDebugger. A thread that an endpoint has started ends alone."""
        controller().ask(self._stopped(), verbs.Quit(session=""))

    def locals(self) -> dict[int, dict[str, Value]]:
        """Returns the local variables of each, by rank."""
        records = self._stopped()
        answers = controller().ask(records, verbs.GetVariables(session=""))
        return {
            record.rank: {variable.name: variable.value for variable in answer.variables}
            for record, answer in zip(records, answers, strict=True)
        }

    def where(self) -> str:
        """Returns the tree of their stacks, with counts."""
        return self._prompt.do("where").text

    def diff(self, expression: str) -> list[tuple[Any, list[int]]]:
        """Returns the values of an expression (DebugErrors where it raised) with their ranks, odd ones first."""
        pairs = self._ask(expression)
        answers = {record.session: answer for record, answer in pairs}
        by_value: list[tuple[Any, list[int]]] = []
        for merged, _ in outliers(pairs):
            answer = answers[merged.records[0].session]
            value = DebugError(answer.error) if answer.error else plain(answer.value)
            by_value.append((value, [record.rank for record in merged.records]))
        return by_value

    def diff_text(self, expression: str) -> str:
        """Returns the differences as text."""
        return diff_text(expression, self._ask(expression))

    def watch(self, expression: str) -> str:
        """Returns a sparkline of an expression over the ranks."""
        self._stopped()
        return self._prompt.do(f"watch {expression}").text

    def _stopped(self) -> list[Stopped]:
        records = self._choose()
        if not records:
            raise DebugError("none of these ranks is stopped; monarch.debug.sessions() lists the ranks that are")
        self._prompt.focus_on(records)
        return records

    def __len__(self) -> int:
        return len(self._choose())

    def __repr__(self) -> str:
        return DebugPrompt(controller(), self._choose).table(source=False)


def sessions() -> list[Stopped]:
    """Returns all threads that are stopped in the debugger, by actor and rank."""
    return controller().stopped.records()


def group(mesh: object = None, **picks: int | slice | Sequence[int]) -> Group:
    """Returns the stopped ranks of a mesh (ActorMesh, slice, or name), or all; `gpus=3` picks some of them."""
    engine_controller = controller()
    handle = None if mesh is None or isinstance(mesh, str) else _handle(mesh)
    if handle is not None and picks:
        handle = part_of(handle, region_of(handle).pick(**picks))
        picks = {}

    def choose() -> list[Stopped]:
        records = engine_controller.stopped.records()
        if handle is not None:
            ranks = set(region_of(handle).ranks())
            records = [record for record in records if record.mesh == state_of(handle).uid and record.rank in ranks]
        elif mesh is not None:
            records = [record for record in records if record.name == mesh]
        for label, pick in picks.items():
            records = [record for record in records if label in record.labels and _picked(record, label, pick)]
        return records

    return Group(choose)


def _handle(mesh: object) -> AnyMesh:
    if not isinstance(mesh, (ActorMesh, ProcMesh)):
        raise TypeError(f"a mesh of actors or processes is wanted, not {kind_of(mesh)}")
    return mesh


def _picked(record: Stopped, label: str, pick: int | slice | Sequence[int]) -> bool:
    index = record.point[record.labels.index(label)]
    if isinstance(pick, slice):
        return index in range(*pick.indices(1 << 30))
    return index in pick if isinstance(pick, Sequence) else index == pick


def eval(expression: str, mesh: object = None) -> Answers:  # noqa: A001
    """Evaluates an expression in the frames of all stopped threads, or of those of a mesh."""
    return group(mesh).eval(expression)


def step(mesh: object = None, timeout: float = STEP_S) -> Answers:
    """Runs all stopped threads to the next line, into functions."""
    return group(mesh).step(timeout)


def next(mesh: object = None, timeout: float = STEP_S) -> Answers:  # noqa: A001
    """Runs all that is stopped to the next line, over functions."""
    return group(mesh).next(timeout)


def resume(mesh: object = None) -> None:
    """Resumes all that is stopped."""
    group(mesh).resume()


def where(mesh: object = None) -> str:
    """Returns the tree of the stacks of all stopped threads, with counts."""
    return group(mesh).where()


def table() -> str:
    """Returns the stopped ranks, the other ranks and their locations, and the source around the line."""
    return DebugPrompt(controller(), sessions).table()


def detach(mesh: object = None) -> None:
    """Gives up control of stopped threads, so that other controllers can send commands."""
    records = group(mesh).sessions
    controller().ask(records, verbs.Release(session=""))


def take(mesh: object = None) -> None:
    """Takes over stopped threads from another controller, which learns of it with its next command."""
    controller().ask(group(mesh).sessions, verbs.Select(session="", force=True))


def wait(count: int = 1, mesh: object = None, timeout: float | None = 30.0) -> list[Stopped]:
    """Blocks until `count` ranks are stopped. Raises TimeoutError."""
    chosen = group(mesh)
    limit = 1e9 if timeout is None else timeout
    if not controller().stopped.wait(limit, lambda: len(chosen.sessions) >= count):
        raise TimeoutError(f"{len(chosen.sessions)} of {counted(count, 'rank')} stopped within {limit:g} s")
    return chosen.sessions


def on_change(listener: Callable[[str, Stopped], None]) -> Callable[[], None]:
    """Calls `listener(kind, record)` on each "stopped", "resumed", "lost" and "looked" (at another frame of it).

    Called on any thread, so that it must not block. Returns a function that removes it.
    """
    return controller().stopped.listen(listener)


# -- breakpoints from outside ------------------------------------------------------------------------------------------


def set_breakpoint(
    where: str, mesh: object, *, condition: str = "", hit_condition: str = "", log: str = "", temporary: bool = False
) -> Breakpoint:
    """Sets a breakpoint in running actors: `where` is "train.py:42" or a function, "Trainer.step" or "step", or by
    its full name any other, whose module is imported there. In a mesh of processes it holds in cells and in all actors.

    It takes effect from each actor's next endpoint call on. Raises DebugError if no rank knows the place.
    """
    return controller().breakpoints.set(
        _handle(mesh), where, condition, hit_condition=hit_condition, log=log, temporary=temporary
    )


def clear_breakpoint(which: Breakpoint | int | None = None) -> None:
    """Removes a breakpoint, given as such or by its number; without an argument all."""
    for bp in breakpoints() if which is None else [which]:
        controller().breakpoints.clear(bp.number if isinstance(bp, Breakpoint) else bp)


def breakpoints() -> list[Breakpoint]:
    """Breakpoints that were set from outside the actors."""
    return list(controller().breakpoints)


# -- failures and running ranks ----------------------------------------------------------------------------------------


def post_mortem(what: object, **picks: int | slice) -> Group:
    """Opens the frames of a failed call on the rank where it was raised: of an ActorError, or of a rank's last failure.

    The actor goes on serving; `.resume()` closes the frames. Raises DebugError where no frames are kept.
    """
    mesh, rank, call = _failed(what, picks)
    state = controller().runtime.meshes.get(mesh)
    if state is None:
        raise DebugError("the mesh of this error has been stopped, so its frames are gone")
    address = proc_state_of(state).address(rank)
    record = controller().autopsy(mesh, address, rank, call)
    return Group(lambda: [candidate for candidate in sessions() if candidate.session == record.session])


def _failed(target: object, picks: dict[str, int | slice]) -> tuple[str, int, str]:
    if isinstance(target, ActorError):
        if target.origin is None:
            raise DebugError("this error does not say which rank raised it: pass the mesh and a rank instead")
        return target.origin
    part = _handle(target).slice(**picks) if picks else _handle(target)
    ranks = list(region_of(part).ranks())
    if len(ranks) != 1:
        raise DebugError(f"{state_of(part).name} has {len(ranks)} ranks: say which, as in gpus=3")
    return state_of(part).uid, ranks[0], ""


def release(mesh: object) -> None:
    """Discards the frames of failures that processes of a mesh have stored."""
    controller().release(_addresses(mesh))


def freeze_on_error(mesh: object, on: bool = True) -> None:
    """Sets whether an endpoint that raises, on any actor of the mesh's processes, stops there as at a breakpoint."""
    controller().freeze(_addresses(mesh), on=on)


def stacks(mesh: object) -> str:
    """Returns the Python stacks of every rank of a mesh, merged into one tree; of ranks stuck in C by py-spy."""
    handle = _handle(mesh)
    return whereabouts.stacks_text(controller(), state_of(handle), list(region_of(handle).ranks()))


def _addresses(mesh: object) -> Sequence[str]:
    handle = _handle(mesh)
    procs = proc_state_of(state_of(handle))
    return [procs.address(rank) for rank in region_of(handle).ranks()]
