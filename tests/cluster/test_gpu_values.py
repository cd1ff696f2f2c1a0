"""Tensors of a GPU as arguments and results: the driver of pretence in real processes."""

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from monarch_nb.actor import Actor, ProcMesh, endpoint, this_host
from tests.cluster.test_rdma_gpu import on_device

pytestmark = pytest.mark.timeout(120)
SECONDS = 30.0


class Holder(Actor):
    @endpoint
    async def make(self, count: int, value: int) -> torch.Tensor:
        return on_device(count, value)

    @endpoint
    async def receive(self, *tensors: torch.Tensor) -> list[tuple[bool, int, int]]:
        from monarch_nb.gpu import driver

        gpu = driver()
        assert gpu is not None
        self.last = tensors
        return [(gpu.device_of_tensor(tensor) == 0, int(tensor.min()), int(tensor.max())) for tensor in tensors]

    @endpoint
    async def send(self, other: Any, count: int) -> list[list[tuple[bool, int, int]]]:
        found = []
        for value in range(3):
            tensor = on_device(count, value)
            future = other.receive.call_one(tensor, torch.full((count,), 9, dtype=torch.uint8))
            tensor.fill_(255)
            found.append(await future)
        return found

    @endpoint
    async def send_views(self, other: Any) -> bool:
        whole = on_device(4 << 20, 1)
        part = whole[1 << 20 : 3 << 20]
        part.fill_(2)
        assert await other.receive.call_one(whole, part, whole[:64]) == [(True, 1, 2), (True, 2, 2), (True, 1, 1)]
        return await other.shares.call_one()

    @endpoint
    async def shares(self) -> bool:
        whole, part, few = self.last
        part.fill_(7)
        few.fill_(8)
        return int(whole.max()) == 8 and bool((whole[1 << 20 : 3 << 20] == 7).all())


@pytest.fixture(scope="module")
def holders() -> Iterator[Any]:
    procs: ProcMesh = this_host().spawn_procs(per_host={"ranks": 2}, env={"MONARCH_NB_GPU": "pretence"})
    yield procs.spawn("holders", Holder)
    procs.stop().get(SECONDS)


@pytest.mark.parametrize("count", [10, 5000, 3 << 20])
def test_a_tensor_of_a_gpu_arrives_on_the_gpu_with_the_values_that_it_had(holders: Any, count: int) -> None:
    found = holders.slice(ranks=0).send.call_one(holders.slice(ranks=1), count).get(SECONDS)
    assert found == [[(True, value, value), (False, 9, 9)] for value in range(3)]


def test_views_of_one_storage_share_it_on_the_other_gpu(holders: Any) -> None:
    assert holders.slice(ranks=0).send_views.call_one(holders.slice(ranks=1)).get(SECONDS)


def test_a_result_arrives_in_the_controller_in_its_own_memory(holders: Any) -> None:
    found = holders.make.call(3 << 20, 6).get(SECONDS)
    for tensor in found.values():
        assert (int(tensor.min()), int(tensor.max())) == (6, 6)
        tensor.fill_(1)
