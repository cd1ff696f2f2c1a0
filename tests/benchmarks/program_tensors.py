"""Sharded tensors on two processes: what an operation costs the controller, and a step against torchrun."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

import monarch
from monarch.distributed import Mesh
from tests.benchmarks.measure import FIGURE, Plan, figure, leave, memory, plan_of, repeat, times
from tests.benchmarks.tensor_model import stepper

GIGABYTE = 1 << 30


def issued(mesh: Any, count: int, what: Callable[[], object]) -> float:
    """Microseconds of processor time that an operation takes of the thread that issues it, at best."""
    best = float("inf")
    for _ in range(7):
        mesh.synchronise()
        began = time.thread_time()
        for _ in range(count):
            what()
        best = min(best, (time.thread_time() - began) / count)
    mesh.synchronise()
    return best * 1e6


def operations(mesh: Any, plan: Plan) -> None:
    t = monarch.distribute(torch.randn(64, 64), mesh, ["rank", None])
    p = t.detach().clone().requires_grad_()
    figure("tensors: add", us=issued(mesh, plan.calls, lambda: t + t))
    figure("tensors: add in place", us=issued(mesh, plan.calls, lambda: t.add_(1.0)))
    figure("tensors: add with gradient", us=issued(mesh, plan.calls, lambda: p + t))
    total = t.sum().redistribute(None)
    spent = repeat(plan.calls // 10 + 1, total.item)
    times("tensors: item", spent)
    worker = mesh.procs.slice(rank=0)
    bare = repeat(plan.calls // 10 + 1, lambda: worker.run(int).get())
    figure("tensors: item, of a call", ratio=sorted(spent)[len(spent) // 2] / sorted(bare)[len(bare) // 2])


def large(mesh: Any) -> None:
    before = memory()["private"]
    held = mesh.zeros(GIGABYTE // 4, sharding_spec=["rank"])
    mesh.synchronise()
    figure("tensors: 1 GB, memory here", mb=max(0.0, memory()["private"] - before) / (1 << 20))
    del held
    mesh.synchronise()


def steps(mesh: Any, plan: Plan) -> None:
    count = max(3, plan.calls // 60)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone")
    program = str(Path(__file__).with_name("program_tensors_spmd.py"))
    asked = json.dumps({"steps": count})
    theirs = subprocess.run([*torchrun, program, asked], capture_output=True, text=True, timeout=300, check=False)
    for line in theirs.stdout.splitlines():
        if line.startswith(FIGURE):
            print(line, flush=True)
    step = stepper(lambda tensor, placements: monarch.distribute(tensor, mesh, placements))
    spent = repeat(count, lambda: step().item(), warm=3)
    times("tensors: step", spent)
    found = [json.loads(line[len(FIGURE) :]) for line in theirs.stdout.splitlines() if line.startswith(FIGURE)]
    if found:
        ours = sorted(spent)[len(spent) // 2] * 1000
        figure("tensors: step, of torchrun's", ratio=ours / found[0]["p50"])
    else:
        sys.stderr.write(theirs.stderr[-2000:])


def compiled(mesh: Any, plan: Plan) -> None:
    """The same step as one message, in turn with the step as it is written."""
    count = max(3, plan.calls // 60)
    step = stepper(lambda tensor, placements: monarch.distribute(tensor, mesh, placements))
    run = monarch.compile(step, check_every=0)
    for _ in range(4):
        run()
    figure("tensors: compiled step, controller", ms=issued(mesh, 5, run) / 1e3)  # more would wait for the workers
    eager: list[float] = []
    spent: list[float] = []
    for _ in range(3):
        eager += repeat(count, lambda: step().item(), warm=1)
        spent += repeat(count, lambda: run().item(), warm=1)
    figure("tensors: compiled step, of the step", ratio=sorted(spent)[len(spent) // 2] / sorted(eager)[len(eager) // 2])


def main() -> None:
    plan = plan_of(sys.argv)
    mesh = Mesh(shape=(2,), mesh_dim_names=("rank",))
    operations(mesh, plan)
    large(mesh)
    steps(mesh, plan)
    compiled(mesh, plan)
    mesh.stop().get(20)
    leave()


if __name__ == "__main__":
    main()
