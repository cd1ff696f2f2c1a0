"""Conversion of metas to DTensorSpecs."""

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from .meta import Meta

__all__ = ["carrier", "spec_of"]

# Process groups carry these as wider ones, which hold the same numbers.
_CARRIERS = {
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e5m2: torch.float32,
    torch.float8_e4m3fnuz: torch.float32,
    torch.float8_e5m2fnuz: torch.float32,
    torch.float8_e8m0fnu: torch.float32,
}


def carrier(dtype: torch.dtype) -> torch.dtype | None:
    """The wider dtype in which collectives carry values of a dtype; None if they carry it directly."""
    return _CARRIERS.get(dtype)


def spec_of(meta: Meta, mesh: DeviceMesh) -> DTensorSpec:
    """The spec of a tensor with this meta.

    Strided shards are what views make of shards, cut in order of the mesh dimensions; not an order of their own.
    """
    facts = TensorMeta(torch.Size(meta.shape), meta.stride, meta.dtype)
    strided = any(isinstance(p, _StridedShard) for p in meta.placements)
    return DTensorSpec(
        mesh, meta.placements, tensor_meta=facts, use_strided_shard_as_shard_order=False if strided else None
    )
