"""Ranks: selections of them, and their coordinates in a mesh."""

from collections.abc import Container, Iterable, Sequence

from monarch_nb.shape import places
from monarch_nb.wire.header import Run

Extent = tuple[tuple[str, ...], tuple[int, ...]]
"""Labels and sizes of a mesh."""

RankIncarnation = tuple[int, int]
"""A rank and the number of its incarnation."""

Selection = Container[int] | Sequence[Run] | None
"""Some ranks: a container of them, runs as in a message, or None for all."""


def selects(selection: Selection, rank: int) -> bool:
    """Returns whether `rank` is selected."""
    if selection is None:
        return True
    if isinstance(selection, (list, tuple)) and selection and isinstance(selection[0], Run):
        return any(in_run(run, rank) for run in selection)
    return rank in selection


def in_run(run: Run, rank: int) -> bool:
    """Returns whether a run contains `rank`."""
    steps, rest = divmod(rank - run.rank, run.stride or 1)
    return rest == 0 and 0 <= steps < run.count


def coordinates(extent: Extent, index: int) -> dict[str, int]:
    """Returns the point with this row-major index."""
    labels, sizes = extent
    point: dict[str, int] = {}
    for label, size in zip(reversed(labels), reversed(sizes), strict=True):
        index, point[label] = divmod(index, size)
    return {label: point[label] for label in labels}


def label(extent: Extent, index: int) -> str:
    """Returns the suffix of a member's name, such as "{'gpus': 2/4}"."""
    sizes = dict(zip(*extent, strict=True))
    parts = (f"'{name}': {coordinate}/{sizes[name]}" for name, coordinate in coordinates(extent, index).items())
    return "{" + ", ".join(parts) + "}" if sizes else ""


def points_text(extent: Extent, indices: Iterable[int]) -> str:
    """Returns points as text, such as "hosts=0 gpus=2"; "" in a mesh without dimensions."""
    labels, sizes = extent
    return places(labels, (tuple(coordinates(extent, index).values()) for index in indices), sizes)
