"""`monarch.rdma` as programs written for torchmonarch use it."""

from collections.abc import Iterator

import pytest
import torch

from monarch.actor import Actor, ProcMesh, endpoint, this_host
from monarch.rdma import RDMAAction, RDMABuffer

pytestmark = pytest.mark.timeout(60)


class Server(Actor):
    """Has parameters, and hands out buffers of their memory."""

    def __init__(self) -> None:
        self.parameters = torch.zeros(10, 10)
        self.gradients = torch.zeros(10, 10)

    @endpoint
    async def buffers(self) -> tuple[RDMABuffer, RDMABuffer]:
        return tuple(RDMABuffer(tensor.view(torch.uint8).flatten()) for tensor in (self.parameters, self.gradients))

    @endpoint
    async def step(self) -> float:
        self.parameters -= self.gradients
        return float(self.parameters.sum())


class Client(Actor):
    """Writes gradients to a server and reads parameters from it."""

    def __init__(self, buffers: tuple[RDMABuffer, RDMABuffer]) -> None:
        self.parameters, self.gradients = buffers

    @endpoint
    async def upload(self, gradient: torch.Tensor) -> None:
        await self.gradients.write_from(gradient.view(torch.uint8).flatten(), timeout=60)

    @endpoint
    async def download(self) -> torch.Tensor:
        local = torch.full((10, 10), -1.0)
        await self.parameters.read_into(local.view(torch.uint8).flatten(), timeout=60)
        return local


class Blocking(Actor):
    """The same from an actor without an event loop."""

    @endpoint
    def read_both(self, buffers: tuple[RDMABuffer, RDMABuffer]) -> tuple[float, float, str]:
        parameters, gradients = torch.full((100,), -1.0), torch.full((100,), -1.0)
        action = RDMAAction().read_remote(parameters.view(torch.uint8), buffers[0])
        action.read_remote(gradients.view(torch.uint8), buffers[1]).submit(timeout=60).get()
        buffers[1].drop().get()
        return float(parameters.sum()), float(gradients.sum()), buffers[0].owner


@pytest.fixture(scope="module")
def procs() -> Iterator[ProcMesh]:
    mesh = this_host().spawn_procs(per_host={"gpus": 2}, name="rdma_api")
    yield mesh
    mesh.stop().get()


@pytest.mark.slow
def test_one_actor_owns_buffers_and_another_reads_and_writes_them(procs: ProcMesh) -> None:
    server = procs.slice(gpus=0).spawn("server", Server)
    buffers = server.buffers.call_one().get()
    assert [buffer.size() for buffer in buffers] == [400, 400]
    client = procs.slice(gpus=1).spawn("client", Client, buffers)
    client.upload.call_one(torch.ones(10, 10)).get()
    assert server.step.call_one().get() == -100.0
    assert torch.equal(client.download.call_one().get(), -torch.ones(10, 10))
    blocking = procs.slice(gpus=1).spawn("blocking", Blocking)
    total, gradient, owner = blocking.read_both.call_one(buffers).get()
    assert (total, gradient, owner) == (-100.0, 100.0, buffers[0].owner)
    assert "server" in owner
