"""RDMABuffer on the memory of a GPU."""

import time
from typing import Any

import torch

from monarch_nb.actor import Actor, endpoint, this_host
from monarch_nb.rdma import RDMABuffer
from tests.gpu import DEVICE, fact, need_gpu

_ANSWER_S = 60.0
_MB = 1 << 20


class Owner(Actor):
    """A rank that offers memory of the device."""

    @endpoint
    def offer(self, count: int) -> RDMABuffer:
        """A buffer of so many numbers, counted from 0."""
        self.tensor = torch.arange(count, dtype=torch.float32, device=DEVICE)
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        self.buffer = RDMABuffer(self.tensor)
        return self.buffer

    @endpoint
    def part(self, count: int) -> RDMABuffer:
        """A buffer of the first so many numbers."""
        return RDMABuffer(self.tensor[:count])

    @endpoint
    def mean(self) -> float:
        """Of the memory that it offers."""
        return float(self.tensor.double().mean())

    @endpoint
    def drop(self) -> None:
        """Ends the offer."""
        self.buffer.drop().get()


class User(Actor):
    """A rank that reads and writes it."""

    @endpoint
    async def read(self, buffer: RDMABuffer, device: str, count: int) -> tuple[float, str]:
        """Reads all into memory of a device."""
        room = torch.zeros(count, dtype=torch.float32, device=device)
        await buffer.read_into(room)
        return float(room.double().mean()), buffer.backend

    @endpoint
    async def write(self, buffer: RDMABuffer, device: str, count: int, value: float) -> None:
        """Writes all from memory of a device that is not computed yet."""
        if DEVICE == "cuda":
            torch.cuda._sleep(int(4e8))  # some tenths of a second
        await buffer.write_from(torch.full((count,), value, dtype=torch.float32, device=device))

    @endpoint
    async def rates(self, buffer: RDMABuffer, part: RDMABuffer, count: int) -> dict[str, float]:
        """Seconds of reads and writes, and of copies within this process."""
        local, second = (torch.zeros(count, dtype=torch.float32, device=DEVICE) for _ in range(2))
        pinned = torch.zeros(count, dtype=torch.float32, pin_memory=DEVICE == "cuda")
        seconds: dict[str, float] = {}

        async def measure(name: str, work: Any) -> None:
            best = float("inf")
            for _ in range(8):
                began = time.perf_counter()
                await work()
                if DEVICE == "cuda":
                    torch.cuda.current_stream().synchronize()
                best = min(best, time.perf_counter() - began)
            seconds[name] = best

        async def copy(target: torch.Tensor, source: torch.Tensor) -> None:
            target.copy_(source, non_blocking=True)

        few = torch.zeros(1024, dtype=torch.float32, device=DEVICE)
        for _ in range(2):
            await measure("read of 4 KB", lambda: part.read_into(few))
            await measure("read", lambda: buffer.read_into(local))
            await measure("copy on the device", lambda: copy(second, local))
            await measure("write", lambda: buffer.write_from(local))
            await measure("read to pinned", lambda: buffer.read_into(pinned))
            await measure("copy to pinned", lambda: copy(pinned, local))
            await measure("write from pinned", lambda: buffer.write_from(pinned))
            await measure("copy from pinned", lambda: copy(local, pinned))
        return seconds


def _pair() -> tuple[Any, Any, Any]:
    if DEVICE == "cuda":
        need_gpu()
    procs = this_host().spawn_procs(per_host={"ranks": 2})
    return procs, procs.slice(ranks=0).spawn("owner", Owner), procs.slice(ranks=1).spawn("user", User)


@fact()
def reads_and_writes() -> str:
    """Another rank reads and writes a buffer on the device, from the device and from the CPU"""
    procs, owner, user = _pair()
    count = 4 * _MB + 3
    buffer = owner.offer.call_one(count).get(_ANSWER_S)
    expected = (count - 1) / 2
    texts = []
    for device in (DEVICE, "cpu"):
        mean, mover = user.read.call_one(buffer, device, count).get(_ANSWER_S)
        assert abs(mean - expected) < 1e-3 * expected, f"{device}: {mean} in place of {expected}"
        texts.append(f"{device} by {mover}")
    for number, device in enumerate((DEVICE, "cpu")):
        user.write.call_one(buffer, device, count, 5.0 + number).get(_ANSWER_S)
        assert owner.mean.call_one().get(_ANSWER_S) == 5.0 + number
    procs.stop().get(20)
    return ", ".join(texts)


@fact()
def the_notebook_reads_it_without_a_gpu() -> str:
    """The controller reads a buffer on the device into its own memory, and keeps off the GPU"""
    procs, owner, _ = _pair()
    buffer = owner.offer.call_one(_MB).get(_ANSWER_S)
    room = torch.zeros(_MB)
    buffer.read_into(room).get(_ANSWER_S)
    procs.stop().get(20)
    assert float(room[-1]) == _MB - 1
    assert not torch.cuda.is_initialized()
    return f"by {buffer.backend or 'another way'}"


@fact()
def a_dropped_buffer_is_an_error() -> str:
    """After drop() a read is an error"""
    procs, owner, user = _pair()
    buffer = owner.offer.call_one(_MB).get(_ANSWER_S)
    user.read.call_one(buffer, DEVICE, _MB).get(_ANSWER_S)
    owner.drop.call_one().get(_ANSWER_S)
    try:
        outcome = user.read.call_one(buffer, DEVICE, _MB).get(_ANSWER_S)
    except Exception as error:
        text = str(error)
    else:
        raise AssertionError(f"it was read: {outcome}")
    procs.stop().get(20)
    assert "dropped" in text, text
    return next(line for line in text.splitlines() if "dropped" in line)[:200]


@fact(alone=True)
def rates() -> str:
    """Reads and writes of 4 GB on one GPU make 0.9 of a copy on the device, and 0.8 of pinned copies"""
    procs, owner, user = _pair()
    count = (1024 if DEVICE == "cuda" else 4) * _MB
    buffer = owner.offer.call_one(count).get(_ANSWER_S)
    part = owner.part.call_one(1024).get(_ANSWER_S)
    quarter = owner.part.call_one(count // 4).get(_ANSWER_S)
    of_quarter = user.rates.call_one(quarter, part, count // 4).get(_ANSWER_S)
    seconds = user.rates.call_one(buffer, part, count).get(_ANSWER_S)
    procs.stop().get(20)
    latency = seconds.pop("read of 4 KB")
    speeds = {name: 4 * count / took / 1e9 for name, took in seconds.items()}
    text = "GB/s: " + ", ".join(f"{name} {value:.1f}" for name, value in speeds.items())
    text += f"; a quarter of it: read {count / of_quarter['read'] / 1e9:.1f}, "
    text += f"copy on the device {count / of_quarter['copy on the device'] / 1e9:.1f}; "
    text += f"read of 4 KB {1e6 * latency:.0f} µs"
    if DEVICE == "cuda":
        assert speeds["read"] >= 0.9 * speeds["copy on the device"], text
        assert speeds["write"] >= 0.9 * speeds["copy on the device"], text
        assert speeds["read to pinned"] >= 0.8 * speeds["copy to pinned"], text
        assert speeds["write from pinned"] >= 0.8 * speeds["copy from pinned"], text
    return text
