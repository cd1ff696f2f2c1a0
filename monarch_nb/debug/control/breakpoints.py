"""Breakpoints that are set from outside, in actors that run already."""

import itertools
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec

from monarch_nb.debug import messages as m
from monarch_nb.debug import verbs
from monarch_nb.debug.control.asking import asking, outcome_of
from monarch_nb.debug.errors import DebugError
from monarch_nb.mesh import region_of, state_of
from monarch_nb.mesh.requests import request
from monarch_nb.runtime import Future, Runtime
from monarch_nb.settings import settings
from monarch_nb.wire import Verb, text_of

Q = TypeVar("Q", m.Break, m.BreakFile, m.BreakRaised)
R = TypeVar("R", bound=msgspec.Struct)


class Breakpoint:
    """A breakpoint that was set from outside."""

    def __init__(self, number: int, where: str, condition: str, mesh: Any, ranks: dict[int, m.Outcome]) -> None:
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
    """Those of one controller, by number."""

    def __init__(self, engine: Runtime) -> None:
        self._engine = engine
        self._by_number: dict[int, Breakpoint] = {}
        self._numbers = itertools.count(1)

    def __iter__(self) -> Iterator[Breakpoint]:
        return iter(tuple(self._by_number.values()))

    def set(
        self,
        mesh: Any,
        where: str,
        condition: str = "",
        *,
        hit_condition: str = "",
        log: str = "",
        temporary: bool = False,
    ) -> Breakpoint:
        """Sets one in each actor of a mesh; it is looked at from the next endpoint call on. Blocks until they are
        constructed, and for their answers.

        Raises DebugError where no rank has taken it, SyntaxError for a condition that is none.
        """
        if condition:
            compile(condition, "<condition>", "eval")
        mesh.initialized.get()  # before, there is nothing in the ranks that it could be set in
        number = next(self._numbers)
        wanted = m.Break(
            mesh=state_of(mesh).uid,
            rank=0,
            number=number,
            where=where,
            condition=condition,
            hit_condition=hit_condition,
            log=log,
            temporary=temporary,
        )
        outcomes = self._send_each(mesh, wanted)
        wrong = {each.error for each in outcomes.values() if each.error}
        if wrong and all(each.error for each in outcomes.values()):
            raise DebugError(f"{where}: {'; '.join(sorted(wrong))}")
        added = self._by_number[number] = Breakpoint(number, where, condition, mesh, outcomes)
        return added

    def clear(self, number: int) -> None:
        """Takes one away again. Raises DebugError for a number that there is not."""
        cleared = self._by_number.pop(number, None)
        if cleared is None:
            numbers = ", ".join(map(str, self._by_number)) or "none"
            raise DebugError(f"there is no breakpoint {number}; the breakpoints are: {numbers}")
        mesh = cleared.mesh
        self._send_each(mesh, m.Break(mesh=state_of(mesh).uid, rank=0, number=number, clear=True))

    def _send_each(self, mesh: Any, wanted: m.Break) -> dict[int, m.Outcome]:
        return {rank: outcome_of(future) for rank, future in self._send(mesh, verbs.BREAK, wanted).items()}

    def set_in_file(self, mesh: Any, file: str, lines: "tuple[m.BreakLine, ...]") -> dict[int, m.PlacedAll]:
        """The breakpoints of a file on each rank of a mesh, in place of those that were set so before, as a front end
        with a gutter has them. Blocks for the answers: by rank, what became of each.
        """
        wanted = m.BreakFile(mesh=state_of(mesh).uid, rank=0, file=file, lines=lines)
        placed: dict[int, m.PlacedAll] = {}
        for rank, future in self._send(mesh, verbs.BREAK_FILE, wanted).items():
            try:
                placed[rank] = asking.answer(future, settings.debug_command_timeout)
            except Exception as error:
                placed[rank] = m.PlacedAll(error=text_of(error))
        return placed

    def stop_where_raised(self, mesh: Any, *, on: bool = True) -> None:
        """Whether exceptions stop the actors of a mesh where their code raises them, from the next endpoint call on.

        Raises DebugError where no rank has taken it.
        """
        wanted = m.BreakRaised(mesh=state_of(mesh).uid, rank=0, on=on)
        outcomes = [outcome_of(each) for each in self._send(mesh, verbs.BREAK_RAISED, wanted).values()]
        if outcomes and all(each.error for each in outcomes):
            raise DebugError("; ".join(dict.fromkeys(each.error for each in outcomes)))

    def _send(self, mesh: Any, verb: Verb[Q, R], wanted: Q) -> dict[int, Future[R]]:
        procs = state_of(mesh).procs
        return {
            rank: request(self._engine, procs.address(rank), verb, msgspec.structs.replace(wanted, rank=rank))
            for rank in region_of(mesh).ranks()
        }
