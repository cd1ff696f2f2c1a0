"""Collectives of ranks that share a GPU: through the host's memory, by gloo.

NCCL refuses two ranks on one device. Gloo takes tensors of a device in the plain collectives of torch.distributed, and
ends the process (a segmentation fault, seen with PyTorch 2.11) in the functional ones, which DTensor and compiled code
call: those get a kernel for CUDA tensors here that copies to the CPU, exchanges there, and copies back.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map_only

# By namespace; torch/csrc/distributed/c10d/Functional.cpp has their schemas.
_OPERATIONS = {
    "_dtensor": ("shard_dim_alltoall",),
    "_c10d_functional": (
        "all_reduce",
        "all_reduce_",
        "all_reduce_coalesced",
        "all_reduce_coalesced_",
        "all_gather_into_tensor",
        "all_gather_into_tensor_out",
        "all_gather_into_tensor_coalesced",
        "reduce_scatter_tensor",
        "reduce_scatter_tensor_out",
        "reduce_scatter_tensor_coalesced",
        "all_to_all_single",
        "broadcast",
        "broadcast_",
    ),
}


class Staging:
    """Installs the kernels in this process; `end` removes them."""

    def __init__(self, key: str = "CUDA") -> None:
        make: Any = torch.library.Library  # without types
        self._libraries: list[Any] = []
        for space, names in _OPERATIONS.items():
            library = make(space, "IMPL")
            self._libraries.append(library)
            for name in names:
                packet = getattr(getattr(torch.ops, space), name, None)
                if packet is not None:  # older versions of PyTorch lack some
                    library.impl(name, _stage(packet.default), key)

    def end(self) -> None:
        """Removes the kernels."""
        while self._libraries:
            self._libraries.pop()._destroy()


def _stage(operation: OpOverload) -> Callable[..., object]:
    in_place = operation._schema.name.endswith("_")

    def call(*args: object, **kwargs: object) -> object:
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        device = inputs[0].device
        copies, options = tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), (args, kwargs))
        results = operation(*copies, **options)
        results = tree_map_only(torch.Tensor, torch.ops._c10d_functional.wait_tensor.default, results)
        target = args[0] if in_place else kwargs.get("out")
        if target is not None:
            for output, result in zip(tree_leaves(target), tree_leaves(results), strict=True):
                output.copy_(result)
            return target
        return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), results)

    return call
