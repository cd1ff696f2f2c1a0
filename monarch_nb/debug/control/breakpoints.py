"""Breakpoints that are set from outside, in actors that run already."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec

from monarch_nb.debug import messages as m
from monarch_nb.debug import verbs
from monarch_nb.debug.control.asking import asking, outcome_of
from monarch_nb.debug.errors import DebugError
from monarch_nb.mesh import AnyMesh, region_of, state_of
from monarch_nb.mesh.requests import request
from monarch_nb.runtime import Future, MeshState, ProcState, Runtime, proc_state_of
from monarch_nb.store import describe
from monarch_nb.wire import text_of

PLACING_S = 3.0  # for processes to take breakpoints; slower ones take them later


class Breakpoint:
    """A breakpoint that was set from outside."""

    def __init__(
        self, number: int, where: str, condition: str, mesh: AnyMesh, ranks: dict[int, m.CommandOutcome]
    ) -> None:
        self.number = number
        self.where = where
        self.condition = condition
        self.mesh = mesh
        self.ranks = ranks

    def __repr__(self) -> str:
        condition = f" if {self.condition}" if self.condition else ""
        errors = [f"rank {rank}: {outcome.error}" for rank, outcome in self.ranks.items() if outcome.error]
        refusals = f" (not {'; '.join(errors)})" if errors else ""
        return f"breakpoint {self.number} at {self.where}{condition} on {state_of(self.mesh).name}{refusals}"


class Breakpoints:
    """The breakpoints of one controller, by number."""

    def __init__(self, runtime: Runtime, apply_locally: Callable[[str, m.BreakSet], int]) -> None:
        """`apply_locally` sets breakpoints for all actors in those of this process."""
        self._runtime = runtime
        self._apply_locally = apply_locally
        self._setting = threading.Lock()
        self._version = 0
        self._by_number: dict[int, Breakpoint] = {}
        self._adding = threading.Lock()
        self._last = 0

    def __iter__(self) -> Iterator[Breakpoint]:
        return iter(tuple(self._by_number.values()))

    def set(
        self,
        mesh: AnyMesh,
        where: str,
        condition: str = "",
        *,
        hit_condition: str = "",
        log: str = "",
        temporary: bool = False,
    ) -> Breakpoint:
        """Sets one in each actor of a mesh, or, for processes, in their cells and all their actors; it takes
        effect from the next endpoint call or cell on. Blocks until they are constructed, and for their answers.

        Raises DebugError where no rank has taken it, SyntaxError for a condition that is none.
        """
        if condition:
            compile(condition, "<condition>", "eval")
        mesh.initialized.get()  # the ranks have no actors before
        with self._adding:
            number = self._last + 1
            command = m.Break(
                mesh=state_of(mesh).uid,
                rank=0,
                number=number,
                where=where,
                condition=condition,
                hit_condition=hit_condition,
                log=log,
                temporary=temporary,
            )
            outcomes = self._send_each(mesh, command)
            wrong = {outcome.error for outcome in outcomes.values() if outcome.error}
            if wrong and all(outcome.error for outcome in outcomes.values()):
                raise DebugError(f"{where}: {'; '.join(sorted(wrong))}")
            self._last = number  # the number of a refused breakpoint is used again
            added = self._by_number[number] = Breakpoint(number, where, condition, mesh, outcomes)
            return added

    def clear(self, number: int) -> None:
        """Removes a breakpoint. Raises DebugError for an unknown number."""
        cleared = self._by_number.pop(number, None)
        if cleared is None:
            numbers = ", ".join(map(str, self._by_number)) or "none"
            raise DebugError(f"there is no breakpoint {number}; the breakpoints are: {numbers}")
        mesh = cleared.mesh
        self._send_each(mesh, m.Break(mesh=state_of(mesh).uid, rank=0, number=number, clear=True))

    def _send_each(self, mesh: AnyMesh, command: m.Break) -> dict[int, m.CommandOutcome]:
        state: MeshState = state_of(mesh)
        procs = proc_state_of(state)
        uids = [state.uid, *(state.actors if isinstance(state, ProcState) else ())]
        replies: dict[int, list[Future[m.CommandOutcome]]] = {}
        for uid in uids:
            mesh_state = self._runtime.meshes[uid]
            if mesh_state.stopped is not None:
                continue
            for rank in set(region_of(mesh).ranks()) & set(mesh_state.region.ranks()):
                message = msgspec.structs.replace(command, mesh=uid, rank=rank)
                replies.setdefault(rank, []).append(request(self._runtime, procs.address(rank), verbs.BREAK, message))
        outcomes = {rank: [outcome_of(future) for future in replies[rank]] for rank in sorted(replies)}
        # A rank has the breakpoint if any of its actors has it.
        return {
            rank: next((outcome for outcome in outcomes_of if not outcome.error), outcomes_of[0])
            for rank, outcomes_of in outcomes.items()
        }

    def set_everywhere(
        self,
        lines: Sequence[m.BreakLine],
        *,
        raised: str | None = None,
        uncaught: str | None = None,
        release: bool = False,
    ) -> dict[str, str]:
        """Replaces the breakpoints that a front end with a gutter has in all actors, present and future. `raised` and
        `uncaught` are the ranks that stop where exceptions are raised, or where an endpoint fails: "" for all, None
        for none. With `release` all stopped ranks resume, and running steps do not stop again. Blocks for the answers,
        at most `PLACING_S`; returns the addresses of processes that have not answered, with the reasons.
        """
        with self._setting:
            self._version += 1
            breaks = m.BreakSet(
                version=self._version, lines=tuple(lines), raised=raised, uncaught=uncaught, release=release
            )
            self._apply_locally(self._runtime.address, breaks)
            replies = {dst: request(self._runtime, dst, verbs.BREAK_SET, breaks) for dst in self._addresses()}
        until = time.monotonic() + PLACING_S
        wrong: dict[str, str] = {}
        for address, future in replies.items():
            try:
                asking.answer(future, max(0.0, until - time.monotonic()))
            except Exception as error:
                wrong[address] = text_of(error)
        return wrong

    def pause(self, actors: Sequence[tuple[str, int]] = ()) -> str:
        """Stops actors (all, if none are named) at their next traced line; returns the reason if none will stop."""
        command = m.Pause(actors=tuple(actors))
        replies = [request(self._runtime, address, verbs.PAUSE, command) for address in self._addresses()]
        outcomes = [outcome_of(future) for future in replies]
        errors = dict.fromkeys(outcome.error for outcome in outcomes if outcome.error)
        return "" if any(not outcome.error for outcome in outcomes) else "; ".join(errors)

    def _addresses(self) -> list[str]:
        """Returns all processes that may hold actors, except this one and failed ones."""
        addresses = []
        for state in tuple(self._runtime.meshes.values()):
            if isinstance(state, ProcState) and state.stopped is None:
                failed = {view.rank for view in describe(state).having("failed")}
                addresses += [state.address(rank) for rank in state.region.ranks() if rank not in failed]
        return [address for address in dict.fromkeys(addresses) if address != self._runtime.address]
