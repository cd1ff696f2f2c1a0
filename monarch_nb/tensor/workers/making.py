"""Tensors made of nothing: each worker makes its own part, and nobody the whole where that can be helped."""

from collections.abc import Callable

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from monarch_nb.tensor.commands import Making
from monarch_nb.tensor.propagation import overload


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
        return DTensor.from_local(
            made, mesh, meta.placements, run_check=False, shape=torch.Size(meta.shape), stride=meta.stride
        )

    return part if told.in_parts else whole
