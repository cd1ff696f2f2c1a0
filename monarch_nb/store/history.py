"""What processes have used over the last hour, in constant memory: the older, the fewer samples are kept."""

import threading
from array import array
from collections.abc import Iterator
from typing import NamedTuple

KEPT = 256  # samples of a rank; of more, two of the older half become one
LONG_S = 3600.0
FORMER = 64  # meshes that are kept, the newest


class UsageSample(NamedTuple):
    """What a process used at a moment; of older ones, the most in a stretch of time until then."""

    at: float  # wall clock
    cpu: float  # cores
    memory: float  # bytes
    gpu: float  # the share in use, -1 where it is not known
    gpu_memory: float  # bytes
    received: float  # bytes a second
    sent: float


_WIDTH = len(UsageSample._fields)


class _Ring:
    """The samples of one rank, as plain numbers; times count from the first."""

    __slots__ = ("numbers", "zero")

    def __init__(self, zero: float) -> None:
        self.zero = zero
        self.numbers = array("f")

    def add(self, sample: UsageSample) -> None:
        self.numbers.extend((sample.at - self.zero, *sample[1:]))
        if len(self.numbers) >= KEPT * _WIDTH:
            self._thin()

    def _thin(self) -> None:
        """Draws pairs of the older half together, and leaves out what is too old."""
        rows = [self.numbers[at : at + _WIDTH] for at in range(0, len(self.numbers), _WIDTH)]
        oldest = rows[-1][0] - LONG_S
        old, new = rows[: KEPT // 2], rows[KEPT // 2 :]
        self.numbers = array("f")
        for one, other in zip(old[::2], old[1::2], strict=True):
            if other[0] >= oldest:
                self.numbers.extend((other[0], *map(max, one[1:], other[1:])))
        for row in new:
            self.numbers.extend(row)

    def samples(self) -> Iterator[UsageSample]:
        for at in range(0, len(self.numbers), _WIDTH):
            row = self.numbers[at : at + _WIDTH]
            yield UsageSample(row[0] + self.zero, *row[1:])


class UsageHistory:
    """The samples of all ranks of processes. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._meshes: dict[str, dict[int, _Ring]] = {}

    def add(self, uid: str, rank: int, sample: UsageSample) -> None:
        """Adds a sample of a rank of a mesh of processes."""
        with self._lock:
            ranks = self._meshes.setdefault(uid, {})
            while len(self._meshes) > FORMER:
                del self._meshes[next(iter(self._meshes))]
            ring = ranks.get(rank)
            if ring is None:
                ring = ranks[rank] = _Ring(sample.at)
            ring.add(sample)

    def of(self, uid: str) -> dict[int, list[UsageSample]]:
        """The samples of a mesh of processes by base rank, the oldest first."""
        with self._lock:
            return {rank: list(ring.samples()) for rank, ring in sorted(self._meshes.get(uid, {}).items())}
