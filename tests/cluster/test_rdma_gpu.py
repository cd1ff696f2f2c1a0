"""RDMABuffer on memory of a GPU: the driver of pretence in real processes."""

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from monarch_nb.actor import Actor, ActorError, ProcMesh, endpoint, this_host
from monarch_nb.config import configured
from monarch_nb.rdma import RDMABuffer
from tests.cluster.actor_tools import Faults, faults

__all__ = ["faults"]
pytestmark = pytest.mark.timeout(120)
SECONDS = 30.0
COUNT = 3 << 20  # bytes


def on_device(count: int, value: int) -> torch.Tensor:
    """A tensor of bytes in the memory of the pretended GPU."""
    from monarch_nb.gpu import driver

    gpu = driver()
    assert gpu is not None
    assert gpu.name == "pretence"
    tensor = torch.empty(0, dtype=torch.uint8).set_(gpu.new_storage(count, 0), 0, (count,), (1,))
    return tensor.fill_(value)


class Owner(Actor):
    @endpoint
    def offer(self, count: int, value: int, *, readonly: bool = False) -> RDMABuffer:
        self.tensor = on_device(count, value)
        self.buffer = RDMABuffer(self.tensor, readonly=readonly)
        return self.buffer

    @endpoint
    def offer_part(self, start: int, count: int) -> RDMABuffer:
        self.tensor[start : start + count] = 77
        return RDMABuffer(self.tensor[start : start + count])

    @endpoint
    def offer_host(self, count: int, value: int) -> RDMABuffer:
        self.host = torch.full((count,), value, dtype=torch.uint8)
        return RDMABuffer(self.host)

    @endpoint
    def refuse_to_lend(self) -> None:
        from monarch_nb.gpu import GpuError, driver

        def lend(address: int) -> bytes:
            raise GpuError("an expandable segment")

        driver().lend = lend  # type: ignore[union-attr,method-assign]

    @endpoint
    def value(self) -> tuple[int, int]:
        return int(self.tensor.min()), int(self.tensor.max())

    @endpoint
    def drop(self) -> None:
        self.buffer.drop().get()

    @endpoint
    def free_bytes(self) -> int:
        from monarch_nb.gpu import driver

        del self.tensor
        return driver().memory(0)[0]  # type: ignore[union-attr]

    @endpoint
    def pid(self) -> int:
        return os.getpid()


class User(Actor):
    def __init__(self, uses_gpu: bool = True) -> None:
        self.own = on_device(16, 0) if uses_gpu else None

    @endpoint
    def read(self, buffer: RDMABuffer, *, gpu: bool, offset: int = 0) -> tuple[int, int, str]:
        count = buffer.size() - offset
        room = on_device(count, 0) if gpu else torch.zeros(count, dtype=torch.uint8)
        buffer.read_into(room, offset=offset).get(SECONDS)
        return int(room.min()), int(room.max()), buffer.backend

    @endpoint
    def write(self, buffer: RDMABuffer, value: int, *, gpu: bool) -> str:
        count = buffer.size()
        buffer.write_from(on_device(count, value) if gpu else torch.full((count,), value, dtype=torch.uint8)).get(
            SECONDS
        )
        return buffer.backend


@pytest.fixture
def procs() -> Iterator[ProcMesh]:
    mesh = this_host().spawn_procs(per_host={"ranks": 2}, env={"MONARCH_NB_GPU": "pretence"})
    yield mesh
    mesh.stop().get(SECONDS)


@pytest.fixture
def owner(procs: ProcMesh) -> Any:
    return procs.slice(ranks=0).spawn("owner", Owner)


@pytest.fixture
def user(procs: ProcMesh) -> Any:
    return procs.slice(ranks=1).spawn("user", User)


@pytest.mark.parametrize("gpu", [True, False])
def test_the_device_reads_and_writes_a_buffer_on_it(owner: Any, user: Any, gpu: bool) -> None:
    buffer = owner.offer.call_one(COUNT, 5).get(SECONDS)
    assert user.read.call_one(buffer, gpu=gpu).get(SECONDS) == (5, 5, "gpu")
    assert user.write.call_one(buffer, 9, gpu=gpu).get(SECONDS) == "gpu"
    assert owner.value.call_one().get(SECONDS) == (9, 9)
    part = owner.offer_part.call_one(1000, 5000).get(SECONDS)
    assert user.read.call_one(part, gpu=gpu, offset=10).get(SECONDS) == (77, 77, "gpu")


