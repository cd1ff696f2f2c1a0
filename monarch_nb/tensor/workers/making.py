"""Tensors made of nothing: each worker makes its own part, and nobody the whole where that can be helped."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from monarch_nb.tensor.commands import Making, Parts
from monarch_nb.tensor.propagation import Meta, dense, one_piece_each, overload, placed_otherwise


def maker(told: Making, mesh: DeviceMesh) -> Callable[[], DTensor]:
    """What makes the tensor that was told of."""
    operation = overload(told.operation)
    meta, device = told.made, torch.device(mesh.device_type)

    def whole() -> DTensor:
        made = operation(*told.args, **told.kwargs, device=device)
        return distribute_tensor(made, mesh, meta.placements, src_data_rank=None)

    def part() -> DTensor:
        local, _ = compute_local_shape_and_global_offset(meta.shape, mesh, meta.placements)
        made = operation(local, *told.args[1:], **told.kwargs, device=device)
        laid = dense(meta.stride, local)
        if laid != made.stride():
            made = torch.empty_strided(local, laid, dtype=made.dtype, device=device).copy_(made)
        return DTensor.from_local(
            made, mesh, meta.placements, run_check=False, shape=torch.Size(meta.shape), stride=meta.stride
        )

    return part if told.in_parts else whole


def empty(meta: Meta, mesh: DeviceMesh) -> DTensor:
    """A tensor that is to be written to."""
    told = Making(0, "aten.empty.memory_format", (meta.shape,), {"dtype": meta.dtype}, meta, in_parts=True)
    return maker(told, mesh)()


def made_in_parts(told: Parts, mesh: DeviceMesh) -> DTensor:
    """The tensor of which a function gives this rank's part. Raises ValueError for one that does not fit."""
    pieces = one_piece_each(told.made.placements)
    if pieces != told.made.placements:
        whole = made_in_parts(replace(told, made=told.made.placed(pieces)), mesh)
        return placed_otherwise(whole, told.made.placements)
    meta = told.made
    sizes, offsets = compute_local_shape_and_global_offset(meta.shape, mesh, meta.placements)
    part = tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
    local = told.function(part, *told.args)
    if not isinstance(local, torch.Tensor) or tuple(local.shape) != tuple(sizes) or local.dtype != meta.dtype:
        given = f"{tuple(local.shape)} {local.dtype}" if isinstance(local, torch.Tensor) else type(local).__name__
        raise ValueError(f"a part of size {tuple(sizes)} and {meta.dtype} is wanted here, and {given} was given")
    return held(local, meta, mesh)


def held(local: torch.Tensor, meta: Meta, mesh: DeviceMesh) -> DTensor:
    """The tensor of which this rank has this."""
    local = local.detach().to(mesh.device_type).contiguous()
    return DTensor.from_local(
        local, mesh, meta.placements, run_check=False, shape=torch.Size(meta.shape), stride=meta.stride
    )
