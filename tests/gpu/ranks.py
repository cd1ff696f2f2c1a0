"""Tensors of which each rank has a value of its own, on ranks that share the GPU and on one rank with NCCL."""

import os
from typing import Any

import torch
from torch import nn

import monarch
from tests.gpu import DEVICE, fact
from tests.gpu.tensors import close, mesh_of


def _device_of(tensor: torch.Tensor) -> str:
    return f"{tensor.device.type} of process {os.getpid()}"


_device_on_rank = monarch.remote(_device_of, propagate="inspect")


def _of_ranks(tensor: Any, ranks: int) -> list[torch.Tensor]:
    return [monarch.inspect(tensor, data=rank) for rank in range(ranks)]


@fact(limit_s=120)
def each_rank_has_its_own() -> str:
    """In an active mesh, ranks that share the GPU make and compute tensors of their own there"""
    with mesh_of(2) as mesh, mesh.activate():
        rank = mesh.rank_tensors()["data"]
        torch.manual_seed(3)
        drawn = torch.rand(1000)
        sums = (drawn * 0 + 10 * rank).sum() / 1000
        values = [float(value) for value in _of_ranks(sums, 2)]
        first, second = _of_ranks(drawn, 2)
        torch.manual_seed(3)
        again = monarch.inspect(torch.rand(1000), data=1)
        devices = [monarch.call_on_shard_and_fetch(_device_on_rank, drawn, shard={"data": i}).get() for i in range(2)]
        assert values == [0.0, 10.0], values
        assert not torch.equal(first, second), "both ranks drew the same"
        assert torch.equal(second, again), "a seed gives other numbers the second time"
        assert all(device.startswith(DEVICE) for device in devices), devices
        assert len(set(devices)) == 2, devices
        assert first.device.type == "cpu", "a value arrives in the controller on the CPU"
        assert not torch.cuda.is_initialized(), "the controller has initialised CUDA"
    return "; ".join(devices)


def _exchange(ranks: int) -> str:
    results: dict[str, torch.Tensor] = {}
    with mesh_of(ranks) as mesh, mesh.activate():
        rank = mesh.rank_tensor("data").float()
        values = torch.stack([rank, rank + 10])
        for name in ("sum", "avg", "max", "stack"):
            results[name] = monarch.inspect(values.reduce("data", name))
        tensor = torch.ones(ranks, 3) * rank
        results["scatter"] = torch.cat(_of_ranks(tensor.reduce("data", scatter=True), ranks))
        results["bfloat16"] = monarch.inspect(values.bfloat16().reduce("data"))
        results["as one tensor"] = values.as_sharded(["data"]).full_tensor()
    numbers = torch.arange(float(ranks))
    rows = torch.stack([numbers, numbers + 10], 1)
    expected = {
        "sum": rows.sum(0),
        "avg": rows.mean(0),
        "max": rows.amax(0),
        "stack": rows,
        "scatter": torch.full((3 * ranks,), float(numbers.sum())),
        "bfloat16": rows.sum(0),
        "as one tensor": rows.flatten(),
    }
    for name, value in results.items():
        close(value, expected[name])
    return ", ".join(results)


@fact(limit_s=120)
def exchanges() -> str:
    """Tensors of two ranks that share the GPU are reduced, stacked and scattered between them"""
    return _exchange(2)


@fact(limit_s=120)
def exchanges_by_nccl() -> str:
    """The same on one rank with NCCL"""
    return _exchange(1)


@fact(limit_s=120)
def from_mesh_to_mesh() -> str:
    """A tensor of one rank goes to the other and to both, on the GPU that they share"""
    with mesh_of(2) as mesh:
        with mesh.activate():
            rank = mesh.rank_tensor("data") + torch.zeros(1000)
        last = rank.slice_mesh(data=1).to_mesh(mesh.slice(data=0))
        everywhere = rank.slice_mesh(data=1).to_mesh(mesh)
        close(monarch.inspect(last), torch.ones(1000))
        for value in _of_ranks(everywhere, 2):
            close(value, torch.ones(1000))
    return "from rank 1 to rank 0, and to both"


@fact(limit_s=120)
def streams() -> str:
    """A stream that borrows a tensor sums it over the ranks, and the main stream reads the sum"""
    with mesh_of(2) as mesh, mesh.activate():
        rank = mesh.rank_tensor("data")
        gradient = torch.ones(1 << 20) * (rank + 1)
        communication = monarch.Stream("communication")
        shared, borrow = communication.borrow(gradient, mutable=True)
        with borrow:
            with communication.activate():
                shared.reduce_("data")
            busy = torch.ones(256, 256)
            for _ in range(20):
                busy = (busy @ busy).softmax(-1)
        summed, rows = _of_ranks(gradient, 2), monarch.inspect(busy.sum())
    for value in summed:
        close(value, torch.full((1 << 20,), 3.0))
    close(rows, torch.tensor(256.0), 1e-3)
    return "4 MB summed while the main stream computed"


@fact(limit_s=120)
def training_by_hand() -> str:
    """Ranks that average their own gradients train as one process does with all rows"""
    torch.manual_seed(0)
    rows, targets = torch.randn(8, 16), torch.randn(8, 4)
    local = nn.Linear(16, 4)
    start = {name: value.tolist() for name, value in local.state_dict().items()}
    optimizer = torch.optim.AdamW(local.parameters(), 1e-2)
    for _ in range(5):
        optimizer.zero_grad()
        (local(rows) - targets).square().mean().backward()
        optimizer.step()
    own = [torch.stack([tensor[:4], tensor[4:]]).tolist() for tensor in (rows, targets)]
    with mesh_of(2) as mesh, mesh.activate():
        rank = mesh.rank_tensor("data")
        model = nn.Linear(16, 4)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(torch.tensor(start[name]))
        adam = torch.optim.AdamW(model.parameters(), 1e-2)
        x, y = (torch.tensor(tensor).index_select(0, rank.view(1)).squeeze(0) for tensor in own)
        for _ in range(5):
            adam.zero_grad()
            (model(x) - y).square().mean().backward()
            monarch.reduce_([parameter.grad for parameter in model.parameters()], "data", "avg")
            adam.step()
        weights = _of_ranks(model.weight, 2)
    for value in weights:
        close(value, local.weight)
    return "5 steps of AdamW, weights of both ranks equal to those of one process"
