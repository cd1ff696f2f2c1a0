"""Placements along one mesh dimension: sharded, replicated or partial."""

from typing import Any

import msgspec


class Shard(msgspec.Struct, frozen=True, tag="shard"):
    """Cuts dimension `dim` of the tensor as torch.chunk does: the last pieces may be smaller, or empty.

    With `factor` > 1 each of so many equal parts of the dimension is cut, and a rank has one piece of each.
    """

    dim: int
    factor: int = 1

    def __str__(self) -> str:
        return f"Shard({self.dim})" if self.factor == 1 else f"Shard({self.dim}, in {self.factor} parts)"


class Replicate(msgspec.Struct, frozen=True, tag="replicate"):
    """Replicates the tensor on every rank."""

    def __str__(self) -> str:
        return "Replicate()"


class Partial(msgspec.Struct, frozen=True, tag="partial"):
    """Every rank has a partial value of each element; reducing them with `op` gives the tensor."""

    op: str = "sum"

    def __str__(self) -> str:
        return f"Partial({self.op})"


Kind = Shard | Replicate | Partial


def kind_of(placement: Any) -> Kind:
    """Converts a placement of PyTorch or of this module. Raises TypeError for anything else."""
    if isinstance(placement, Kind):
        return placement
    if hasattr(placement, "reduce_op"):
        return Partial(str(placement.reduce_op))
    if hasattr(placement, "dim"):
        return Shard(int(placement.dim), int(getattr(placement, "split_factor", 1)))
    if getattr(placement, "is_replicate", bool)():
        return Replicate()
    raise TypeError(f"{placement!r} is no placement: use Shard(dim), Replicate() or Partial(op)")
