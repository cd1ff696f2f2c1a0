"""Tensors of which each rank has a value of its own, on the API that ours and torchmonarch share."""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import nn

import monarch
from benchmarks.measure import figure, issued, leave, memory, plan_of, repeat, times
from monarch.actor import Actor, endpoint, this_host

ADDS = 50  # of a compiled step
PROCS = (1, 4)


class Ready(Actor):
    @endpoint
    def pid(self) -> int:
        return os.getpid()


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is sent as one message."""
    if hasattr(monarch, "compile"):
        result: Callable[..., Any] = monarch.compile(function)
        return result
    from monarch.common._coalescing import compile as theirs

    return theirs(function, verify=False)


def measure(size: int, calls: int) -> None:
    """All figures of this many processes."""

    def row(name: str) -> str:
        return f"ranks: {name}, {size}"

    procs = this_host().spawn_procs({"gpus": size})
    pids = [pid for _, pid in procs.spawn("ready", Ready).pid.call().get()]
    began = time.perf_counter()
    with procs.activate():
        x = torch.rand(100, 100)
        scalar = torch.rand(())
    monarch.fetch_shard(scalar).result()
    figure(row("activated"), s=time.perf_counter() - began)

    def settle() -> None:
        monarch.fetch_shard(scalar).result()

    def chain() -> None:
        y = x
        for _ in range(2000):
            y = y + 1
        monarch.fetch_shard(y[0, 0]).result()

    figure(row("adds"), us=min(repeat(3, chain, warm=1)) / 2000 * 1e6)
    figure(row("add"), us=issued(settle, max(20, calls // 15), lambda: x + 1))
    times(row("fetch"), repeat(calls // 10, settle))
    with procs.activate():
        remote = monarch.remote("os.getpid")
        times(row("call"), repeat(calls // 10, lambda: remote.call().get()))
        model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        data = torch.rand(16, 32)

        def step() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(data).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        def trained() -> None:
            monarch.fetch_shard(step()).result()

        steps = max(5, calls // 60)
        trained()
        times(row("step issued"), repeat(steps, step, warm=0, settle=settle))
        times(row("step"), repeat(steps, trained))

        def adds(y: torch.Tensor) -> torch.Tensor:
            for _ in range(ADDS):
                y = y + 1
            return y

        fast = compiled(adds)
        times(row("compiled"), repeat(steps, lambda: monarch.fetch_shard(fast(x)).result(), warm=5))
    figure(row("worker"), mb=max(memory(pid)["private"] for pid in pids) / 1e6)


def main() -> None:
    plan = plan_of(sys.argv)
    first = this_host().spawn_procs({"gpus": 1})
    with first.activate():
        monarch.fetch_shard(torch.ones(1)).result()
    time.sleep(5)  # what forks processes loads PyTorch, so that those that follow are warm
    for size in PROCS:
        measure(size, plan.calls)
    leave()


if __name__ == "__main__":
    main()
