"""Texts about placements, shared by all front ends."""

import math
from collections.abc import Sequence

from monarch_nb.tensor.placement.cutting import length
from monarch_nb.tensor.placement.kinds import Replicate, Shard
from monarch_nb.tensor.placement.placement import Placement, shape_text, size_text

_LISTED = 8  # different sizes of pieces that are listed


def title(placement: Placement) -> str:
    """Shape and dtype."""
    return f"{shape_text(placement.shape)} {placement.dtype}"


def mesh_text(labels: Sequence[str], sizes: Sequence[int]) -> str:
    """A mesh by its dimensions: `data=4 model=2`."""
    return " ".join(f"{label}={size}" for label, size in zip(labels, sizes, strict=True)) or "one rank"


def bytes_text(placement: Placement) -> str:
    """Bytes of the tensor, of each rank, and of all ranks if that is more."""
    whole, largest, held = placement.nbytes, placement.largest, placement.held
    each = f"{size_text(largest)} on each rank" if placement.even else f"at most {size_text(largest)} on a rank"
    more = f", {size_text(held)} on the mesh" if held != whole else ""
    return f"{size_text(whole)}: {each}{more}"


def dimension_rows(placement: Placement) -> list[tuple[str, str, str]]:
    """For each dimension of the mesh: its name and size, its placement, and what that does."""
    names = zip(placement.labels, placement.sizes, placement.kinds, strict=True)
    return [(f"{label}={size}", str(kind), _does(placement, at)) for at, (label, size, kind) in enumerate(names)]


def cutters(placement: Placement, dim: int) -> list[str]:
    """The dimensions of the mesh that cut one of the tensor, the outermost first: `data=4`."""
    return [f"{label}={size}" for label, size, kind in placement.dims(Shard) if kind.dim % len(placement.shape) == dim]


def _does(placement: Placement, at: int) -> str:
    size, kind = placement.sizes[at], placement.kinds[at]
    if size == 1:
        return "one rank: nothing to divide"
    if isinstance(kind, Replicate):
        return f"{size} copies"
    if not isinstance(kind, Shard):
        return f"{size} parts of every value, not reduced yet ({kind.op})"
    dim = kind.dim % len(placement.shape)
    pieces = _cuts(placement, dim)
    together = f" in {size}, {pieces} together" if pieces > size else ""
    return f"cuts dimension {dim}{together}: {_pieces(placement, dim)}"


def _cuts(placement: Placement, dim: int) -> int:
    """Number of pieces of a dimension, including empty ones."""
    return math.prod(size for _, size, kind in placement.dims(Shard) if kind.dim % len(placement.shape) == dim)


def _pieces(placement: Placement, dim: int) -> str:
    """Sizes of the pieces of a dimension: `1024 → 4 × 256`, `5 → 2 + 2 + 1 + 0`."""
    total = placement.shape[dim]
    found = {block.spans[dim]: length(block.spans[dim]) for block in placement.blocks}
    lengths = [found[spans] for spans in sorted(found)]
    lengths += [0] * (_cuts(placement, dim) - len(lengths)) if total else []
    if len(set(lengths)) == 1:
        return f"{total} → {len(lengths)} × {lengths[0]}"
    if len(lengths) <= _LISTED:
        return f"{total} → {' + '.join(map(str, lengths))}"
    return f"{total} → {len(lengths)} pieces of {min(lengths)} to {max(lengths)}"
