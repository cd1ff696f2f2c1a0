"""Ranks as people write them: `gpus=0-2,5`, `hosts=0 gpus=0-3; hosts=1 gpus=2`."""

from collections.abc import Iterable, Sequence


def spans(numbers: Iterable[int]) -> str:
    """Numbers with runs drawn together: `0-2,5`."""
    found: list[list[int]] = []
    for number in sorted(set(numbers)):
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in found)


def places(labels: Sequence[str], points: Iterable[Sequence[int]]) -> str:
    """Some places of a mesh with these dimensions; "" for a mesh without any."""
    return "; ".join(_places(tuple(labels), {tuple(point) for point in points}))


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
