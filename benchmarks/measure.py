"""Code that the measured programs share. Only the standard library: it runs in the peers' environments too."""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

FIGURE = "FIGURE "  # how a line with a figure begins


@dataclass(frozen=True)
class Plan:
    """How much of each is measured."""

    calls: int = 3000
    casts: int = 1000
    pipelined: int = 5000
    megabyte: int = 300
    big: int = 10
    spawns: int = 5
    kills: int = 24
    colds: int = 5
    idle_s: float = 10.0
    actors: int = 800  # for the memory of one
    scale: int = 64  # processes
    scale_actors: int = 10  # on each of them
    face_ranks: int = 1000
    face_events: int = 50_000
    face_s: float = 60.0  # of the page; none of it with 0
    kernels: tuple[str, ...] = ("ipykernel-7.3", "ipykernel-7.4")  # of scripts/kernels.py, or "installed"
    face_rounds: int = 10  # of changes seen in a page
    heavy: str = "torch"  # imported by an idle process

    def encode(self) -> str:
        return json.dumps(asdict(self))


QUICK = Plan(
    calls=20,
    casts=10,
    pipelined=50,
    megabyte=5,
    big=2,
    spawns=1,
    kills=2,
    colds=1,
    idle_s=0.5,
    actors=16,
    scale=4,
    scale_actors=2,
    face_ranks=64,
    face_events=1000,
    face_s=0.0,
    kernels=("installed",),
    heavy="numpy",
)


def plan_of(argv: list[str]) -> Plan:
    return Plan(**json.loads(argv[1])) if len(argv) > 1 else Plan()


def figure(row: str, **values: float) -> None:
    print(FIGURE + json.dumps({"row": row, **values}), flush=True)


def figures_of(output: str) -> dict[str, dict[str, float]]:
    """The figures in a program's output."""
    figures: dict[str, dict[str, float]] = {}
    for line in output.splitlines():
        if line.startswith(FIGURE):
            values: dict[str, Any] = json.loads(line[len(FIGURE) :])
            figures[values.pop("row")] = values
    return figures


def medians(rounds: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Of each figure, its median in the rounds that have it."""
    values: dict[str, dict[str, list[float]]] = {}
    for figures in rounds:
        for row, entries in figures.items():
            for name, value in entries.items():
                values.setdefault(row, {}).setdefault(name, []).append(value)
    return {
        row: {name: statistics.median(several) for name, several in entries.items()} for row, entries in values.items()
    }


def times(row: str, seconds: list[float]) -> None:
    """Prints the spread of some times, in milliseconds."""
    ms = [1000 * second for second in sorted(seconds)]
    if not ms:
        return

    def quantile(share: float) -> float:
        return ms[min(len(ms) - 1, int(len(ms) * share))]

    figure(row, p50=quantile(0.5), p95=quantile(0.95), p99=quantile(0.99), least=ms[0], most=ms[-1], n=len(ms))


def repeat(
    count: int, action: Callable[[], object], *, warm: int | None = None, settle: Callable[[], object] = lambda: None
) -> list[float]:
    """How long `action` takes, each of `count` times; a few more before are not counted, nor is `settle` after each."""
    for _ in range(count // 10 + 1 if warm is None else warm):
        action()
    seconds = []
    for _ in range(count):
        began = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - began)
        settle()
    return seconds


def issued(settle: Callable[[], object], count: int, action: Callable[[], object]) -> float:
    """Microseconds of processor time that `action` takes of its caller, at best; `settle` empties queues."""
    best = float("inf")
    for _ in range(7):
        settle()
        began = time.thread_time()
        for _ in range(count):
            action()
        best = min(best, (time.thread_time() - began) / count)
    settle()
    return best * 1e6


def rate(seconds: list[float], amount: float) -> float:
    """How much a second, at the median time."""
    return amount / sorted(seconds)[len(seconds) // 2]


def memory(pid: "int | str" = "self") -> dict[str, float]:
    """What a process has in memory, in bytes: `private` to it, and its `share` of all, where shared pages are split."""
    fields = {}
    with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
        for line in file:
            name, _, rest = line.partition(":")
            if rest.rstrip().endswith("kB"):
                fields[name] = int(rest.split()[0]) * 1024
    return {"private": fields["Private_Clean"] + fields["Private_Dirty"], "share": fields["Pss"]}


def work(pid: int) -> tuple[float, int]:
    """Seconds that a process has run, and how often it has begun to wait, all its threads together."""
    seconds, waits = 0.0, 0
    for thread in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{thread}/schedstat", encoding="ascii") as file:
            seconds += int(file.read().split()[0]) / 1e9
        with open(f"/proc/{pid}/task/{thread}/status", encoding="ascii") as file:
            waits += sum(int(line.split()[1]) for line in file if line.startswith("voluntary"))
    return seconds, waits


def leave(status: int = 0) -> None:
    """Ends the program at once: what is measured is over, and some peers end slowly or not at all."""
    sys.stdout.flush()
    os._exit(status)