def test_a_buffer_of_the_host_is_copied_to_the_gpu(owner: Any, user: Any) -> None:
    buffer = owner.offer_host.call_one(40 << 20, 3).get(SECONDS)
    assert user.read.call_one(buffer, gpu=True).get(SECONDS) == (3, 3, "cross-memory")
    assert user.write.call_one(buffer, 4, gpu=True).get(SECONDS) == "cross-memory"
    assert user.read.call_one(buffer, gpu=False).get(SECONDS) == (4, 4, "cross-memory")


def test_buffers_of_host_and_gpu_of_one_process_take_turns(owner: Any, user: Any) -> None:
    on_gpu, on_host = owner.offer.call_one(COUNT, 1).get(SECONDS), owner.offer_host.call_one(COUNT, 2).get(SECONDS)
    for _ in range(3):
        assert user.read.call_one(on_gpu, gpu=True).get(SECONDS) == (1, 1, "gpu")
        assert user.read.call_one(on_host, gpu=True).get(SECONDS) == (2, 2, "cross-memory")


@pytest.mark.parametrize("mover", ["streams", "messages"])
def test_memory_that_cannot_be_lent_is_staged_through_the_host(owner: Any, user: Any, mover: str) -> None:
    owner.refuse_to_lend.call_one().get(SECONDS)
    buffer = owner.offer.call_one(COUNT, 6).get(SECONDS)
    with configured(rdma_movers=mover):
        assert user.read.call_one(buffer, gpu=True).get(SECONDS)[:2] == (6, 6)
        user.write.call_one(buffer, 8, gpu=True).get(SECONDS)
    assert owner.value.call_one().get(SECONDS) == (8, 8)


def test_a_process_that_uses_no_gpu_reads_through_the_host(owner: Any, procs: ProcMesh) -> None:
    buffer = owner.offer.call_one(COUNT, 6).get(SECONDS)
    room = torch.zeros(COUNT, dtype=torch.uint8)
    buffer.read_into(room).get(SECONDS)
    assert (int(room.min()), int(room.max())) == (6, 6)
    reader = procs.slice(ranks=1).spawn("other", User, uses_gpu=False)
    assert reader.read.call_one(buffer, gpu=False).get(SECONDS)[:2] == (6, 6)


def test_a_dropped_or_read_only_gpu_buffer_is_an_error(owner: Any, user: Any) -> None:
    buffer = owner.offer.call_one(COUNT, 5).get(SECONDS)
    assert user.read.call_one(buffer, gpu=True).get(SECONDS) == (5, 5, "gpu")
    owner.drop.call_one().get(SECONDS)
    with pytest.raises(ActorError, match="dropped"):
        user.read.call_one(buffer, gpu=True).get(SECONDS)
    with pytest.raises(ActorError, match="dropped"):
        user.write.call_one(buffer, 1, gpu=True).get(SECONDS)
    readonly = owner.offer.call_one(COUNT, 5, readonly=True).get(SECONDS)
    with pytest.raises(ActorError, match="read-only"):
        user.write.call_one(readonly, 1, gpu=True).get(SECONDS)
    assert owner.value.call_one().get(SECONDS) == (5, 5)


def test_a_dropped_buffer_frees_the_memory_of_the_gpu(owner: Any, user: Any, procs: ProcMesh) -> None:
    before = owner.offer.call_one(16, 0).get(SECONDS)
    before.drop().get(SECONDS)
    free = owner.free_bytes.call_one().get(SECONDS)
    buffer = owner.offer.call_one(COUNT, 5).get(SECONDS)
    assert user.write.call_one(buffer, 1, gpu=True).get(SECONDS) == "gpu"
    owner.drop.call_one().get(SECONDS)
    assert owner.free_bytes.call_one().get(SECONDS) >= free


def test_a_killed_owner_is_an_error_that_names_it(owner: Any, user: Any, faults: Faults) -> None:
    buffer = owner.offer.call_one(COUNT, 5).get(SECONDS)
    assert user.read.call_one(buffer, gpu=True).get(SECONDS) == (5, 5, "gpu")
    os.kill(owner.pid.call_one().get(SECONDS), signal.SIGKILL)
    assert faults.next().crashed_ranks == [0]
    with pytest.raises(ActorError, match="owner"):
        user.read.call_one(buffer, gpu=True).get(SECONDS)
