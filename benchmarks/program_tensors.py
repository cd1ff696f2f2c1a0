"""Sharded tensors: the cost of an operation to the controller, watched and not, and losses against one process."""

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch.distributed.tensor import Replicate, Shard

import monarch
from benchmarks.measure import Plan, figure, issued, leave, memory, plan_of, repeat, times
from benchmarks.tensor_model import SMALL, TENSOR_PARALLEL, stepper
from monarch.distributed import Mesh
from monarch_nb.runtime import current_runtime

GIGABYTE = 1 << 30


def operations(mesh: Any, plan: Plan) -> None:
    t = monarch.distribute(torch.randn(64, 64), mesh, ["rank", None])
    p = t.detach().clone().requires_grad_()
    figure("tensors: add", us=issued(mesh.synchronise, plan.calls, lambda: t + t))
    figure("tensors: add in place", us=issued(mesh.synchronise, plan.calls, lambda: t.add_(1.0)))
    figure("tensors: add with gradient", us=issued(mesh.synchronise, plan.calls, lambda: p + t))
    total = t.sum().redistribute(None)
    spent = repeat(plan.calls // 10 + 1, total.item)
    times("tensors: item", spent)
    worker = mesh.procs.slice(rank=0)
    bare = repeat(plan.calls // 10 + 1, lambda: worker.run(int).get())
    figure("tensors: item, of a call", ratio=sorted(spent)[len(spent) // 2] / sorted(bare)[len(bare) // 2])


def large(mesh: Any) -> None:
    before = memory()["private"]
    tensor = mesh.zeros(GIGABYTE // 4, sharding_spec=["rank"])
    mesh.synchronise()
    figure("tensors: 1 GB, memory here", mb=max(0.0, memory()["private"] - before) / (1 << 20))
    del tensor
    mesh.synchronise()


def watched(mesh: Any) -> None:
    """The same operation while a face shows the mesh's tensors, in turn with nobody looking."""
    from monarch_kernel.tensors import TensorReporter

    t = mesh.zeros(64, 64, sharding_spec=["rank", None])
    tensors = [t + float(number) for number in range(200)]  # that a face has to show
    reporter, spent = TensorReporter(), {False: float("inf"), True: float("inf")}
    for _ in range(5):
        for observed in spent:
            unwatch = reporter.watch(current_runtime(), str) if observed else None
            mesh.synchronise()
            began, count = time.perf_counter(), 0
            while time.perf_counter() - began < 1.0:  # some summaries long
                for _ in range(100):
                    t.add_(1.0)
                count += 100
            spent[observed] = min(spent[observed], (time.perf_counter() - began) / count)
            if unwatch is not None:
                unwatch()
    figure("tensors: with a face", ratio=spent[True] / spent[False])
    del tensors


def losses() -> None:
    """How far 20 losses of training in four layouts are from those of one process."""
    line = Mesh(shape=(4,), mesh_dim_names=("rank",))
    square = Mesh(shape=(2, 2), mesh_dim_names=("data", "model"))
    both = {name: (Replicate(), *cut) for name, cut in TENSOR_PARALLEL.items()}
    rows, rest = (Shard(0),), (Replicate(),)
    layouts: dict[str, tuple[Mesh, dict[str, Any]]] = {
        "data": (line, {"weights": {}, "batch": rows}),
        "tensor": (line, {}),
        "fully sharded": (line, {"weights": {"": rows}, "batch": rows}),
        "data and tensor": (square, {"weights": both, "batch": (*rows, *rest), "rest": (*rest, *rest)}),
    }
    step = stepper(lambda tensor, _: tensor.clone(), SMALL)
    local = [step().item() for _ in range(20)]
    farthest = 0.0
    for mesh, layout in layouts.values():
        step = stepper(lambda tensor, cut, mesh=mesh: monarch.distribute(tensor, mesh, cut), SMALL, **layout)
        sharded = [step().item() for _ in range(20)]
        farthest = max(farthest, *(abs(x - y) / y for x, y in zip(sharded, local, strict=True)))
    figure("tensors: losses", apart=farthest)
    for mesh in (line, square):
        mesh.stop().get(20)


def main() -> None:
    plan = plan_of(sys.argv)
    mesh = Mesh(shape=(2,), mesh_dim_names=("rank",))
    operations(mesh, plan)
    large(mesh)
    watched(mesh)
    mesh.stop().get(20)
    losses()
    leave()


if __name__ == "__main__":
    main()
