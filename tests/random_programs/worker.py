"""The programs of many seeds, one after the other in this process."""

import functools
from collections.abc import Callable, Iterable, Sequence

from tests.random_programs.compiled import judge_compiled
from tests.random_programs.fleet import Fleet
from tests.random_programs.generator import generate
from tests.random_programs.judge import DEAD, HUNG, WRONG, Outcome, judge_program
from tests.random_programs.local import Expected
from tests.random_programs.program import Program, paste_text
from tests.random_programs.runner import Report, mesh_of
from tests.random_programs.shrink import MOST, shrink_program

SHRUNK = 3  # failures of one reason that are made smaller: others are likely the same


def reports(
    seeds: Iterable[int], fleet: Fleet, meshes: Sequence[tuple[int, ...]], shrink: bool = True, compiled: str = ""
) -> Iterable[Report]:
    """The outcome of each program, or of calls of it as a step compiled by the backend `compiled`."""
    judge = functools.partial(judge_compiled, backend=compiled) if compiled else judge_program
    counts: dict[str, int] = {}
    for seed in seeds:
        shape = mesh_of(seed, meshes)
        program = generate(seed, shape, fleet.device)
        outcome = judge(program, fleet.mesh(shape))
        smallest = ""
        if outcome.kind in (HUNG, DEAD):
            fleet.renew(shape)
        if outcome.kind in (WRONG, HUNG, DEAD):
            counts[outcome.reason] = counts.get(outcome.reason, 0) + 1
            if shrink and counts[outcome.reason] <= SHRUNK:
                program = shrink_program(program, failing(judge, fleet, outcome), MOST if outcome.kind != HUNG else 10)
            smallest = paste_text(program)
        yield Report(seed, shape, outcome.kind, outcome.reason, outcome.text, smallest)


def failing(judge: Callable[..., Outcome], fleet: Fleet, before: Outcome) -> Callable[[Program, Expected], bool]:
    """Whether a program fails in this way, run on a mesh of its shape."""

    def fails(program: Program, expected: Expected) -> bool:
        outcome = judge(program, fleet.mesh(program.mesh), expected, patience=20)
        if outcome.kind in (HUNG, DEAD):
            fleet.renew(program.mesh)
        return (outcome.kind, outcome.reason) == (before.kind, before.reason)

    return fails
