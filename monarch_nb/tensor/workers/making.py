"""Tensor factories on a worker: makes the local part only, where the operation allows that."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from monarch_nb.tensor.commands import MakeParts, Making
from monarch_nb.tensor.propagation import Meta, Placements, laid_out, one_piece_each, overload, placed_otherwise


def maker(making: Making, mesh: DeviceMesh) -> Callable[[], DTensor]:
    """Returns a function that makes the tensor of a factory plan."""
    operation = overload(making.operation)
    meta, device = making.made, torch.device(mesh.device_type)

    def whole() -> DTensor:
        made = operation(*making.args, **making.kwargs, device=device)
        return distributed(made, mesh, meta.placements)

    def part() -> DTensor:
        local, _ = compute_local_shape_and_global_offset(meta.shape, mesh, meta.placements)
        made = operation(local, *making.args[1:], **making.kwargs, device=device)
        return _of_local(laid_out(made, meta.stride), meta, mesh)

    return part if making.in_parts else whole


def distributed(tensor: torch.Tensor, mesh: DeviceMesh, placements: Placements) -> DTensor:
    """Returns this rank's shard of a tensor that each rank has."""
    made = distribute_tensor(tensor, mesh, placements, src_data_rank=None)
    made._local_tensor = laid_out(made._local_tensor, made.stride())
    return made


def empty(meta: Meta, mesh: DeviceMesh) -> DTensor:
    """Returns an uninitialised tensor."""
    making = Making(0, "aten.empty.memory_format", (meta.shape,), {"dtype": meta.dtype}, meta, in_parts=True)
    return maker(making, mesh)()


def made_in_parts(command: MakeParts, mesh: DeviceMesh) -> DTensor:
    """Makes a tensor from the local part that a function returns. Raises ValueError if the part does not fit."""
    pieces = one_piece_each(command.made.placements)
    if pieces != command.made.placements:
        whole = made_in_parts(replace(command, made=command.made.placed(pieces)), mesh)
        return placed_otherwise(whole, command.made.placements)
    meta = command.made
    sizes, offsets = compute_local_shape_and_global_offset(meta.shape, mesh, meta.placements)
    part = tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
    local = command.function(part, *command.args)
    if not isinstance(local, torch.Tensor) or tuple(local.shape) != tuple(sizes) or local.dtype != meta.dtype:
        given = f"{tuple(local.shape)} {local.dtype}" if isinstance(local, torch.Tensor) else type(local).__name__
        raise ValueError(
            f"a part of size {tuple(sizes)} and {meta.dtype} is expected here, but the function returned {given}"
        )
    return held(local, meta, mesh)


def held(local: torch.Tensor, meta: Meta, mesh: DeviceMesh) -> DTensor:
    """Wraps the shard of this rank."""
    return _of_local(laid_out(local.detach().to(mesh.device_type), meta.stride), meta, mesh)


def _of_local(local: torch.Tensor, meta: Meta, mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(
        local, mesh, meta.placements, run_check=False, shape=torch.Size(meta.shape), stride=meta.stride
    )
