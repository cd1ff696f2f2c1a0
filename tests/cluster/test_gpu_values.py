"""Tensors of a GPU as arguments and results: the driver of pretence in real processes."""

import asyncio
import contextlib
import gc
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from monarch_nb.actor import Actor, ProcMesh, SupervisionError, endpoint, this_host
from monarch_nb.gpu import driver
from tests.cluster.actor_tools import Faults, faults
from tests.cluster.test_rdma_gpu import on_device

__all__ = ["faults"]

pytestmark = pytest.mark.timeout(120)
SECONDS = 30.0


def _is_gpu_file(fd: str) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:monarch-nb-gpu")
    except OSError:  # the descriptor of the listing itself
        return False


def _wait_for(path: str) -> None:
    while not os.path.exists(path):
        time.sleep(0.01)


def _facts(tensors: Sequence[torch.Tensor]) -> list[tuple[bool, int, int]]:
    """Of each tensor: whether it is on the GPU, its least and its largest value."""
    gpu = driver()
    assert gpu is not None
    return [(gpu.device_of_tensor(tensor) == 0, int(tensor.min()), int(tensor.max())) for tensor in tensors]


class Holder(Actor):
    @endpoint
    async def make(self, count: int, value: int) -> torch.Tensor:
        return on_device(count, value)

    @endpoint
    async def receive(self, *tensors: torch.Tensor) -> list[tuple[bool, int, int]]:
        self.last = tensors
        return _facts(tensors)

    @endpoint
    async def send(self, peer: Any, count: int) -> list[list[tuple[bool, int, int]]]:
        facts = []
        for value in range(3):
            tensor = on_device(count, value)
            future = peer.receive.call_one(tensor, torch.full((count,), 9, dtype=torch.uint8))
            tensor.fill_(255)
            facts.append(await future)
        return facts

    @endpoint
    async def pid(self) -> int:
        return os.getpid()

    @endpoint
    async def files(self) -> int:
        """How many files of the pretended GPU this process holds, apart from its own tensors."""
        self.last = ()
        gc.collect()
        return sum(_is_gpu_file(fd) for fd in os.listdir("/proc/self/fd"))

    @endpoint
    async def copies_through_the_host(self) -> Any:
        """Bytes that were copied between the device and memory of the host since the last call."""
        gpu: Any = driver()
        assert gpu is not None
        total = sum(size for target, source, size in gpu.copies if target != source)
        gpu.copies.clear()
        return total

    @endpoint
    async def hold(self, path: str) -> None:
        await asyncio.to_thread(_wait_for, path)

    @endpoint
    async def received(self) -> list[tuple[bool, int, int]]:
        return _facts(self.last)

    @endpoint
    async def send_and_be_killed(self, peer: Any, probe: Any, count: int) -> None:
        peer.receive.broadcast(on_device(count, 3))
        await probe.pid.call_one()  # on the same link: the earlier message has arrived there
        os.kill(os.getpid(), signal.SIGKILL)

    @endpoint
    async def send_to_the_dead(self, peer: Any, count: int) -> None:
        with contextlib.suppress(SupervisionError):  # if its end is known already
            peer.receive.broadcast(on_device(count, 3))

    @endpoint
    async def send_views(self, peer: Any) -> Any:
        tensor = on_device(4 << 20, 1)
        part = tensor[1 << 20 : 3 << 20]
        part.fill_(2)
        assert await peer.receive.call_one(tensor, part, tensor[:64]) == [(True, 1, 2), (True, 2, 2), (True, 1, 1)]
        return await peer.shares.call_one()

    @endpoint
    async def shares(self) -> bool:
        tensor, part, head = self.last
        part.fill_(7)
        head.fill_(8)
        return int(tensor.max()) == 8 and bool((tensor[1 << 20 : 3 << 20] == 7).all())


@pytest.fixture(scope="module")
def holders() -> Iterator[Any]:
    procs: ProcMesh = this_host().spawn_procs(per_host={"ranks": 2}, env={"MONARCH_NB_GPU": "pretence"})
    yield procs.spawn("holders", Holder)
    procs.stop().get(SECONDS)


@pytest.mark.parametrize("count", [10, 5000, 3 << 20])
def test_a_gpu_tensor_arrives_on_the_gpu_as_it_was_sent(holders: Any, count: int) -> None:
    facts = holders.slice(ranks=0).send.call_one(holders.slice(ranks=1), count).get(SECONDS)
    assert facts == [[(True, value, value), (False, 9, 9)] for value in range(3)]


def test_views_of_one_storage_share_it_on_the_other_gpu(holders: Any) -> None:
    assert holders.slice(ranks=0).send_views.call_one(holders.slice(ranks=1)).get(SECONDS)


def test_a_result_arrives_in_the_controller_in_its_own_memory(holders: Any) -> None:
    result = holders.make.call(3 << 20, 6).get(SECONDS)
    for tensor in result.values():
        assert (int(tensor.min()), int(tensor.max())) == (6, 6)
        tensor.fill_(1)


def test_large_tensors_skip_the_host_and_leave_nothing(holders: Any) -> None:
    sender, receiver = holders.slice(ranks=0), holders.slice(ranks=1)
    holders.copies_through_the_host.call().get(SECONDS)
    sender.send.call_one(receiver, 5 << 20).get(SECONDS)
    assert list(holders.copies_through_the_host.call().get(SECONDS).values()) == [0, 0]
    assert receiver.make.call_one(5 << 20, 4).get(SECONDS).nbytes == 5 << 20
    assert receiver.copies_through_the_host.call_one().get(SECONDS) == 5 << 20
    assert list(holders.files.call().get(SECONDS).values()) == [0, 0]


def test_a_tensor_arrives_after_its_sender_was_killed(faults: Faults, tmp_path: Path) -> None:
    procs = this_host().spawn_procs(per_host={"ranks": 2}, env={"MONARCH_NB_GPU": "pretence"})
    mesh: Any = procs.spawn("holders", Holder)
    first, second = mesh.slice(ranks=0), mesh.slice(ranks=1)
    probe: Any = procs.slice(ranks=1).spawn("probe", Holder)
    second.hold.broadcast(str(tmp_path / "go"))
    first.send_and_be_killed.broadcast(second, probe, 4 << 20)
    assert faults.next().crashed_ranks == [0]
    (tmp_path / "go").touch()
    assert second.received.call_one().get(SECONDS) == [(True, 3, 3)]
    assert second.files.call_one().get(SECONDS) == 0
    procs.stop().get(SECONDS)


def test_a_receiver_that_is_killed_leaves_nothing_with_the_sender(faults: Faults) -> None:
    procs = this_host().spawn_procs(per_host={"ranks": 2}, env={"MONARCH_NB_GPU": "pretence"})
    mesh: Any = procs.spawn("holders", Holder)
    first, second = mesh.slice(ranks=0), mesh.slice(ranks=1)
    os.kill(second.pid.call_one().get(SECONDS), signal.SIGKILL)
    first.send_to_the_dead.broadcast(second, 4 << 20)
    assert faults.next().crashed_ranks == [1]
    end = time.monotonic() + SECONDS
    while first.files.call_one().get(SECONDS) and time.monotonic() < end:
        pass
    assert first.files.call_one().get(SECONDS) == 0
    procs.stop().get(SECONDS)
