"""The planted faults, and the healthy programs that look suspicious: rows of a table."""

import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from monarch_nb.diagnosis import Kind

Tool = Literal["diagnose", "graph", "circle", "tensors", "far", "slow", "slow calls", "values", "replicas", "memory"]


@dataclass(frozen=True)
class Case:
    """One program with one fault, or, where `kind` is "", a healthy one.

    `sure` is False where the evidence always allows another explanation: then a suspicion is the right answer.
    """

    program: str
    fault: str
    kind: Kind | Literal[""]
    place: str = "data"
    procs: int = 3
    many: int = 1  # planted ranks; 0: all
    sure: bool = True
    tool: Tool = "diagnose"
    every: int = 0
    steps: int = 1_000_000
    blamed: Literal["planted", "all"] = "planted"
    first: int | None = None  # the planted rank; None: drawn
    hogs: int = 0  # other processes that compute meanwhile

    @property
    def name(self) -> str:
        hogs = ", loaded machine" if self.hogs else ""
        tool = "" if self.tool in ("diagnose", "graph", "circle", "tensors", "far") else f", {self.tool}"
        ranks = "all" if self.many == 0 else str(self.many)
        return f"{self.program}: {self.fault} at {self.place}, {ranks} of {self.procs}{tool}{hogs}"

    def ranks(self, seed: int) -> tuple[int, ...]:
        """The ranks in which it is planted."""
        if self.many == 0:
            return tuple(range(self.procs))
        if self.first is not None:
            return tuple(range(self.first, self.first + self.many))
        return tuple(sorted(random.Random(f"{self.name} {seed}").sample(range(self.procs), self.many)))

    def culprits(self, seed: int) -> tuple[int, ...]:
        """The ranks that are to be named."""
        return tuple(range(self.procs)) if self.blamed == "all" else self.ranks(seed)

    def step(self, seed: int) -> int:
        return random.Random(f"step {self.name} {seed}").randrange(
            2, 5 if self.tool in ("slow", "slow calls", "memory") else 40
        )


def _missing() -> Iterable[Case]:
    kind: Kind = "missing_from_collective"
    for fault, program, place, procs, many in (
        ("queue", "all_reduce", "data", 3, 1),
        ("lock", "all_reduce", "data", 2, 1),
        ("event", "mixed collectives", "gather", 4, 1),
        ("condition", "mixed collectives", "barrier", 3, 2),
        ("sleep", "mixed collectives", "broadcast", 3, 1),
        ("socket", "DDP", "data", 4, 1),
        ("pipe", "DDP", "forward", 3, 1),
        ("file lock", "DDP", "optimizer", 2, 1),
        ("select", "DDP", "backward", 3, 1),
        ("thread", "FSDP", "data", 4, 1),
        ("poll", "FSDP", "forward", 2, 1),
        ("accept", "FSDP", "optimizer", 3, 2),
        ("future", "reduced by hand", "optimizer", 3, 1),
        ("event loop", "reduced by hand", "data", 3, 1),
        ("semaphore", "all_reduce", "data", 8, 1),
        ("queue of processes", "DDP", "data", 8, 2),
        ("signal", "all_reduce", "data", 3, 1),
        ("C", "all_reduce", "data", 4, 1),
        ("C", "DDP", "forward", 3, 1),
        ("queue", "rows and columns", "row", 4, 1),
        ("lock", "rows and columns", "column", 6, 1),
        ("event", "rows and columns", "data", 8, 1),
        ("socket", "asynchronous", "data", 3, 1),
        ("raises", "all_reduce", "data", 3, 1),
        ("returns", "all_reduce", "data", 4, 1),
        ("returns", "DDP", "data", 3, 2),
    ):
        yield Case(program, fault, kind, place, procs, many)
    yield Case("half", "queue", kind, "data", 4, 1, first=0)
    yield Case("half", "event", kind, "data", 6, 1, first=4)


