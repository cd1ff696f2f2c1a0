"""The data plane, on the API that ours and torchmonarch share: an actor reads and writes memory of another."""

import ctypes
import sys
import time
import traceback
from typing import Any

import torch
from measure import Plan, figure, leave, plan_of, rate, repeat, times

from monarch.actor import Actor, endpoint, this_host
from monarch.rdma import RDMAAction, RDMABuffer

MEGABYTE = 1 << 20
LARGE = 256 * MEGABYTE
PIECE = 64 << 10
PIECES = 1000


class Owner(Actor):
    """Owns the memory."""

    def __init__(self) -> None:
        self.arrays: list[Any] = []

    @endpoint
    async def offer(self, size: int, count: int) -> list[Any]:
        memory = [torch.ones(size, dtype=torch.uint8) for _ in range(count)]
        self.arrays += memory
        return [RDMABuffer(part) for part in memory]


def memcpy(target: torch.Tensor, source: torch.Tensor) -> None:
    ctypes.memmove(target.data_ptr(), source.data_ptr(), source.numel())


async def seconds_of(count: int, operation: Any) -> list[float]:
    """How long awaiting `operation()` takes, each of `count` times, after one that is not counted."""
    await operation()
    seconds = []
    for _ in range(count):
        began = time.perf_counter()
        await operation()
        seconds.append(time.perf_counter() - began)
    return seconds


class Reader(Actor):
    """Reads it."""

    @endpoint
    async def large(self, buffer: Any, count: int) -> tuple[list[float], list[float], list[float]]:
        """Seconds of a copy inside this process, of reads and of writes of the same size, in turns."""
        source, target = torch.ones(LARGE, dtype=torch.uint8), torch.zeros(LARGE, dtype=torch.uint8)
        copies = repeat(count, lambda: memcpy(target, source), warm=1)
        reads = await seconds_of(count, lambda: buffer.read_into(target))
        assert int(target[::MEGABYTE].sum()) == LARGE // MEGABYTE
        return copies, reads, await seconds_of(count, lambda: buffer.write_from(source))

    @endpoint
    async def small(self, buffer: Any, count: int) -> list[float]:
        """Seconds of reads of 64 bytes."""
        target = torch.zeros(64, dtype=torch.uint8)
        return await seconds_of(count, lambda: buffer.read_into(target))

    @endpoint
    async def batch(self, buffers: list[Any], count: int) -> tuple[list[float], list[float]]:
        """Seconds of copies inside this process, and of reads, of many pieces at once."""
        sources = [torch.ones(PIECE, dtype=torch.uint8) for _ in buffers]
        targets = [torch.zeros(PIECE, dtype=torch.uint8) for _ in buffers]

        def copy() -> None:
            for target, source in zip(targets, sources, strict=True):
                memcpy(target, source)

        action = RDMAAction()
        for target, buffer in zip(targets, buffers, strict=True):
            action.read_remote(target, buffer)
        return repeat(count, copy, warm=1), await seconds_of(count, action.submit)


def data(plan: Plan) -> None:
    procs = this_host().spawn_procs(per_host={"gpus": 2})
    owner = procs.slice(gpus=0).spawn("owner", Owner)
    reader = procs.slice(gpus=1).spawn("reader", Reader)
    [buffer] = owner.offer.call_one(LARGE, 1).get()
    copies, reads, writes = reader.large.call_one(buffer, plan.big).get()
    for name, seconds in (("memcpy", copies), ("read", reads), ("write", writes)):
        figure(f"data: {name} 256 MB", value=rate(seconds, LARGE / 1e9), part=min(copies) / min(seconds))
    [small] = owner.offer.call_one(64, 1).get()
    times("data: read 64 B", reader.small.call_one(small, plan.calls).get())
    buffers = owner.offer.call_one(PIECE, PIECES).get()
    copies, reads = reader.batch.call_one(buffers, plan.big).get()
    figure("data: batch", value=rate(reads, PIECE * PIECES / 1e9), part=min(copies) / min(reads))


if __name__ == "__main__":
    try:
        data(plan_of(sys.argv))
    except BaseException:
        traceback.print_exc()
        leave(1)
    leave()
