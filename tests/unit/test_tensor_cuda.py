"""Sharded tensors on GPUs, as far as a machine without one shows them."""

from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.multiprocessing
from torch.distributed.tensor import Replicate, Shard

from monarch_nb.tensor.groups.world import Staging, _backend_of, _stage
from monarch_nb.tensor.propagation import MeshLayout, Meta, Propagator
from monarch_nb.tensor.propagation.world import World, imagining

pytestmark = pytest.mark.timeout(120)


def test_ranks_that_share_a_device_use_gloo_and_others_nccl() -> None:
    assert _backend_of(["a GPU-1", "a GPU-2", "b GPU-1"]) == "cpu:gloo,cuda:nccl"
    assert _backend_of(["a GPU-1", "a GPU-2", "a GPU-1"]) == "cpu:gloo,cuda:gloo"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_move_between_dimensions_is_planned_without_a_process_group(device: str) -> None:
    if device == "cuda" and not torch.backends.cuda.is_built():
        pytest.skip("PyTorch here is built without CUDA, and cannot plan this for GPUs")
    layout = MeshLayout((2,), ("data",), device)
    world = World(layout)
    with imagining():
        world.register()
        rows = world.fake(Meta.of(layout, (4, 6), torch.float32, (Shard(0),)))
        columns = rows.redistribute(placements=[Shard(1)])
    assert tuple(columns._local_tensor.shape) == (4, 3)


def test_planning_for_gpus_makes_nothing_on_a_gpu_of_the_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # to make something there would raise here
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check=False: torch.device("cuda"))
    World(MeshLayout((2,), ("data",), "cuda"))
    with imagining():
        tensor = torch.empty(3, device="cuda")
    assert tensor.device.type == "cuda"
    assert not torch.cuda.is_initialized()


def _of_rank(rank: int, port: int, results: Any) -> None:
    import torch.distributed as dist
    import torch.distributed._functional_collectives  # defines the operations

    dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"tcp://127.0.0.1:{port}")
    name, operations = dist.group.WORLD.group_name, torch.ops._c10d_functional
    own = torch.arange(4.0) + rank
    staged = lambda operation, *args, **kwargs: _stage(operation.default)(*args, **kwargs)  # noqa: E731
    room, changed = torch.zeros(8), own.clone()
    outputs = {
        "all_reduce": staged(operations.all_reduce, own, "sum", name),
        "all_reduce_": staged(operations.all_reduce_, changed, "sum", name),
        "all_gather": staged(operations.all_gather_into_tensor, own, 2, name),
        "all_gather_out": staged(operations.all_gather_into_tensor_out, own, 2, name, out=room),
        "reduce_scatter": staged(operations.reduce_scatter_tensor, own, "sum", 2, name),
        "all_to_all": staged(operations.all_to_all_single, own, [2, 2], [2, 2], name),
        "broadcast": staged(operations.broadcast, own, 1, name),
        "shard_dim_alltoall": staged(torch.ops._dtensor.shard_dim_alltoall, own.view(2, 2), 0, 1, name).flatten(),
        "coalesced": staged(operations.all_reduce_coalesced, [own, own], "max", name)[1],
    }
    assert outputs["all_reduce_"] is changed
    assert outputs["all_gather_out"] is room
    if rank == 0:
        results.put({key: value.tolist() for key, value in outputs.items()})
    dist.destroy_process_group()


@pytest.mark.slow
def test_staged_collectives_give_what_gloo_gives() -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    results = torch.multiprocessing.get_context("spawn").SimpleQueue()
    torch.multiprocessing.spawn(_of_rank, (port, results), nprocs=2)
    assert results.get() == {
        "all_reduce": [1, 3, 5, 7],
        "all_reduce_": [1, 3, 5, 7],
        "all_gather": [0, 1, 2, 3, 1, 2, 3, 4],
        "all_gather_out": [0, 1, 2, 3, 1, 2, 3, 4],
        "reduce_scatter": [1, 3],
        "all_to_all": [0, 1, 1, 2],
        "broadcast": [1, 2, 3, 4],
        "shard_dim_alltoall": [0, 2, 1, 3],
        "coalesced": [1, 2, 3, 4],
    }


def test_staging_kernels_last_until_the_end_of_a_generation() -> None:
    has = lambda: torch._C._dispatch_has_kernel_for_dispatch_key("_c10d_functional::all_reduce", "CUDA")  # noqa: E731
    kernels = Staging()
    assert has()
    kernels.end()
    kernels.end()
    assert not has()


@pytest.mark.skipif(
    not torch.backends.cuda.is_built(), reason="PyTorch here is built without CUDA: no plan for its kernels"
)
@pytest.mark.parametrize("dim", [0, 1])
def test_flash_attention_stays_sharded_by_batch_and_heads(dim: int) -> None:
    layout, aten = MeshLayout((2,), ("data",), "cuda"), torch.ops.aten
    query, key, value, out, gradient = (
        Meta.of(layout, (4, 8, 64, 32), torch.bfloat16, (Shard(dim),)) for _ in range(len("qkvog"))
    )
    propagator = Propagator(layout)
    flash = aten._scaled_dot_product_flash_attention.default
    plan, *_ = propagator.plan(flash, (query, key, value, 0.0, True, False), {"scale": None})
    assert [meta.placements for meta in plan.made] == [(Shard(dim),)] * 2 + [(Replicate(),)] * 3
    _, sums, seed, offset, _ = plan.made
    arguments = (gradient, query, key, value, out, sums, None, None, 64, 64, 0.0, True, seed, offset)
    back, *_ = propagator.plan(aten._scaled_dot_product_flash_attention_backward.default, arguments, {"scale": None})
    assert [meta.placements for meta in back.made] == [(Shard(dim),)] * 3
    assert not plan.notices
    assert not back.notices
