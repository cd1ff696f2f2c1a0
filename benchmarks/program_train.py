"""A step of training by one of several means: one process, PyTorch's DDP or FSDP2 under torchrun, a mesh of ours.

Arguments: the means, the name of the model, how many steps, how many ranks. Prints milliseconds of a step.
"""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.measure import leave, repeat, times, work
from benchmarks.train_models import module_and_batch, step_of

WARM = 4
# Of each layer of Transformers' llama, in the names of PyTorch's styles and of ours.
COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROWS = ("self_attn.o_proj", "mlp.down_proj")
torch.set_num_threads(1)


def measured(means: str, name: str, steps: int, step: Callable[[], float], pids: tuple[int, ...]) -> None:
    """Prints the spread of the steps, and the processor time of each, of these processes and this one."""
    began = time.monotonic()
    for _ in range(WARM):
        step()
    warm = time.monotonic() - began
    before = [work(pid)[0] for pid in (os.getpid(), *pids)]
    spent = repeat(steps, step, warm=0)
    used = [(work(pid)[0] - start) / steps * 1e3 for pid, start in zip((os.getpid(), *pids), before, strict=True)]
    times(f"{name} {means}", spent)
    processor = ", ".join(f"{ms:.1f}" for ms in used)
    print(f"{name} {means}: processor {processor} ms; {WARM} steps before took {warm:.1f} s", file=sys.stderr)


def plain(means: str, name: str, steps: int) -> None:
    """One process, or one rank of several under torchrun."""
    model, module, batch = module_and_batch(name)
    kind = means.partition("+")[0]
    if kind in ("ddp", "fsdp", "tp"):
        import torch.distributed as dist

        dist.init_process_group("gloo")
        rank, ranks = dist.get_rank(), dist.get_world_size()
        if kind == "tp":
            cut_by_pytorch(module, ranks)
        else:
            batch = (batch[0].chunk(ranks)[rank], batch[1].chunk(ranks)[rank])
        if kind == "ddp":
            module = torch.nn.parallel.DistributedDataParallel(module)
        elif kind == "fsdp":
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh("cpu", (ranks,))
            for submodule in module.modules():
                if type(submodule).__name__.endswith(("Layer", "Conv2d")) and any(True for _ in submodule.parameters()):
                    fully_shard(submodule, mesh=mesh)
            fully_shard(module, mesh=mesh)
        if rank:
            sys.stderr = sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    step = step_of(model, module, batch)
    if means.endswith("+compile"):
        step = step_of(model, torch.compile(module), batch)  # type: ignore[arg-type]
    measured(means, name, steps, lambda: step().item(), ())


def cut_by_pytorch(module: torch.nn.Module, ranks: int) -> None:
    """Cuts the layers of a llama over the ranks of torchrun."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    layers = [name for name, submodule in module.named_modules() if type(submodule).__name__ == "LlamaDecoderLayer"]
    plan: dict[str, Any] = {f"{layer}.{part}": ColwiseParallel() for layer in layers for part in COLUMNS}
    plan |= {f"{layer}.{part}": RowwiseParallel() for layer in layers for part in ROWS}
    parallelize_module(module, init_device_mesh("cpu", (ranks,)), plan)


def sharded(means: str, name: str, steps: int, ranks: int) -> None:
    import monarch_nb
    from monarch_nb.distributed import Mesh, Plan

    model, module, batch = module_and_batch(name)
    kind, _, how = means.partition("+")
    dim = "tensor" if kind == "sharded-tp" else "data"
    mesh = Mesh(shape=(ranks,), mesh_dim_names=(dim,))
    plan = Plan(data=("data",), fully_sharded=kind == "sharded-fully")
    if dim == "tensor":
        styles = {f"*.{part}": "column" for part in COLUMNS} | {f"*.{part}": "row" for part in ROWS}
        plan = Plan(styles, data=(), tensor=dim)
    module = monarch_nb.module_to_mesh(module, mesh, plan)
    cut = "data" if dim == "data" else None
    placed: Any = tuple(monarch_nb.distribute(tensor, mesh, [cut, *[None] * (tensor.dim() - 1)]) for tensor in batch)
    step: Any = step_of(model, module, placed)
    if how:
        step = monarch_nb.compile(step, backend="inductor" if how == "inductor" else "python", check_every=0)
    pids = tuple(mesh.procs.run(os.getpid).get().values())
    measured(means, name, steps, lambda: step().item(), pids)
    leave()


def main() -> None:
    means, name, steps, ranks = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    if means.startswith("sharded"):
        sharded(means, name, steps, ranks)
    else:
        plain(means, name, steps)


if __name__ == "__main__":
    main()
