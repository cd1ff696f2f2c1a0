"""The cost of many procs on one machine: `python -m benchmarks.procs 64 128 256 512`.

Beside each time on the clock stands the processor time that all processes took for it: ranks, templates, host agent and
controller. On a machine that does other work too, only that can be compared.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import psutil

from benchmarks.machine import load
from benchmarks.measure import figures_of, memory, work

PROGRAM = Path(__file__).with_name("program_procs.py")
SETTLE_S = 15.0  # after a spawn: templates import what procs may need later
REST_S = 10.0
TICKS = os.sysconf("SC_CLK_TCK")
# Of 256 procs on two cores.
TARGETS = {
    "spawn_s": 8.0,
    "idle_percent": 2.0,
    "call_s": 0.15,
    "stop_s": 3.0,
    "gone_s": 3.0,
    "unresponsive": 0,
}  # of 256


@dataclass
class Run:
    """The cost of one number of procs. Seconds of a core are those of all processes together."""

    procs: int
    spawn_s: float = 0.0
    spawn_core_s: float = 0.0
    idle_percent: float = 0.0  # of one core
    idle_wakeups: float = 0.0  # in a second
    call_s: float = 0.0
    call_core_s: float = 0.0
    memory_mb: float = 0.0
    stop_s: float = 0.0
    stop_core_s: float = 0.0
    gone_s: float = 0.0
    unresponsive: float = 0


class Controller:
    """The program, and all processes below it."""

    def __init__(self, procs: int) -> None:
        command = [sys.executable, str(PROGRAM), str(procs)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.answer("ready")

    def answer(self, row: str) -> dict[str, float]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the program has ended"
        return figures_of(line)[row]

    def ask(self, command: str) -> dict[str, float]:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()
        return self.answer(command)

    def all(self) -> list[psutil.Process]:
        controller = psutil.Process(self.process.pid)
        return [controller, *controller.children(recursive=True)]

    def worked(self) -> float:
        """Seconds of a core that all have taken so far, and those of them that have ended."""
        seconds = 0.0
        for process in self.all():
            seconds += work(process.pid)[0]
            with open(f"/proc/{process.pid}/stat", encoding="ascii") as stat:
                seconds += sum(map(int, stat.read().rpartition(")")[2].split()[13:15])) / TICKS
        return seconds


def measure(procs: int) -> Run:
    run = Run(procs)
    controller = Controller(procs)
    try:
        before = controller.worked()
        run.spawn_s = controller.ask("spawn")["seconds"]
        run.spawn_core_s = controller.worked() - before
        time.sleep(SETTLE_S)
        _rest(run, controller.all())
        before = controller.worked()
        run.call_s = controller.ask("call")["seconds"]
        run.call_core_s = (controller.worked() - before) / 21
        run.memory_mb = sum(memory(process.pid)["share"] for process in controller.all()) / 1e6
        before = controller.worked()
        run.stop_s = controller.ask("stop")["seconds"]
        run.stop_core_s = controller.worked() - before
        controller.ask("spawn")
        time.sleep(1.0)
        run.unresponsive = controller.ask("unresponsive")["ranks"]
        run.gone_s = _killed(controller)
    finally:
        controller.process.kill()
        controller.process.wait()
    return run


def _rest(run: Run, processes: list[psutil.Process]) -> None:
    began, before = time.perf_counter(), [work(process.pid) for process in processes]
    time.sleep(REST_S)
    after, seconds = [work(process.pid) for process in processes], time.perf_counter() - began
    run.idle_percent = 100 * sum(end[0] - start[0] for end, start in zip(after, before, strict=True)) / seconds
    run.idle_wakeups = sum(end[1] - start[1] for end, start in zip(after, before, strict=True)) / seconds


def _killed(controller: Controller) -> float:
    """Kills the controller; seconds until nothing of it is left."""
    below = controller.all()[1:]
    began = time.perf_counter()
    controller.process.kill()
    controller.process.wait()
    while any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in below):
        time.sleep(0.05)
    return time.perf_counter() - began


def table(runs: list[Run]) -> str:
    """A row for each thing that was measured, a column for each number of procs."""
    rows = [["", "target of 256", *(f"{run.procs} procs" for run in runs)]]
    for field in fields(Run)[1:]:
        target = TARGETS.get(field.name)
        rows.append([field.name, "" if target is None else f"<= {target:g}",
                     *(f"{getattr(run, field.name):.3g}" for run in runs)])  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.procs", description=__doc__)
    parser.add_argument("procs", type=int, nargs="*", default=[64, 128, 256, 512])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    runs, before = [], load()
    for procs in options.procs:
        runs.append(measure(procs))
        print(runs[-1], file=sys.stderr, flush=True)
    print(table(runs))
    print(f"load before {before:.1f}, after {load():.1f}, on {os.cpu_count()} cores")
    if options.out is not None:
        options.out.write_text(json.dumps([asdict(run) for run in runs], indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
