"""Agreement of ranks before they exchange values of their own: each of them has one, and the shapes fit.

A rank that left others alone in a collective would block them, and different sizes there end processes.
"""

import zlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from monarch_nb.tensor.failure import Failure, LostInputError, LostTensor

_NONE = (1 << 62) - 1


class DifferentShapesError(ValueError):
    """Ranks hold tensors of different shapes or dtypes, and were to exchange them."""


class Agreement:
    """The agreement of all ranks of a mesh on the inputs of one operation."""

    def __init__(self, mesh: DeviceMesh, operation: str) -> None:
        self._mesh, self._operation = mesh, operation

    def reached(self, tensors: Sequence[DTensor | LostTensor]) -> None:
        """Blocks until all ranks have their inputs.

        Raises LostInputError on all of them where one lacks an input, DifferentShapesError where shapes differ.
        """
        lost = next((item.failure for item in tensors if isinstance(item, LostTensor)), None)
        shapes = [(tuple(item._local_tensor.shape), str(item.dtype)) for item in tensors if isinstance(item, DTensor)]
        number = zlib.crc32(repr(shapes).encode()) if lost is None else 0
        key = (_NONE, _NONE, _NONE) if lost is None else (lost.number, lost.stream, lost.rank)
        # The number of the one with the smallest key stands for its stream and rank, too.
        minima = torch.tensor(
            [number if lost is None else _NONE, -number if lost is None else _NONE, *key], device=self._mesh.device_type
        )
        for dim in range(self._mesh.ndim):
            dist.all_reduce(minima, dist.ReduceOp.MIN, group=self._mesh.get_group(dim))
        least, most, first, stream, rank = minima.tolist()
        if lost is not None:
            raise LostInputError(lost)
        if first != _NONE:
            text = "another rank has lost what it was to give"
            raise LostInputError(Failure(first, self._operation, rank, "LostInputError", text, "", stream, True))
        if least != -most:
            own_text = " and ".join(str(shape) for shape, _ in shapes)
            raise DifferentShapesError(f"ranks hold tensors of different shapes or dtypes: this one {own_text}")
