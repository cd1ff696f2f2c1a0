"""Values over steps, stored by mesh, name and rank; long series are thinned from their old end."""

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

MOST_VALUES = 4096  # values of one name and rank; beyond it every other one of the older half is dropped
FORMER = 64  # meshes whose values are kept


class MetricPoint(msgspec.Struct, array_like=True, frozen=True):
    """A value. `step` is None if the program has passed none."""

    mesh: str
    rank: int  # base rank
    name: str
    step: float | None
    at: float  # wall clock
    value: float


class Sample(NamedTuple):
    """A value of a series."""

    step: float
    at: float  # wall clock
    value: float


ByName = dict[str, dict[int, list[Sample]]]  # name -> base rank -> values


class Series:
    """The latest values of all meshes. One thread at a time."""

    def __init__(self) -> None:
        self._meshes: dict[str, ByName] = {}

    def add(self, points: Iterable[MetricPoint]) -> None:
        """Adds values."""
        for point in points:
            ranks = self._meshes.setdefault(point.mesh, {}).setdefault(point.name, {})
            samples = ranks.setdefault(point.rank, [])
            samples.append(Sample(point.step or 0.0, point.at, point.value))
            if len(samples) >= MOST_VALUES:
                samples[: MOST_VALUES // 2] = samples[: MOST_VALUES // 2 : 2]
        while len(self._meshes) > FORMER:
            self._meshes.pop(next(iter(self._meshes)))

    def of(self, mesh: str) -> ByName:
        """Returns a copy of the values of a mesh."""
        by_name = self._meshes.get(mesh, {})
        return {name: {rank: list(samples) for rank, samples in ranks.items()} for name, ranks in by_name.items()}
