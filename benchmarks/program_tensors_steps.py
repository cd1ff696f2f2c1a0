"""Steps of training on two processes: as they are written, compiled, and as every rank's own program under torchrun."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import monarch
from benchmarks.measure import FIGURE, Plan, figure, issued, leave, plan_of, repeat, times
from benchmarks.tensor_model import ROWS_OF_BATCH, SMALL, stepper
from monarch.distributed import Mesh

Step = Callable[[], torch.Tensor]


def median(seconds: list[float]) -> float:
    return sorted(seconds)[len(seconds) // 2]


def torchrun(steps: int, *, compiled: bool = False) -> float | None:
    """Milliseconds of the median step as two ranks' own programs."""
    command = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone")
    program = str(Path(__file__).with_name("program_tensors_spmd.py"))
    options = json.dumps({"steps": steps, "compiled": compiled})
    done = subprocess.run([*command, program, options], capture_output=True, text=True, timeout=400, check=False)
    for line in done.stdout.splitlines():
        if line.startswith(FIGURE):
            print(line, flush=True)
            return float(json.loads(line[len(FIGURE) :])["p50"])
    sys.stderr.write(done.stderr[-2000:])
    return None


def as_written(mesh: Any, count: int) -> None:
    theirs = torchrun(count)
    step = stepper(lambda tensor, placements: monarch.distribute(tensor, mesh, placements))
    spent = repeat(count, lambda: step().item(), warm=3)
    times("tensors: step", spent)
    if theirs is not None:
        figure("tensors: step, of torchrun's", ratio=median(spent) * 1000 / theirs)


def in_turns(count: int, first: Step, second: Step) -> tuple[float, float]:
    """The median seconds of both steps."""
    spent: tuple[list[float], list[float]] = ([], [])
    for _ in range(3):
        for step, times_of in zip((first, second), spent, strict=True):
            times_of += repeat(count, lambda step=step: step().item(), warm=1)
    return median(spent[0]), median(spent[1])


def compiled(mesh: Any, count: int) -> None:
    """Steps as one message, in turn with the same steps as they are written."""

    def tensor_parallel() -> Step:
        return stepper(lambda tensor, placements: monarch.distribute(tensor, mesh, placements))

    def data_parallel() -> Step:
        place = lambda tensor, placements: monarch.distribute(tensor, mesh, placements)  # noqa: E731
        return stepper(place, SMALL, **ROWS_OF_BATCH)

    for name, make in (("large", tensor_parallel), ("small", data_parallel)):
        step = make()
        run = monarch.compile(step, check_every=0)
        for _ in range(4):
            run()
        # more would wait for the workers
        figure(f"tensors: compiled step, {name}, controller", ms=issued(mesh.synchronise, 5, run) / 1e3)
        eager, spent = in_turns(count, step, run)
        figure(f"tensors: compiled step, {name}, of the step", ratio=spent / eager)
    step = data_parallel()
    run = monarch.compile(step, backend="inductor", check_every=0)
    began = time.monotonic()
    for _ in range(4):
        run()
    mesh.synchronise()
    figure("tensors: inductor, made", s=time.monotonic() - began)
    eager, spent = in_turns(count, step, run)
    figure("tensors: inductor, of the step", ratio=spent / eager)
    theirs = torchrun(count, compiled=True)
    if theirs is not None:
        figure("tensors: inductor, of torchrun's", ratio=spent * 1000 / theirs)


def main() -> None:
    plan: Plan = plan_of(sys.argv)
    count = max(3, plan.calls // 60)
    mesh = Mesh(shape=(2,), mesh_dim_names=("rank",))
    as_written(mesh, count)
    compiled(mesh, count)
    mesh.stop().get(20)
    leave()


if __name__ == "__main__":
    main()
