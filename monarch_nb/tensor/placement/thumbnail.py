"""A placement as a small picture for tables: how the tensor is cut, and no more."""

from functools import lru_cache

from monarch_nb.tensor.placement.grid import grid_of
from monarch_nb.tensor.placement.picture import looks
from monarch_nb.tensor.placement.placement import Placement

WIDE, HIGH = 36, 18
_EACH_WAY = 8  # boxes

Box = tuple[float, float, float, float, str]  # x, y, width, height, colour


@lru_cache(maxsize=1024)
def thumbnail(placement: Placement) -> tuple[Box, ...]:
    """Boxes within WIDE by HIGH pixels, all of the same size; slabs stand side by side."""
    grid = grid_of(placement, _EACH_WAY, dims=2)
    seen = looks(placement)
    slabs = range(min(len(grid.slabs), _EACH_WAY))
    columns = [(slab, column) for slab in slabs for column in range(len(grid.columns))][: 2 * _EACH_WAY]
    w, h = WIDE / len(columns), HIGH / len(grid.rows)
    boxes: list[Box] = []
    for row in range(len(grid.rows)):
        for at, (slab, column) in enumerate(columns):
            blocks = grid.at(slab, row, column)
            if blocks:
                box = (round(at * w, 1), round(row * h, 1), round(w - 1, 1), round(h - 1, 1))
                boxes.append((*box, seen[blocks[0]].fill))
    return tuple(boxes)