def _mismatched() -> Iterable[Case]:
    kind: Kind = "mismatched_collective"
    for fault, program, procs in (
        ("other operation", "all_reduce", 3),
        ("other operation", "reduced by hand", 4),
        ("skip", "mixed collectives", 3),
        ("skip", "mixed collectives", 5),
        ("other operation", "mixed collectives", 8),
        ("other operation", "asynchronous", 3),
    ):
        yield Case(program, fault, kind, procs=procs)
    yield Case("all_reduce", "skip", kind, steps=60)
    yield Case("mixed collectives", "skip", kind, procs=2, blamed="all")
    yield Case("all_reduce", "other operation", kind, procs=2, blamed="all")


def _stuck() -> Iterable[Case]:
    for fault, procs, many in (
        ("queue", 3, 1),
        ("lock", 4, 1),
        ("socket", 8, 2),
        ("C", 3, 1),
        ("sleep", 5, 1),
        ("poll", 3, 1),
        ("event loop", 4, 1),
        ("C with the GIL", 3, 1),
    ):
        yield Case("no collectives", fault, "stuck", procs=procs, many=many, steps=50)
    yield Case("all_reduce", "C with the GIL", "stuck")
    yield Case("DDP", "C with the GIL", "stuck", "forward", 4)


def _ended() -> Iterable[Case]:
    for fault, program, procs, kind in (
        ("SIGSTOP", "all_reduce", 3, "stopped"),
        ("SIGSTOP", "DDP", 4, "stopped"),
        ("SIGSTOP", "no collectives", 2, "stopped"),
        ("SIGSTOP", "rows and columns", 8, "stopped"),
        ("gdb", "all_reduce", 3, "stopped"),
        ("breakpoint", "all_reduce", 3, "stopped"),
        ("breakpoint", "DDP", 2, "stopped"),
        ("SIGKILL", "all_reduce", 3, "dead"),
        ("SIGKILL", "DDP", 8, "dead"),
        ("exit", "FSDP", 3, "dead"),
        ("segmentation fault", "mixed collectives", 3, "dead"),
        ("abort", "no collectives", 4, "dead"),
    ):
        yield Case(program, fault, kind, procs=procs, many=2 if procs == 8 else 1)  # type: ignore[arg-type]
    yield Case("tensor mesh", "SIGSTOP", "stopped", procs=4, tool="tensors")
    yield Case("tensor mesh", "SIGSTOP", "stopped", procs=2, tool="tensors")
    yield Case("tensor mesh", "SIGKILL", "dead", procs=4, tool="tensors")
    yield Case("far hosts", "connection cut", "unreachable", procs=2, tool="far")


def _deadlocks() -> Iterable[Case]:
    for procs in (2, 3, 5):
        yield Case("actors in a circle", "nothing", "deadlock", procs=procs, tool="circle", many=0)
    for procs in (2, 4):
        yield Case("two groups", "skip", "deadlock", procs=procs, blamed="all")
    for fault, program, place, procs, many in (
        ("locks of two threads", "all_reduce", "data", 3, 1),
        ("locks of two threads", "DDP", "forward", 4, 2),
        ("lock of its own", "FSDP", "optimizer", 2, 1),
        ("locks of two threads", "no collectives", "data", 3, 1),
    ):
        yield Case(program, fault, "deadlock", place, procs, many)


def _waiting() -> Iterable[Case]:
    for fault, program, place, procs in (
        ("computes", "all_reduce", "data", 3),
        ("computes in C", "DDP", "forward", 3),
        ("writes", "all_reduce", "data", 3),
        ("child process", "all_reduce", "data", 3),
        ("writes", "FSDP", "optimizer", 2),
        ("computes", "rows and columns", "row", 4),
        ("computes", "no collectives", "data", 3),
    ):
        yield Case(
            program, fault, "waiting_on", place, procs, sure=False, steps=1_000_000 if "no" not in program else 99
        )
    yield Case("pipeline", "queue", "waiting_on", procs=4, sure=False)
    yield Case("pipeline", "lock", "waiting_on", "forward", procs=3, sure=False, first=0)
    yield Case("actors in a chain", "queue", "waiting_on", procs=2, sure=False, tool="graph", first=1)
    yield Case("actors in a chain", "event", "waiting_on", procs=4, sure=False, tool="graph", first=3)


