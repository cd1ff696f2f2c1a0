"""What diagnosing costs, and how often a slow rank is found: `python -m benchmarks.diagnosis`.

Everything that is always on is compared with the same ranks without it, in turns, by the processor time of the ranks:
on a machine that does other work too, only that can be compared.
"""

import argparse
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.machine import load
from monarch_nb import watch
from monarch_nb.actor import Actor, current_rank, endpoint, this_host
from monarch_nb.diagnosis import StragglerWatch

ROUNDS = 12
STEPS = 40
RANKS = 2  # of the comparison of costs
SLOW_RANKS = 4
PHASES = ("data", "forward", "optimizer")
NAP_S = 0.006  # of each phase of a step
SLOWER = 1.3  # times, that one phase of one rank takes longer
TARGETS = {
    "always on, of a step's processor time": "≤ 0.5 %",
    "always on, memory of a rank": "≤ 3 MB",
    "watch, of a step's processor time": "≤ 1.5×",
    "slow rank, first suspect": "≥ 48 of 50",
    "slow rank, among the first two": "50 of 50",
}


class Trainer(Actor):
    """A small DistributedDataParallel step of about 20 ms."""

    @endpoint
    def join(self, bare: bool) -> None:
        torch.set_num_threads(1)
        if bare:
            from torch.optim import optimizer

            optimizer._global_optimizer_pre_hooks.clear()
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        torch.manual_seed(0)
        layers = [layer for _ in range(8) for layer in (nn.Linear(256, 256), nn.ReLU())]
        self.net = DistributedDataParallel(nn.Sequential(*layers))
        self.optimizer = torch.optim.AdamW(self.net.parameters())

    @endpoint
    def steps(self, number: int) -> tuple[float, int]:
        """Processor seconds of a step, and the bytes of this process's own memory."""
        process = psutil.Process()
        before = time.process_time()
        for _ in range(number):
            self.optimizer.zero_grad()
            self.net(torch.randn(128, 256)).square().mean().backward()
            self.optimizer.step()
        spent = time.process_time() - before
        return spent / number, process.memory_full_info().uss


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
            for each in PHASES:
                self._nap(SLOWER if (rank, each) == (slow, phase) else 1.0)
            dist.all_reduce(torch.ones(8))

    def _nap(self, times: float) -> None:
        time.sleep(NAP_S * times * random.uniform(0.9, 1.1))


def costs() -> Iterator[tuple[str, str]]:
    """What is always on: the recorder of collectives, what answers questions, and the check of gradients."""
    first = this_host().spawn_procs(per_host={"gpus": RANKS}, name="first")  # until the template has PyTorch
    first.spawn("first", Trainer).join.call(False).get(120)
    first.stop().get(60)
    meshes = {}
    for name, env in (("on", {}), ("off", {"TORCH_FR_BUFFER_SIZE": "0"})):
        procs = this_host().spawn_procs(per_host={"gpus": RANKS}, name=name, bootstrap=_environment(env))
        meshes[name] = procs.spawn(name, Trainer)
        meshes[name].join.call(name == "off").get(120)
        meshes[name].steps.call(STEPS).get(120)
    spent: dict[str, list[float]] = {"on": [], "off": [], "watched": []}
    memory = {"on": 0.0, "off": 0.0}
    for round_ in range(ROUNDS):
        for name in ("on", "off") if round_ % 2 else ("off", "on"):
            values = [value for _, value in meshes[name].steps.call(STEPS).get(300).items()]
            spent[name].append(sum(seconds for seconds, _ in values) / RANKS)
            memory[name] = sum(size for _, size in values) / RANKS
    plain = []
    for _ in range(ROUNDS // 2):  # afterwards: what a watch imports stays in memory
        with watch(meshes["on"]):
            values = [value for _, value in meshes["on"].steps.call(STEPS).get(300).items()]
        spent["watched"].append(sum(seconds for seconds, _ in values) / RANKS)
        values = [value for _, value in meshes["on"].steps.call(STEPS).get(300).items()]
        plain.append(sum(seconds for seconds, _ in values) / RANKS)
    ratios = [on / off for on, off in zip(spent["on"], spent["off"], strict=True)]
    watched = [each / on for each, on in zip(spent["watched"], plain, strict=True)]
    step = 1000 * median(spent["off"])
    yield "always on, of a step's processor time", f"{100 * (median(ratios) - 1):+.2f} % of {step:.1f} ms"
    yield "always on, memory of a rank", f"{(memory['on'] - memory['off']) / 1e6:+.1f} MB"
    yield "watch, of a step's processor time", f"{median(watched):.2f}×"


def _environment(values: dict[str, str]) -> Any:
    def set_them() -> None:
        import os

        os.environ.update(values)

    return set_them


def slow_ranks(times: int, seconds: float) -> Iterator[tuple[str, str]]:
    """A rank that takes 1.3 times as long in one phase."""
    draw = random.Random(1)
    procs = this_host().spawn_procs(per_host={"gpus": SLOW_RANKS}, name="steppers")
    steppers = procs.spawn("steppers", Stepper)
    steppers.join.call().get(120)
    first = among = 0
    for _ in range(times):
        slow, phase = draw.randrange(SLOW_RANKS), draw.choice(PHASES)
        with StragglerWatch(steppers) as found:
            steppers.steps.call(slow, phase, int(seconds / (NAP_S * len(PHASES)))).get(120)
        suspects = [rank for finding in found.diagnosis.findings for rank in finding.ranks]
        first += suspects[:1] == [slow]
        among += slow in suspects[:2]
    yield "slow rank, first suspect", f"{first} of {times}"
    yield "slow rank, among the first two", f"{among} of {times}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=50, help="slow ranks to be found; 0: none")
    parser.add_argument("--seconds", type=float, default=4.0, help="of steps in which each is to be found")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    print(f"load before: {load()}")
    rows = dict([*costs(), *(slow_ranks(options.times, options.seconds) if options.times else ())])
    print("| figure | measured | target |\n|---|---|---|")
    for name, value in rows.items():
        print(f"| {name} | {value} | {TARGETS[name]} |")
    print(f"load after: {load()}")
    if options.out is not None:
        options.out.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
