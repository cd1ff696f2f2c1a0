"""A mesh of processes as a table of text: where each one is."""

import itertools

from monarch_nb.mesh.text_table import text_table
from monarch_nb.shape import Region
from monarch_nb.wire import Layout, host_name


def proc_table(layout: Layout, region: Region) -> str:
    """Host and number there of each process: the last dimension goes to the right, the others down."""
    cells = [f"{host_name(layout.host_of(rank))}[{rank % layout.per_host}]" for rank in region.ranks()]
    if not region.labels:
        return cells[0]
    *down, right = region.labels
    *sizes, wide = region.ndslice.sizes
    places = itertools.product(*(range(size) for size in sizes))
    rows = [[*map(str, place), *cells[at * wide : (at + 1) * wide]] for at, place in enumerate(places)]
    return text_table([[*down, *(f"{right}={place}" for place in range(wide))], *rows])