def _slow() -> Iterable[Case]:
    for fault, program, place, procs in (
        ("naps", "DDP", "data", 3),
        ("naps", "DDP", "forward", 4),
        ("naps", "DDP", "optimizer", 2),
        ("naps", "FSDP", "forward", 3),
        ("naps", "reduced by hand", "optimizer", 3),
        ("naps", "all_reduce", "data", 4),
        ("burns", "all_reduce", "data", 3),
        ("burns", "DDP", "data", 2),
        ("collects", "all_reduce", "data", 3),
    ):
        yield Case(program, fault, "slow", place, procs, tool="slow", every=1, steps=90)
    yield Case("no collectives", "naps", "slow", procs=3, tool="slow calls", every=1, steps=60)


def _values() -> Iterable[Case]:
    for fault, program, procs in (
        ("NaN of a logarithm", "DDP", 3),
        ("NaN of a quotient", "DDP", 2),
        ("NaN of infinities", "reduced by hand", 3),
        ("NaN of a root's gradient", "DDP", 3),
        ("NaN of a norm", "FSDP", 2),
        ("NaN of the data", "reduced by hand", 3),
    ):
        yield Case(program, fault, "nonfinite", "none", procs, tool="values", steps=60)
    for fault, program, procs, sure in (
        ("drifts", "DDP", 3, True),
        ("drifts in its optimizer", "DDP", 4, True),
        ("other rate", "DDP", 3, True),
        ("drifts", "reduced by hand", 3, False),
        ("other rate", "reduced by hand", 5, False),
    ):
        yield Case(program, fault, "diverged", "end", procs, sure=sure, tool="replicas", steps=60)
    yield Case("DDP", "other weights", "diverged", "end", 2, 0, tool="replicas", steps=60)


def _memory() -> Iterable[Case]:
    for fault, program, procs, many in (
        ("keeps tensors", "DDP", 3, 1),
        ("keeps tensors", "reduced by hand", 4, 2),
        ("keeps objects", "all_reduce", 3, 1),
        ("keeps objects", "DDP", 2, 0),
    ):
        yield Case(program, fault, "memory", procs=procs, many=many, tool="memory", every=1, steps=150)


FAULTY = (
    *_missing(),
    *_mismatched(),
    *_stuck(),
    *_ended(),
    *_deadlocks(),
    *_waiting(),
    *_slow(),
    *_values(),
    *_memory(),
)


