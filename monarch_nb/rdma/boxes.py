"""Which stretches of bytes two shards of one array have in common."""

import itertools
from collections.abc import Iterator
from math import prod

import msgspec

__all__ = ["Box", "Stretch", "common"]


class Box(msgspec.Struct, array_like=True, frozen=True):
    """A shard of an array: where it starts and how far it goes in each dimension. Its own memory is row-major."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        """Its elements."""
        return prod(self.shape)

    def inside(self, shape: tuple[int, ...]) -> bool:
        """Whether an array of that shape has all of it."""
        return len(self.start) == len(self.shape) == len(shape) and all(
            0 <= start <= start + size <= whole
            for start, size, whole in zip(self.start, self.shape, shape, strict=True)
        )

    def __and__(self, other: "Box") -> "Box":
        """What is in both; it may be empty."""
        starts = tuple(max(a, b) for a, b in zip(self.start, other.start, strict=True))
        ends = (min(a + m, b + n) for a, m, b, n in zip(self.start, self.shape, other.start, other.shape, strict=True))
        return Box(starts, tuple(max(0, end - start) for start, end in zip(starts, ends, strict=True)))

    def place(self, point: tuple[int, ...]) -> int:
        """The number of an element among those of the box, row-major."""
        number = 0
        for at, start, size in zip(point, self.start, self.shape, strict=True):
            number = number * size + at - start
        return number


class Stretch(msgspec.Struct, array_like=True, frozen=True):
    """Elements that lie side by side in both shards."""

    source: int  # the first, in the one
    target: int  # and in the other
    count: int


def common(source: Box, target: Box) -> Iterator[Stretch]:
    """The stretches that two shards have in common, as long as they can be, in order."""
    both = source & target
    if not both.count:
        return
    whole = len(both.shape)  # from this dimension on, both shards have nothing but what they have in common
    while whole and both.shape[whole - 1] == source.shape[whole - 1] == target.shape[whole - 1]:
        whole -= 1
    outer = max(0, whole - 1)
    count = prod(both.shape[outer:])
    ranges = (range(start, start + size) for start, size in zip(both.start[:outer], both.shape[:outer], strict=True))
    for point in itertools.product(*ranges):
        corner = (*point, *both.start[outer:])
        yield Stretch(source.place(corner), target.place(corner), count)
