"""Ranks in the notation of users: `gpus=0-2,5`, `hosts=0 gpus=0-3; hosts=1 gpus=2`."""

from collections.abc import Iterable, Sequence

from .region import Region


def spans(numbers: Iterable[int]) -> str:
    """Returns numbers as text, with runs merged: `0-2,5`."""
    pairs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if pairs and pairs[-1][1] == number - 1:
            pairs[-1][1] = number
        else:
            pairs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in pairs)


def places(labels: Sequence[str], points: Iterable[Sequence[int]], sizes: Sequence[int] = ()) -> str:
    """Returns some places of a mesh with these dimensions as text; "" for a mesh without any.

    With `sizes`, dimensions of size 1 are left out if another one stays: they distinguish no ranks.
    """
    shown_dims = _distinguishing(sizes) if sizes else range(len(labels))
    shown = {tuple(point[dim] for dim in shown_dims) for point in points}
    return "; ".join(_places(tuple(labels[dim] for dim in shown_dims), shown))


def places_of(region: Region, ranks: Iterable[int]) -> str:
    """Returns the places of some base ranks of a mesh as text; "" for a mesh without dimensions."""
    points = (region.ndslice.coordinates(rank) for rank in ranks)
    return places(region.labels, points, region.ndslice.sizes)


def first_places_of(region: Region, ranks: Iterable[int]) -> str:
    """As `places_of`, along the first dimension alone, such as that of hosts."""
    points = (region.ndslice.coordinates(rank)[:1] for rank in ranks)
    return places(region.labels[:1], points, region.ndslice.sizes[:1])


def _distinguishing(sizes: Sequence[int]) -> Sequence[int]:
    """Returns the dimensions that distinguish ranks; the last one of a mesh with a single rank."""
    return [dim for dim, size in enumerate(sizes) if size > 1] or range(len(sizes))[-1:]


def _places(labels: tuple[str, ...], points: set[tuple[int, ...]]) -> list[str]:
    if not labels:
        return [""]
    rests: dict[int, set[tuple[int, ...]]] = {}
    for first, *rest in sorted(points):
        rests.setdefault(first, set()).add(tuple(rest))
    groups: dict[frozenset[tuple[int, ...]], list[int]] = {}
    for first, rest_points in rests.items():
        groups.setdefault(frozenset(rest_points), []).append(first)
    return [
        f"{labels[0]}={spans(firsts)} {tail}".rstrip()
        for rest_set, firsts in groups.items()
        for tail in _places(labels[1:], set(rest_set))
    ]