def _healthy() -> Iterable[Case]:
    for program, fault, place, procs, every, first, many, steps in (
        ("all_reduce", "uneven", "data", 3, 1, None, 0, 1000),
        ("DDP", "uneven", "data", 4, 1, None, 0, 1000),
        ("FSDP", "uneven", "forward", 3, 1, None, 0, 1000),
        ("rows and columns", "uneven", "row", 4, 1, None, 0, 1000),
        ("rows and columns", "at times", "column", 8, 1, None, 0, 1000),
        ("mixed collectives", "at times", "barrier", 4, 1, None, 0, 1000),
        ("asynchronous", "uneven", "data", 3, 1, None, 0, 1000),
        ("pipeline", "uneven", "forward", 4, 1, None, 0, 1000),
        ("half", "uneven", "data", 6, 1, None, 0, 1000),
        ("all_reduce", "saves", "data", 3, 300, 0, 1, 1000),
        ("DDP", "saves", "optimizer", 4, 100, 0, 1, 1000),
        ("FSDP", "saves", "data", 2, 100, 0, 1, 1000),
        ("DDP", "evaluates", "data", 3, 150, 0, 1, 1000),
        ("rows and columns", "evaluates", "data", 4, 300, 0, 1, 1000),
        ("mixed collectives", "evaluates", "barrier", 8, 150, 0, 1, 1000),
        ("reduced by hand", "evaluates", "optimizer", 3, 150, 2, 1, 1000),
        ("DDP", "compiles", "forward", 3, 0, None, 1, 1000),
        ("FSDP", "compiles", "forward", 2, 0, None, 1, 1000),
        ("all_reduce", "collects", "data", 4, 20, None, 1, 1000),
        ("DDP", "collects", "data", 3, 20, None, 2, 1000),
        ("all_reduce", "sleeps", "data", 3, 300, None, 1, 1000),
        ("DDP", "sleeps", "data", 4, 150, None, 1, 1000),
        ("all_reduce", "sleeps for long", "data", 3, 0, None, 0, 1000),
        ("no collectives", "sleeps for long", "data", 3, 0, None, 0, 1000),
        ("no collectives", "evaluates", "data", 4, 0, None, 1, 1000),
        ("no collectives", "sleeps", "data", 3, 0, None, 1, 1000),
        ("all_reduce", "holds the GIL", "data", 3, 0, None, 0, 1000),
        ("DDP", "in C", "forward", 3, 0, None, 0, 1000),
        ("no collectives", "in C", "data", 4, 0, None, 0, 1000),
        ("all_reduce", "downloads", "data", 3, 0, 0, 1, 1000),
        ("DDP", "fed by a computing thread", "data", 3, 100, None, 1, 1000),
        ("all_reduce", "fed by a downloading thread", "data", 3, 500, None, 1, 1000),
        ("all_reduce", "child that computes", "data", 3, 500, 0, 1, 1000),
        ("DDP", "child that sleeps", "data", 3, 0, 0, 1, 1000),
        ("all_reduce", "loader's worker", "data", 3, 0, None, 1, 1000),
        ("masks", "nothing", "data", 3, 1, None, 0, 1000),
        ("experts", "saves", "data", 4, 300, 0, 1, 1000),
    ):
        yield Case(program, fault, "", place, procs, many, every=every, first=first, steps=steps)
    for program, fault, place, procs, every, steps in (
        ("DDP", "lock of another thread", "data", 3, 0, 1000),
        ("all_reduce", "locks in turn", "data", 3, 0, 1000),
        ("DDP", "evaluates for long", "data", 3, 0, 1000),
        ("no collectives", "evaluates for long", "data", 3, 0, 1000),
    ):
        yield Case(program, fault, "", place, procs, every=every, steps=steps)
    yield Case("DDP", "uneven", "", "data", 3, 0, every=1, steps=1000, hogs=3)
    yield Case("all_reduce", "evaluates", "", "data", 8, 1, every=300, steps=1000, hogs=4)
    yield Case("rows and columns", "sleeps", "", "data", 4, 1, every=200, steps=1000, hogs=3)
    yield Case("tensor mesh", "nothing", "", procs=4, tool="tensors", many=0, steps=300)
    yield Case("actors in a chain", "sleeps", "", procs=3, tool="graph", first=2, steps=3)
    for program, fault, place, procs, many, every in (
        ("DDP", "uneven", "data", 3, 0, 1),
        ("all_reduce", "uneven", "data", 4, 0, 1),
        ("DDP", "saves", "optimizer", 3, 1, 60),
        ("FSDP", "collects", "data", 2, 0, 10),
        ("reduced by hand", "evaluates", "data", 3, 1, 100),
    ):
        yield Case(program, fault, "", place, procs, many, every=every, steps=150, tool="slow")
    yield Case("all_reduce", "uneven", "", "data", 3, 0, every=1, steps=200, tool="slow", hogs=3)
    for program in ("DDP", "FSDP", "reduced by hand", "masks"):
        yield Case(program, "nothing", "", "none", 3, 0, tool="values", steps=80)
    for program in ("DDP", "FSDP", "reduced by hand", "experts"):
        yield Case(program, "nothing", "", "none", 3, 0, tool="replicas", steps=100)


HEALTHY = tuple(_healthy())
