"""CUDA tensors as arguments and results of endpoints."""

import os
import time
from typing import Any

import torch

from monarch_nb.actor import Actor, endpoint, this_host
from tests.gpu import DEVICE, fact, need_gpu

_ANSWER_S = 60.0
_MB = 1 << 20


class Holder(Actor):
    """A rank that makes tensors, gives them away and takes them."""

    @endpoint
    async def make(self, count: int, value: float) -> torch.Tensor:
        """A tensor on the device."""
        return torch.full((count,), value, device=DEVICE)

    @endpoint
    async def describe(self, tensor: torch.Tensor) -> tuple[str, float]:
        """The device and mean of a tensor that arrived."""
        return str(tensor.device), float(tensor.double().mean())

    @endpoint
    async def send(self, receiver: Any, count: int, times: int) -> list[tuple[str, float]]:
        """Passes a tensor to another rank, and overwrites it as soon as it is sent."""
        replies = []
        for number in range(times):
            _keep_busy()  # the tensor has not been computed yet
            tensor = torch.full((count,), float(number), device=DEVICE)
            future = receiver.describe.call_one(tensor)
            tensor.fill_(-1)
            replies.append(await future)
        return replies

    @endpoint
    async def rate(self, receiver: Any, megabytes: int, times: int) -> float:
        """Seconds of a call with a tensor of so many MB."""
        tensor = torch.full((megabytes * _MB // 4,), 1.0, device=DEVICE)
        await receiver.describe.call_one(tensor)
        began = time.perf_counter()
        for _ in range(times):
            await receiver.describe.call_one(tensor)
        return (time.perf_counter() - began) / times

    @endpoint
    async def used(self) -> int:
        """Bytes that the device has in use."""
        free, total = torch.cuda.mem_get_info()
        return total - free

    @endpoint
    async def pid(self) -> int:
        """Of its process."""
        return os.getpid()


def _keep_busy() -> None:
    if DEVICE == "cuda":
        torch.cuda._sleep(int(2e8))  # some tenths of a second


def _pair() -> tuple[Any, Any]:
    if DEVICE == "cuda":
        need_gpu()
    procs = this_host().spawn_procs(per_host={"ranks": 2})
    return procs, procs.spawn("holders", Holder)


@fact()
def results_arrive_in_the_notebook_on_the_cpu() -> str:
    """A CUDA tensor that an endpoint returns arrives in the controller on the CPU, which keeps off the GPU"""
    procs, holders = _pair()
    small = holders.slice(ranks=0).make.call_one(3, 2.5).get(_ANSWER_S)
    large = holders.slice(ranks=1).make.call_one(8 * _MB, 1.5).get(_ANSWER_S)
    procs.stop().get(20)
    assert small.tolist() == [2.5] * 3
    assert large.device.type == "cpu"
    assert float(large.min()) == float(large.max()) == 1.5
    assert not torch.cuda.is_initialized()
    return f"3 elements and {large.nbytes // _MB} MB"


@fact()
def arguments_arrive_on_the_device() -> str:
    """A CUDA tensor sent from rank to rank arrives on the device with the values that it had when it was sent"""
    procs, holders = _pair()
    sender, receiver = holders.slice(ranks=0), holders.slice(ranks=1)
    replies = {}
    for count in (10, 1000, 8 * _MB):
        replies[count] = sender.send.call_one(receiver, count, 5).get(_ANSWER_S)
    procs.stop().get(20)
    for count, answers in replies.items():
        assert [value for _, value in answers] == [0.0, 1.0, 2.0, 3.0, 4.0], f"{count}: {answers}"
        assert all(device.startswith(DEVICE) for device, _ in answers), f"{count}: {answers}"
    return "40 bytes to 32 MB, overwritten by the sender as soon as the call was made"


@fact(alone=True)
def rate() -> str:
    """Calls with a tensor of 256 MB from rank to rank of one GPU"""
    procs, holders = _pair()
    seconds = (
        holders.slice(ranks=0).rate.call_one(holders.slice(ranks=1), 256 if DEVICE == "cuda" else 8, 5).get(_ANSWER_S)
    )
    procs.stop().get(20)
    return f"{seconds * 1e3:.1f} ms a call, {256 / 1024 * 1.0737 / seconds:.1f} GB/s"
