"""Ranks that were picked one by one, as in `gpus=0,2-4`, where no strides lead from one to the next."""

import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import SupportsIndex

from .ndslice import NDSlice, row_major_strides


class PickedSlice(NDSlice):
    """Base ranks in row-major order of their coordinates, each kept by itself: memory grows with their number.

    It has no strides; asking for them raises ValueError.
    """

    __slots__ = ("_places", "_ranks")

    _ranks: tuple[int, ...]
    _places: dict[int, int]

    def __init__(self, sizes: Sequence[SupportsIndex], ranks: Sequence[int]) -> None:
        lengths = tuple(map(operator.index, sizes))
        super().__init__(ranks[0], lengths, row_major_strides(lengths))
        if len(ranks) != self._len:
            raise ValueError(f"need one rank for each place of sizes {list(lengths)}, got {len(ranks)}")
        key = (lengths, tuple(ranks))
        self._fill(_ranks=tuple(ranks), _places={rank: place for place, rank in enumerate(ranks)})
        self._fill(_key=key, _hash=hash(key))

    @classmethod
    def of(cls, ranks: NDSlice, chosen: Mapping[int, "int | Sequence[int]"]) -> "PickedSlice":
        """Of some ranks those at an index (takes that dimension away) or at some indices of the dimensions given."""
        dims = [chosen.get(dim, range(size)) for dim, size in enumerate(ranks.sizes)]
        indices = [(picked,) if isinstance(picked, int) else picked for picked in dims]
        kept = [len(picked) for picked in dims if not isinstance(picked, int)]
        return cls(kept, [ranks.nditem(place) for place in itertools.product(*indices)])

    @property
    def strides(self) -> list[int]:
        """Raises ValueError: these ranks are not evenly spaced."""
        raise ValueError(f"ranks {list(self._ranks)} were picked one by one and have no strides")

    @property
    def dense(self) -> bool:
        """Whether the ranks are contiguous and in order."""
        return all(after - before == 1 for before, after in itertools.pairwise(self._ranks))

    def nditem(self, coordinates: Sequence[SupportsIndex]) -> int:
        """The base rank at some coordinates. IndexError when they are outside or too few or many."""
        return self._ranks[super().nditem(coordinates) - self._offset]

    def get(self, index: SupportsIndex) -> int:
        """The base rank at a row-major index. IndexError outside 0 … len - 1."""
        return self._ranks[super().get(index) - self._offset]

    def _locate(self, rank: int) -> list[int] | None:
        place = self._places.get(rank)
        if place is None:
            return None
        coordinates = []
        for stride in row_major_strides(self._sizes):
            at, place = divmod(place, stride)
            coordinates.append(at)
        return coordinates

    def __iter__(self) -> Iterator[int]:
        return iter(self._ranks)

    def __reduce__(self) -> tuple[object, ...]:
        return PickedSlice, (self._sizes, self._ranks)

    def __repr__(self) -> str:
        return f"PickedSlice(sizes={self.sizes}, ranks={list(self._ranks)})"
