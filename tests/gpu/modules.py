"""Modules on meshes: fully sharded ones, gathered by layer, and gradients that are summed in buckets."""

import os
import subprocess
import sys

import torch
from torch import nn
from torch.nn import functional

import monarch
from monarch.actor import current_rank, this_host
from monarch.distributed import Mesh
from tests.gpu import DEVICE, NotTried, fact, need_gpu
from tests.gpu.tensors import close, compare, mesh_of

CPU_PYTHON = "MONARCH_NB_CPU_PYTHON"


class Stack(nn.Module):
    """Layers in a list, each of which a fully sharded module gathers by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3)
        )
        self.head = nn.Linear(16, 32, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Scores of the next words."""
        x = self.embedding(words)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)  # type: ignore[no-any-return]


def _collectives(mesh: Mesh) -> str:
    """The collectives of a step."""
    torch.manual_seed(0)
    model = monarch.module_to_mesh(Stack(), mesh, "fully_sharded")
    words = monarch.distribute(torch.randint(0, 32, (8, 12)), mesh, ["data", None])
    mesh.stream.table.clear()
    functional.cross_entropy(model(words).flatten(0, 1), words.flatten()).backward()
    counts: dict[str, int] = {}
    for movement in mesh.stream.table.movements():
        counts[movement.collective] = counts.get(movement.collective, 0) + movement.count
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))


@fact(limit_s=150)
def fully_sharded() -> str:
    """A fully sharded step on two ranks that share the GPU, gathered by layer, is that of local tensors"""
    with mesh_of(2) as mesh:
        text = compare(mesh, "fully_sharded", make=Stack)
        shards = {tuple(shard.shape) for shard in _weights(mesh)}
        assert shards == {(32, 16)}, shards
        return f"{text}; collectives of forward and backward: {_collectives(mesh)}"


def _weights(mesh: Mesh) -> list[torch.Tensor]:
    model = monarch.module_to_mesh(Stack(), mesh, "fully_sharded")
    return list(model.layers[0][1].weight.local_shards().values())


@fact(limit_s=150)
def fully_sharded_by_nccl() -> str:
    """The same on one rank with NCCL"""
    with mesh_of(1) as mesh:
        return compare(mesh, "fully_sharded", make=Stack)


def _pretend_hosts() -> None:
    """Lets NCCL take each rank to be on a host of its own, as it refuses two ranks of one GPU on one host."""
    from monarch_nb.tensor.groups import world

    rank = current_rank().rank
    os.environ.update(NCCL_HOSTID=f"pretended{rank}", NCCL_SOCKET_IFNAME="lo")
    world._backend_of = lambda devices: "cpu:gloo,cuda:nccl"


class Wide(nn.Module):
    """More parameters than a bucket takes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)))  # 4 MB each

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Eight layers."""
        return self.layers(x)  # type: ignore[no-any-return]


@fact(limit_s=150)
def buckets() -> str:
    """Gradients are summed in buckets by NCCL beside the backward pass (two ranks of one GPU, by NCCL_HOSTID)"""
    if DEVICE == "cuda":
        need_gpu()
    procs = this_host().spawn_procs(per_host={"data": 2}, bootstrap=_pretend_hosts if DEVICE == "cuda" else None)
    try:
        mesh = Mesh.of(procs, device=DEVICE)
        torch.manual_seed(0)
        local = Wide()
        rows = torch.randn(8, 1024)
        local(rows).square().mean().backward()
        expected = [parameter.grad for parameter in local.parameters()]
        torch.manual_seed(0)
        model = monarch.module_to_mesh(Wide(), mesh)
        try:
            model(monarch.distribute(rows, mesh, ["data", None])).square().mean().backward()
            gradients = [parameter.grad.full_tensor() for parameter in model.parameters()]
        except Exception as error:
            if DEVICE == "cuda" and "NCCL" in str(error):
                raise NotTried(f"NCCL does not let two ranks have one GPU: {str(error)[:200]}") from error
            raise
        for reference, gradient in zip(expected, gradients, strict=True):
            assert reference is not None
            close(reference, gradient, 1e-3)
        backends = mesh.execute(_backend).values()
        sums = sum(move.count for move in mesh.stream.table.movements() if "reduce" in move.collective)
        return f"{len(gradients)} gradients of 32 MB equal; by {set(backends)}; {sums} sums"
    finally:
        procs.stop().get(20)


def _backend() -> str:
    import torch.distributed as dist

    return str(dist.get_backend_config())


_CONTROLLER = """
import sys, torch, monarch
from monarch.actor import this_host
from monarch.distributed import Mesh
assert not torch.backends.cuda.is_built(), "this is a build for CUDA"
procs = this_host().with_python_executable(sys.argv[1]).spawn_procs(per_host={"data": 2})
mesh = Mesh.of(procs, device=sys.argv[2])
torch.manual_seed(0)
layers = torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 4)
model = monarch.module_to_mesh(torch.nn.Sequential(*layers), mesh)
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
rows = monarch.distribute(torch.ones(8, 16), mesh, ["data", None])
losses = []
for _ in range(3):
    loss = model(rows).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(float(loss))
assert losses[2] < losses[0], losses
x = monarch.distribute(torch.ones(2, 4, 8, 16), mesh, ["data", None, None, None])
attended = torch.nn.functional.scaled_dot_product_attention(x, x, x)
assert float(attended.sum()) == 1024.0
procs.stop().get(20)
print(f"PyTorch {torch.__version__}: losses {losses[0]:.4f} to {losses[2]:.4f}, and attention")
"""


@fact(limit_s=150)
def a_controller_without_cuda() -> str:
    """A controller with a build of PyTorch for CPUs drives ranks that compute on the GPU"""
    if DEVICE == "cuda":
        need_gpu()
    python = os.environ.get(CPU_PYTHON)
    if not python:
        if torch.backends.cuda.is_built():
            raise NotTried(f"{CPU_PYTHON} does not name an interpreter that has PyTorch for CPUs, of the same version")
        python = sys.executable
    done = subprocess.run(
        [python, "-c", _CONTROLLER, sys.executable, DEVICE], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr[-600:]
    return done.stdout.strip().splitlines()[-1]
