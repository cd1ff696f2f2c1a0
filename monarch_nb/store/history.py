"""The resources that processes have used over the last hour, in constant memory: older samples are thinned."""

import threading
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

MOST_SAMPLES = 256  # samples of a rank, beyond which pairs of the older half are merged
LONG_S = 3600.0
PART_S = 5.0  # parts of the time with the highest, the mean and the lowest value of all ranks
FORMER = 64  # meshes that are kept, the newest


class UsageSample(NamedTuple):
    """The resources used by a process at a moment; in older samples, the most in some time until then."""

    at: float  # wall clock
    cpu: float  # cores
    memory: float  # bytes
    gpu: float  # the share in use; -1 if not known
    gpu_memory: float  # bytes
    received: float  # bytes a second
    sent: float


class UsagePart(NamedTuple):
    """The resources used by all processes of a mesh in some seconds: a number for each field of a sample but `at`."""

    at: float  # the middle, wall clock
    high: tuple[float, ...]
    rank: tuple[int, ...]  # the rank with the highest value,
    when: tuple[float, ...]  # and its time
    mean: tuple[float, ...]
    low: tuple[float, ...]


_WIDTH = len(UsageSample._fields)
_VALUES = range(_WIDTH - 1)


class _Ring:
    """The samples of one rank, as plain numbers; times are relative to the first."""

    __slots__ = ("numbers", "zero")

    def __init__(self, zero: float) -> None:
        self.zero = zero
        self.numbers = array("f")

    def add(self, sample: UsageSample) -> None:
        self.numbers.extend((sample.at - self.zero, *sample[1:]))
        if len(self.numbers) >= MOST_SAMPLES * _WIDTH:
            self._thin()

    def _thin(self) -> None:
        """Merges pairs of samples in the older half, and drops outdated ones."""
        rows = [self.numbers[offset : offset + _WIDTH] for offset in range(0, len(self.numbers), _WIDTH)]
        oldest = rows[-1][0] - LONG_S
        old, new = rows[: MOST_SAMPLES // 2], rows[MOST_SAMPLES // 2 :]
        self.numbers = array("f")
        for first, second in zip(old[::2], old[1::2], strict=True):
            if second[0] >= oldest:
                self.numbers.extend((second[0], *map(max, first[1:], second[1:])))
        for row in new:
            self.numbers.extend(row)

    def samples(self) -> Iterator[UsageSample]:
        for offset in range(0, len(self.numbers), _WIDTH):
            row = self.numbers[offset : offset + _WIDTH]
            yield UsageSample(row[0] + self.zero, *row[1:])


class _Sum:
    """The use of all ranks in one part of the time, summed as samples come in."""

    __slots__ = ("count", "high", "low", "rank", "total", "when")

    def __init__(self, rank: int, sample: UsageSample) -> None:
        self.count = 1
        self.high, self.low, self.total = (list(sample[1:]) for _ in range(3))
        self.rank, self.when = [rank for _ in _VALUES], [sample.at for _ in _VALUES]

    def add(self, rank: int, sample: UsageSample) -> None:
        self.count += 1
        high, low, total = self.high, self.low, self.total
        for index in _VALUES:
            value = sample[index + 1]
            total[index] += value
            if value > high[index]:
                high[index], self.rank[index], self.when[index] = value, rank, sample.at
            elif value < low[index]:
                low[index] = value


class _Mesh:
    """The samples of the ranks of one mesh, and the sums over all ranks."""

    def __init__(self) -> None:
        self.rings: dict[int, _Ring] = {}
        self.sums: dict[int, _Sum] = {}  # by part of `PART_S`, the oldest first

    def add(self, rank: int, sample: UsageSample) -> None:
        ring = self.rings.get(rank)
        if ring is None:
            ring = self.rings[rank] = _Ring(sample.at)
        ring.add(sample)
        _sum_up(self.sums, rank, sample)
        while (oldest := next(iter(self.sums))) < (sample.at - LONG_S) / PART_S:
            del self.sums[oldest]


class UsageHistory:
    """The samples of all ranks of processes. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._meshes: dict[str, _Mesh] = {}

    def add(self, uid: str, rank: int, sample: UsageSample) -> None:
        """Adds a sample of a rank of a mesh of processes."""
        with self._lock:
            mesh = self._meshes.get(uid)
            if mesh is None:
                mesh = self._meshes[uid] = _Mesh()
                while len(self._meshes) > FORMER:
                    del self._meshes[next(iter(self._meshes))]
            mesh.add(rank, sample)

    def of(self, uid: str) -> dict[int, list[UsageSample]]:
        """Returns the samples of a mesh of processes by base rank, the oldest first."""
        with self._lock:
            mesh = self._meshes.get(uid)
            return {} if mesh is None else {rank: list(ring.samples()) for rank, ring in sorted(mesh.rings.items())}

    def ranks(self, uid: str) -> list[int]:
        """Returns the base ranks with samples."""
        with self._lock:
            mesh = self._meshes.get(uid)
            return [] if mesh is None else sorted(mesh.rings)

    def common(self, uid: str) -> list[UsagePart]:
        """Returns the resources used by all ranks of a mesh of processes, in parts of the time, the oldest first.

        They are summed as samples arrive, so a call costs the same for any number of ranks.
        """
        with self._lock:
            mesh = self._meshes.get(uid)
            return [] if mesh is None else [*_parts(mesh.sums)]


def common(samples: Mapping[int, Sequence[UsageSample]]) -> list[UsagePart]:
    """Returns the resources used by some ranks, in parts of the time, from their samples."""
    sums: dict[int, _Sum] = {}
    for rank, ranks in samples.items():
        for sample in ranks:
            _sum_up(sums, rank, sample)
    return [*_parts(sums)]


def _sum_up(sums: dict[int, _Sum], rank: int, sample: UsageSample) -> None:
    number = int(sample.at / PART_S)
    if (part := sums.get(number)) is not None:
        part.add(rank, sample)
    else:
        sums[number] = _Sum(rank, sample)


def _parts(sums: dict[int, _Sum]) -> Iterator[UsagePart]:
    for number, part in sorted(sums.items()):
        mean = tuple(total / part.count for total in part.total)
        yield UsagePart(
            (number + 0.5) * PART_S, tuple(part.high), tuple(part.rank), tuple(part.when), mean, tuple(part.low)
        )
