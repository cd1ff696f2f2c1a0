"""Layout of the blocks of a tensor in slabs, rows and columns for display."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from monarch_nb.tensor.placement.placement import Placement, Span

Segment = tuple[Span, ...]  # adjacent spans of a dimension that are drawn as one, usually a single span
WHOLE: Segment = ((0, 1),)  # for a dimension that a tensor does not have


@dataclass(frozen=True, slots=True)
class Grid:
    """Assignment of tensor dimensions to directions, with the blocks."""

    across: int | None  # the dimension of the tensor that runs across; None for a scalar
    down: int | None  # the dimension that runs down; None for one dimension
    deep: tuple[int, ...]  # the dimensions of which each slab has a part, outermost first
    columns: tuple[Segment, ...]
    rows: tuple[Segment, ...]
    slabs: tuple[tuple[Segment, ...], ...]  # a segment for each dimension in `deep`
    blocks: dict[tuple[Span, ...], int]  # by a span of each dimension of the tensor
    whole: tuple[Span, ...]  # the whole span of every dimension

    def at(self, slab: int, row: int, column: int) -> tuple[int, ...]:
        """Returns the blocks at a position, usually one."""
        choices: list[Segment] = [(span,) for span in self.whole]
        for dim, segment in zip(self.deep, self.slabs[slab], strict=True):
            choices[dim] = segment
        if self.down is not None:
            choices[self.down] = self.rows[row]
        if self.across is not None:
            choices[self.across] = self.columns[column]
        numbers = (self.blocks.get(key, -1) for key in itertools.product(*choices))
        return tuple(dict.fromkeys(block for block in numbers if block >= 0))


def grid_of(placement: Placement, limit: int = 64, dims: int = 3) -> Grid:
    """Lays out a tensor with at most `limit` segments each way, and at least `dims` of its dimensions.

    The last dimension runs across, the one before it down; sharded dimensions are preferred.
    """
    shape = placement.shape
    cuts = [_cuts(placement, dim) for dim in range(len(shape))]
    drawn = _drawn_dims(shape, cuts, dims)
    across = drawn[-1] if drawn else None
    down = drawn[-2] if len(drawn) > 1 else None
    deep = drawn[:-2]
    blocks = {key: number for number, block in enumerate(placement.blocks) for key in itertools.product(*block.spans)}
    per_dim = max(1, round(limit ** (1 / max(1, len(deep)))))
    return Grid(
        across,
        down,
        tuple(deep),
        WHOLE_ONLY if across is None else _segments(cuts[across], limit),
        WHOLE_ONLY if down is None else _segments(cuts[down], limit),
        tuple(itertools.product(*(_segments(cuts[dim], per_dim) for dim in deep))),
        blocks,
        tuple((0, size) for size in shape),
    )


WHOLE_ONLY: tuple[Segment, ...] = (WHOLE,)


def _cuts(placement: Placement, dim: int) -> list[Span]:
    """Returns the spans into which a dimension is divided, in order."""
    return sorted({span for block in placement.blocks for span in block.spans[dim]})


def _drawn_dims(shape: Sequence[int], cuts: Sequence[list[Span]], dims: int) -> list[int]:
    """Returns the dimensions that are drawn: all divided ones, and the largest undivided ones up to `dims`."""
    cut = [dim for dim in range(len(shape)) if len(cuts[dim]) > 1]
    uncut = sorted((dim for dim in range(len(shape)) if dim not in cut), key=lambda dim: (-shape[dim], -dim))
    return sorted(cut + uncut[: max(0, dims - len(cut))])


def _segments(cuts: Sequence[Span], limit: int) -> tuple[Segment, ...]:
    size = math.ceil(len(cuts) / limit) or 1
    return tuple(tuple(cuts[start : start + size]) for start in range(0, len(cuts), size)) or ((),)
