"""The cost of diagnosing, and how often a slow rank is found: `python -m benchmarks.diagnosis`.

What is always on is timed by itself; a watch is compared with the same ranks without it, in turns, by their processor
time: on a machine that does other work too, only that can be compared.
"""

import argparse
import gc
import json
import os
import platform
import random
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import mean, median
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer

from benchmarks.machine import load, processor
from benchmarks.scale import measure_diagnosis
from monarch_nb import diagnose, watch
from monarch_nb.actor import Actor, current_rank, endpoint, this_host
from monarch_nb.diagnosis import StragglerWatch
from monarch_nb.diagnosis.gradients import FIRST

ROUNDS = 8
STEPS = 40
COLLECTIVES = 2000
BUCKETS = 2  # into which DistributedDataParallel puts the gradients of a step
MOST_FIRST = 10  # processes
FEW = 50  # modules
RANKS = 2  # of the comparison of costs, which are those of one rank: more only compete for the processors
HANGING = 8
SIMULATED = 125  # hosts, of eight ranks each
SLOW_RANKS = 4
PHASES = ("data", "forward", "optimizer")
HANG_S, WAIT_S = 20.0, 10.0  # a rank is late by so many seconds, and others wait for so many before it is asked why
NAP_S = 0.006  # of each phase of a step
SLOWER = 1.3  # times, that one phase of one rank takes longer
TARGETS = {
    "hang to verdict, 8 ranks, after the wait": "≤ 2 s",
    "hang to verdict, 1,000 simulated ranks, after the wait": "≤ 3 s",
    "always on, of a step's processor time": "≤ 0.5 %",
    "always on, memory of a rank": "≤ 3 MB",
    "watch, of a step's processor time": "≤ 1.5×",
    "slow rank, first suspect": "≥ 48 of 50",
    "slow rank, among the first two": "50 of 50",
}


COSTS = """
## What it costs

`python -m benchmarks.diagnosis --page docs/diagnosis.md` measures it, on {date}: {machine}. The step is one of
DistributedDataParallel with a small model on two ranks; a slow rank is one of four that takes 1.3 times as long in
one of three phases of 6 ms, for four seconds.

| figure | measured | target |
|---|---|---|
{table}"""


class Trainer(Actor):
    """A small DistributedDataParallel step of about 20 ms."""

    @endpoint
    def join(self) -> None:
        torch.set_num_threads(1)
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        torch.manual_seed(0)
        layers = [layer for _ in range(8) for layer in (nn.Linear(256, 256), nn.ReLU())]
        self.net = DistributedDataParallel(nn.Sequential(*layers))
        self.optimizer = torch.optim.AdamW(self.net.parameters())

    @endpoint
    def steps(self, number: int) -> float:
        """Processor seconds of a step."""
        before = time.process_time()
        self._train(number)
        return (time.process_time() - before) / number

    @endpoint
    def check(self, number: int) -> float:
        """Processor seconds of a step in the hooks that run before all optimizers' steps."""
        hooks = optimizer._global_optimizer_pre_hooks
        spent = 0.0

        def timed(hook: Callable[..., None]) -> Callable[..., None]:
            def run(*args: object) -> None:
                nonlocal spent
                before = time.thread_time()
                hook(*args)
                spent += time.thread_time() - before

            return run

        before = dict(hooks)
        hooks.update({key: timed(hook) for key, hook in before.items()})
        self._train(number)
        hooks.update(before)
        return spent / number

    @endpoint
    def collectives(self, number: int) -> float:
        """Processor seconds of an all_reduce of one number."""
        before = time.process_time()
        for _ in range(number):
            dist.all_reduce(torch.ones(1))
        return (time.process_time() - before) / number

    @endpoint
    def memory(self) -> int:
        """Bytes of this process's own."""
        gc.collect()
        return int(psutil.Process().memory_full_info().uss)

    @endpoint
    def imported(self) -> int:
        """Modules that this process has imported itself."""
        return len(sys.modules) - int(os.environ["MODULES"])

    def _train(self, number: int) -> None:
        for _ in range(number):
            self.optimizer.zero_grad()
            self.net(torch.randn(128, 256)).square().mean().backward()
            self.optimizer.step()


class Stepper(Actor):
    """Steps of three phases, of which one takes longer on one rank."""

    @endpoint
    def join(self) -> None:
        torch.set_num_threads(1)
        if not dist.is_initialized():
            dist.init_process_group("gloo")

    @endpoint
    def steps(self, slow: int, phase: str, number: int) -> None:
        rank = current_rank().rank
        for _ in range(number):
            for current in PHASES:
                self._nap(SLOWER if (rank, current) == (slow, phase) else 1.0)
            dist.all_reduce(torch.ones(8))

    @endpoint
    def hang(self, rank: int, seconds: float) -> None:
        if current_rank().rank == rank:
            time.sleep(seconds)
        dist.all_reduce(torch.ones(8))

    def _nap(self, times: float) -> None:
        time.sleep(NAP_S * times * random.uniform(0.9, 1.1))


