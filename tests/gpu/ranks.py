"""Tensors of which each rank has a value of its own, on ranks that share the GPU and on one rank with NCCL."""

import os
from typing import Any

import torch
from torch import nn

import monarch
from tests.gpu import DEVICE, fact
from tests.gpu.tensors import close, mesh_of


def _where(tensor: torch.Tensor) -> str:
    return f"{tensor.device.type} of process {os.getpid()}"


_where_on_rank = monarch.remote(_where, propagate="inspect")


def _of_ranks(tensor: Any, ranks: int) -> list[torch.Tensor]:
    return [monarch.inspect(tensor, data=rank) for rank in range(ranks)]


@fact(limit_s=120)
def each_rank_has_its_own() -> str:
    """In an active mesh, ranks that share the GPU make and compute tensors of their own there"""
    with mesh_of(2) as mesh, mesh.activate():
        rank = mesh.rank_tensors()["data"]
        torch.manual_seed(3)
        drawn = torch.rand(1000)
        found = (drawn * 0 + 10 * rank).sum() / 1000
        values = [float(value) for value in _of_ranks(found, 2)]
        one, two = _of_ranks(drawn, 2)
        torch.manual_seed(3)
        again = monarch.inspect(torch.rand(1000), data=1)
        where = [monarch.call_on_shard_and_fetch(_where_on_rank, drawn, shard={"data": at}).get() for at in range(2)]
        assert values == [0.0, 10.0], values
        assert not torch.equal(one, two), "both ranks drew the same"
        assert torch.equal(two, again), "a seed gives other numbers the second time"
        assert all(place.startswith(DEVICE) for place in where), where
        assert len(set(where)) == 2, where
        assert one.device.type == "cpu", "a value arrives in the controller on the CPU"
        assert not torch.cuda.is_initialized(), "the controller has initialised CUDA"
    return "; ".join(where)


def _exchanged(ranks: int) -> str:
    with mesh_of(ranks) as mesh, mesh.activate():
        rank = mesh.rank_tensor("data").float()
        values = torch.stack([rank, rank + 10])
        expected = torch.arange(float(ranks))
        for name, whole in (("sum", expected.sum()), ("avg", expected.mean()), ("max", expected.max())):
            close(
                monarch.inspect(values.reduce("data", name)),
                torch.stack([whole, whole + (10 * ranks if name == "sum" else 10)]),
            )
        close(monarch.inspect(rank.reduce("data", "stack")), expected)
        whole = torch.ones(2 * ranks, 3) * rank
        parts = _of_ranks(whole.reduce("data", scatter=True), ranks)
        assert all(part.shape == (2, 3) for part in parts), [part.shape for part in parts]
        close(parts[0], torch.full((2, 3), float(expected.sum())))
        half = rank.bfloat16().reduce("data")
        close(monarch.inspect(half).float(), expected.sum())
        sharded = torch.stack([rank, rank]).as_sharded(["data"])
        close(sharded.full_tensor(), expected.repeat_interleave(2))
    return "sum, avg, max, stack, scatter, bfloat16, and as one sharded tensor"


@fact(limit_s=120)
def exchanges() -> str:
    """Tensors of two ranks that share the GPU are reduced, stacked and scattered between them"""
    return _exchanged(2)


@fact(limit_s=120)
def exchanges_by_nccl() -> str:
    """The same on one rank with NCCL"""
    return _exchanged(1)


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
        for value in _of_ranks(gradient, 2):
            close(value, torch.full((1 << 20,), 3.0))
        close(monarch.inspect(busy.sum()), torch.tensor(256.0), 1e-3)
    return "4 MB summed while the main stream computed"


@fact(limit_s=120)
def training_by_hand() -> str:
    """Ranks that average their own gradients train as one process does with all rows"""
    torch.manual_seed(0)
    rows, wanted = torch.randn(8, 16), torch.randn(8, 4)
    local = nn.Linear(16, 4)
    start = {name: value.clone() for name, value in local.state_dict().items()}
    optimizer = torch.optim.AdamW(local.parameters(), 1e-2)
    for _ in range(5):
        optimizer.zero_grad()
        (local(rows) - wanted).square().mean().backward()
        optimizer.step()
    with mesh_of(2) as mesh, mesh.activate():
        rank = mesh.rank_tensor("data")
        model = nn.Linear(16, 4)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(torch.tensor(start[name].tolist()))
        theirs = torch.optim.AdamW(model.parameters(), 1e-2)
        own = [torch.tensor(each.tolist()).view(2, 4, -1)[rank] for each in (rows, wanted)]
        for _ in range(5):
            theirs.zero_grad()
            (model(own[0]) - own[1]).square().mean().backward()
            monarch.reduce_([parameter.grad for parameter in model.parameters()], "data", "avg")
            theirs.step()
        for value in _of_ranks(model.weight, 2):
            close(value, local.weight)
    return "5 steps of AdamW, weights of both ranks equal to those of one process"
