"""A GPT's steps on the GPU: as one program on a mesh, and as every rank's own program under torchrun.

As a program of its own (`python -m torch.distributed.run --nproc-per-node=1 tests/gpu/training.py JSON`) this is the
side of torchrun.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import nn
from torch.nn import functional

from tests.gpu import DEVICE, fact, need_gpu

WORDS, LENGTH = 8192, 1024
# Layers, width, heads, batch. Steps of "narrow" take the device less time than a process takes to launch them.
SIZES = {"small": (2, 64, 2, 1), "narrow": (6, 256, 4, 1), "gpt": (6, 1024, 16, 32)}
SIZE = "gpt" if DEVICE == "cuda" else "small"
STEPS, WARM = (20, 5) if DEVICE == "cuda" else (3, 2)
_ANSWER = "tokens/s: "


class Block(nn.Module):
    """Attention and a layer between."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One layer."""
        n = self.before(x)
        q, k, v = (layer(n).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.between(x))))


class GPT(nn.Module):
    """A language model."""

    def __init__(self, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Scores of the next words."""
        x = self.words(words) + self.positions(torch.arange(words.shape[1], device=words.device))
        return self.head(self.norm(self.blocks(x)))  # type: ignore[no-any-return]


def make(size: str) -> tuple[GPT, torch.Tensor]:
    """The model in bfloat16 on the CPU, and a batch of words."""
    layers, width, heads, batch = SIZES[size]
    torch.manual_seed(0)
    model = GPT(layers, width, heads).to(torch.bfloat16)
    return model, torch.randint(0, WORDS, (batch, LENGTH + 1))


def stepper(model: nn.Module, rows: torch.Tensor) -> Callable[[], torch.Tensor]:
    """One step of training; gives the loss."""
    optimizer = torch.optim.AdamW(model.parameters(), 3e-4, fused=True)
    inputs, targets = rows[:, :-1], rows[:, 1:].flatten()

    def step() -> torch.Tensor:
        loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def rate(
    step: Callable[[], torch.Tensor], done: Callable[[], object], size: str, rounds: int = 3
) -> tuple[float, float]:
    """Tokens a second, the median of some rounds, and the last loss."""
    loss = None
    for _ in range(WARM):
        loss = step()
    done()
    rates = []
    for _ in range(rounds):
        began = time.perf_counter()
        for _ in range(STEPS):
            loss = step()
        done()
        rates.append(STEPS * SIZES[size][3] * LENGTH / (time.perf_counter() - began))
    assert loss is not None
    final = loss.full_tensor() if hasattr(loss, "full_tensor") else loss
    return sorted(rates)[rounds // 2], float(final)


def under_torchrun(size: str, *, compiled: bool) -> tuple[float, float]:
    """The same as a program of torchrun's, with DDP."""
    command = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", __file__)
    done = subprocess.run(
        [*command, json.dumps({"size": size, "compiled": compiled})],
        capture_output=True, text=True, check=False, timeout=150,
    )  # fmt: skip
    answers = [line for line in done.stdout.splitlines() if line.startswith(_ANSWER)]
    assert answers, done.stderr[-800:]
    tokens, loss = json.loads(answers[-1].removeprefix(_ANSWER))
    return tokens, loss


def _on_mesh(size: str, *, compiled: str) -> tuple[float, float]:
    import monarch
    from monarch.distributed import Mesh

    mesh = Mesh(shape=(1,), mesh_dim_names=("data",), device=DEVICE, name="trainers")
    model, rows = make(size)
    model = monarch.module_to_mesh(model, mesh)
    step = stepper(model, monarch.distribute(rows, mesh, ["data", None]))
    run = step if not compiled else monarch.compile(step, backend=compiled, check_every=0)
    try:
        return rate(run, mesh.synchronise, size)
    finally:
        mesh.stop().get(20)


def _compare(name: str, result: tuple[float, float], baseline: tuple[float, float], failed: list[str]) -> str:
    text = f"{name} {result[0]:,.0f} tokens/s, torchrun {baseline[0]:,.0f}: {result[0] / baseline[0]:.3f}"
    if abs(result[1] - baseline[1]) > 0.1:
        failed.append(f"{name}: loss {result[1]:.3f}, torchrun {baseline[1]:.3f}")
    if DEVICE == "cuda" and result[0] < 0.98 * baseline[0]:
        failed.append(text)
    return text


@fact(limit_s=200, alone=True)
def steps() -> str:
    """A GPT's steps on a mesh of one rank make 0.98 of torchrun's tokens/s, as written and replayed as one message"""
    if DEVICE == "cuda":
        need_gpu()
    baseline, failed = under_torchrun(SIZE, compiled=False), list[str]()
    texts = [
        _compare("as written", _on_mesh(SIZE, compiled=""), baseline, failed),
        _compare("replayed", _on_mesh(SIZE, compiled="python"), baseline, failed),
    ]
    assert not failed, "; ".join(texts + failed)
    return "; ".join(texts)


@fact(limit_s=200, alone=True)
def narrow_steps() -> str:
    """Steps that a process launches slower than a GPU computes them pass torchrun's as a CUDA graph"""
    need_gpu()
    baseline, failed = under_torchrun("narrow", compiled=False), list[str]()
    texts = [
        _compare(name, _on_mesh("narrow", compiled=backend), baseline, failed if backend == "cudagraphs" else [])
        for name, backend in (("replayed", "python"), ("CUDA graph", "cudagraphs"))
    ]
    assert not failed, "; ".join(texts + failed)
    return "; ".join(texts)


@fact(limit_s=200, alone=True)
def compiled() -> str:
    """The same step by inductor makes 0.98 of what torch.compile makes under torchrun"""
    if DEVICE == "cuda":
        need_gpu()
    baseline, failed = under_torchrun(SIZE, compiled=True), list[str]()
    text = _compare("inductor", _on_mesh(SIZE, compiled="inductor"), baseline, failed)
    assert not failed, "; ".join([text, *failed])
    return text


def _main(options: dict[str, Any]) -> None:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    model, rows = make(options["size"])
    if DEVICE == "cuda":
        torch.cuda.set_device(0)
        model, rows = model.cuda(), rows.cuda()
    parallel: nn.Module = DistributedDataParallel(model)
    if options["compiled"]:
        parallel.compile()
    done = torch.cuda.synchronize if DEVICE == "cuda" else lambda: None
    print(_ANSWER + json.dumps(rate(stepper(parallel, rows), done, options["size"])), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