def costs() -> Iterator[tuple[str, str]]:
    """The parts that are always on: the check of gradients, and the recorder of collectives.

    Both are timed by themselves: steps of two sets of processes differ by more than their cost.
    """
    for _ in range(MOST_FIRST):  # until the template has all modules: before, processes load them themselves
        procs = this_host().spawn_procs(per_host={"gpus": 1}, name="first", bootstrap=_environment({}))
        first = procs.spawn("first", Trainer)
        first.join.call().get(120)
        first.steps.call(3).get(120)
        imported = first.imported.call_one().get(120)
        procs.stop().get(60)
        if imported < FEW:
            break
    meshes: dict[str, Any] = {}
    for name, environment in (("on", {}), ("off", {"TORCH_FR_BUFFER_SIZE": "0"})):
        procs = this_host().spawn_procs(per_host={"gpus": RANKS}, name=name, bootstrap=_environment(environment))
        meshes[name] = procs.spawn(name, Trainer)
        meshes[name].join.call().get(120)
        _mean(meshes[name].steps, FIRST)
    collective: dict[str, list[float]] = {"on": [], "off": []}
    memory = {name: _mean(mesh.memory) for name, mesh in meshes.items()}
    for round_ in range(ROUNDS):
        for name in ("on", "off") if round_ % 2 else ("off", "on"):
            collective[name].append(_mean(meshes[name].collectives, COLLECTIVES))
    recorder = max(0.0, median(collective["on"]) - median(collective["off"]))
    check = median(_mean(meshes["on"].check, STEPS) for _ in range(ROUNDS))
    plain, watched = [], []
    for _ in range(ROUNDS):  # afterwards: what a watch imports stays in memory
        with watch(meshes["on"]):
            watched.append(_mean(meshes["on"].steps, STEPS))
        plain.append(_mean(meshes["on"].steps, STEPS))
    step = median(plain)
    yield (
        "always on, of a step's processor time",
        f"{100 * (check + BUCKETS * recorder) / step:.2f} % of {1000 * step:.1f} ms: check of gradients "
        f"{1e6 * check:.0f} µs, recorder {1e6 * recorder:.1f} µs a collective",
    )
    yield "always on, memory of a rank", f"{(memory['on'] - memory['off']) / 1e6:+.1f} MB"
    ratios = [after / before for after, before in zip(watched, plain, strict=True)]
    yield "watch, of a step's processor time", f"{median(ratios):.2f}×"


def _mean(method: Any, *args: object) -> float:
    return mean(value for _, value in method.call(*args).get(300).items())


def _environment(values: dict[str, str]) -> Any:
    def set_them() -> None:
        import os
        import sys

        os.environ.update(values, MODULES=str(len(sys.modules)))

    return set_them


def hangs() -> Iterator[tuple[str, str]]:
    """A rank that does not enter a collective in which the others wait."""
    procs = this_host().spawn_procs(per_host={"gpus": HANGING}, name="hanging")
    steppers = procs.spawn("hanging", Stepper)
    steppers.join.call().get(120)
    call = steppers.hang.call(HANGING - 1, HANG_S)
    time.sleep(WAIT_S)
    before = time.perf_counter()
    (finding,) = diagnose(steppers).findings
    took = time.perf_counter() - before
    assert (finding.kind, finding.ranks) == ("missing_from_collective", (HANGING - 1,)), finding
    call.get(120)
    procs.stop().get(60)
    yield "hang to verdict, 8 ranks, after the wait", f"{took:.1f} s"


def simulated_hang() -> Iterator[tuple[str, str]]:
    """The same with virtual hosts, in a process that is not part of a cluster yet."""
    cost = measure_diagnosis(SIMULATED)
    text = f"{cost.modelled_s:.1f} s on the simulated network, {1000 * cost.core_s:.0f} ms of a core"
    yield "hang to verdict, 1,000 simulated ranks, after the wait", text


def slow_ranks(times: int, seconds: float) -> Iterator[tuple[str, str]]:
    """A rank that takes 1.3 times as long in one phase."""
    draw = random.Random(1)
    procs = this_host().spawn_procs(per_host={"gpus": SLOW_RANKS}, name="steppers")
    steppers = procs.spawn("steppers", Stepper)
    steppers.join.call().get(120)
    first = among = 0
    for _ in range(times):
        slow, phase = draw.randrange(SLOW_RANKS), draw.choice(PHASES)
        with StragglerWatch(steppers) as watcher:
            steppers.steps.call(slow, phase, int(seconds / (NAP_S * len(PHASES)))).get(120)
        suspects = [rank for finding in watcher.diagnosis.findings for rank in finding.ranks]
        first += suspects[:1] == [slow]
        among += slow in suspects[:2]
    yield "slow rank, first suspect", f"{first} of {times}"
    yield "slow rank, among the first two", f"{among} of {times}"


def write_costs(page: Path, rows: Mapping[str, str]) -> None:
    """Replaces the section of the page on what diagnosing costs."""
    before = re.sub(r"\n## What it costs\n.*?(?=\n## )", "", page.read_text(), flags=re.DOTALL)
    table = "".join(f"| {name} | {value} | {TARGETS[name]} |\n" for name, value in rows.items())
    machine = f"{os.cpu_count()} cores, {processor()}, Python {platform.python_version()}, PyTorch {torch.__version__}"
    text = COSTS.format(date=time.strftime("%-d %B %Y"), machine=machine.partition("+")[0], table=table)
    page.write_text(before.replace("\n## Cases\n", f"{text}\n## Cases\n"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=50, help="slow ranks to be found; 0: none")
    parser.add_argument("--seconds", type=float, default=4.0, help="of steps in which each is to be found")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--page", type=Path, default=None, help="docs/diagnosis.md, in which the table is replaced")
    options = parser.parse_args()
    print(f"load before: {load()}")
    slow = slow_ranks(options.times, options.seconds) if options.times else ()
    rows = dict([*simulated_hang(), *hangs(), *costs(), *slow])
    print("| figure | measured | target |\n|---|---|---|")
    for name, value in rows.items():
        print(f"| {name} | {value} | {TARGETS[name]} |")
    print(f"load after: {load()}")
    if options.page is not None:
        write_costs(options.page, rows)
    if options.out is not None:
        options.out.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
