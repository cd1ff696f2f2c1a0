"""The memory of one process: its present use, and its growth during a watch."""

import gc
import os
import sys
import threading
import time
import tracemalloc
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from monarch_nb._package import imported
from monarch_nb.diagnosis.verbs import GpuMemory, ProcessMemory, TensorsAlike
from monarch_nb.gpu import load
from monarch_nb.host.linux import memory_limit, memory_resident, memory_used
from monarch_nb.runtime import current_runtime
from monarch_nb.runtime.tensor_memory import LivingTensors, PeakMemory, allocation_of, held_memory, type_and_shape
from monarch_nb.wire import ENGINE, is_users_file

if TYPE_CHECKING:
    from monarch_nb.diagnosis.tensor_allocations import AllocatedAt, TensorAllocations

PERIOD_S = 0.01  # between two readings, at first
COST = 0.05  # the share of the time that readings take at most
OBJECTS_S = 1.0  # after which Python objects are first counted
MOST_SECONDS = 3600.0  # of tracing
MOST_READINGS = 64  # beyond which every other one is dropped, and half as many are taken
PARTS = 4  # of the time at whose ends memory is compared
BUSY = 0.05  # least share of the time in which the watched thread runs: else progress is measured by the wall clock
MOST_LINES = 8
FRAMES = 3  # of the stack of an allocation: with six, tracing takes three times as long
MOST_CONTAINERS = 20_000
DEEP = 4  # levels of nested containers that are counted
_HAS_CPU_CLOCK = hasattr(time, "pthread_getcpuclockid")


@dataclass(frozen=True)
class Growth:
    """Memory that was allocated at one line in the watched time and still lives; or all of a process.

    `sizes` are the bytes at the beginning and at the ends of four equal parts of the time, in which the program's
    thread ran.
    """

    source: str
    what: str  # "float32 [64, 1024]", "Python objects", "resident"
    device: str
    count: int  # allocations that live
    sizes: tuple[int, ...]

    @property
    def size(self) -> int:
        """The growth in bytes."""
        return self.sizes[-1] - self.sizes[0]


@dataclass(frozen=True)
class MemoryGrowth:
    """The allocations of a process during a watch."""

    seconds: float
    resident: Growth
    lines: tuple[Growth, ...]
    containers: tuple[tuple[str, int], ...]  # lists and dicts that have grown, and by how many entries
    peaks: tuple[PeakMemory, ...] = ()  # of the tensors on each device


# -- now ---------------------------------------------------------------------------------------------------------------


def memory_use() -> ProcessMemory:
    """Returns the memory that this process uses. Holds the GIL while it counts the tensors."""
    used, measure = memory_used()
    resident, peak = memory_resident()
    torch = imported("torch")
    cuda = reserved = 0
    with suppress(Exception):  # a device that has failed
        if torch is not None and torch.cuda.is_initialized():
            cuda, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    limit, free = memory_limit()
    living = LivingTensors()
    return ProcessMemory(
        *(used, measure, resident, peak, limit, free, cuda, reserved),
        tuple(_tensors(living)),
        held_memory(living),
        None if (gpu := load()) is None else GpuMemory(gpu.share, gpu.own, gpu.used, gpu.total),
    )


def _tensors(living: LivingTensors) -> Iterator[TensorsAlike]:
    """Yields the tensors that live, by type and shape, the largest in total first."""
    keys = set()
    sizes, counts = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for tensor in living.all:
        if (memory := allocation_of(tensor)) is not None and memory.key not in keys:
            keys.add(memory.key)
            kind = type_and_shape(tensor.dtype, tensor.shape), memory.device
            sizes[kind] += memory.size
            counts[kind] += 1
    for (tensor_type, device), size in sizes.most_common(MOST_LINES):
        yield TensorsAlike(tensor_type, device, counts[tensor_type, device], size)


# -- during a watch ----------------------------------------------------------------------------------------------------


class _Moment(NamedTuple):
    """A time since the beginning of a watch, in seconds."""

    wall: float
    cpu: float  # of it, used by the watched thread

    def share(self, total: "_Moment") -> float:
        """Returns the share of the program's progress until a later moment. A waiting thread makes no progress."""
        if total.cpu > BUSY * total.wall:
            return self.cpu / total.cpu
        return self.wall / total.wall if total.wall else 0.0  # other threads do the work


class _Clock:
    """Measures moments of the thread that has created it."""

    def __init__(self) -> None:
        self._cpu = time.pthread_getcpuclockid(threading.get_ident()) if _HAS_CPU_CLOCK else None
        self._began = self._now()

    def _now(self) -> _Moment:
        cpu = time.clock_gettime(self._cpu) if self._cpu is not None else 0.0
        return _Moment(time.monotonic(), cpu)

    def moment(self) -> _Moment:
        """Returns the present moment."""
        now = self._now()
        return _Moment(now.wall - self._began.wall, now.cpu - self._began.cpu)


class _Reading:
    __slots__ = ("moment", "resident", "tensors")

    def __init__(self, moment: _Moment, tensors: "dict[AllocatedAt, tuple[int, int]]") -> None:
        self.moment, self.tensors = moment, tensors
        self.resident = memory_resident()[0]


class _Objects:
    """Python objects that live at a moment, by the line that has allocated them."""

    def __init__(self, moment: _Moment, traces: tracemalloc.Snapshot) -> None:
        self.moment = moment
        self.sizes, self.counts = Counter[str](), Counter[str]()
        sizes, counts = defaultdict[int, int](int), defaultdict[int, int](int)
        frames = {}  # by id: traces of one line share one object, and new objects cost much during tracing
        for _, size, trace, _ in vars(traces.traces)["_traces"]:
            frames[id(trace)] = trace
            sizes[id(trace)] += size
            counts[id(trace)] += 1
        for key, trace in frames.items():
            source = next((f"{file}:{line}" for file, line in trace if is_users_file(file)), "")
            if source or not any(file.startswith(ENGINE) for file, _ in trace):
                self.sizes[source] += sizes[key]
                self.counts[source] += counts[key]


class GrowthReadings:
    """Records allocations of Python and, on this thread, of PyTorch."""

    def __init__(self) -> None:
        self._allocations = recorded_allocations()
        self._own_trace = not tracemalloc.is_tracing()
        if self._own_trace:
            tracemalloc.start(FRAMES)
        self._containers = dict(_containers())
        self._over, self._clock = threading.Event(), _Clock()
        self._readings = [_Reading(_Moment(0.0, 0.0), {})]
        self._objects: list[_Objects] = []  # each after twice the time of the previous one
        self._thread = threading.Thread(target=self._run, name="monarch-memory", daemon=True)
        self._thread.start()

    def _alive(self) -> "dict[AllocatedAt, tuple[int, int]]":
        return self._allocations.alive() if self._allocations is not None else {}

    def _run(self) -> None:
        pause, next_objects = PERIOD_S, OBJECTS_S
        while not self._over.wait(pause) and (moment := self._clock.moment()).wall < MOST_SECONDS:
            began = time.thread_time()
            self._readings.append(_Reading(moment, self._alive()))
            pause = max(pause, (time.thread_time() - began) / COST)
            if moment.wall >= next_objects and tracemalloc.is_tracing():
                counted_at = self._clock.moment()  # the reading above may have waited for a busy program
                self._objects.append(_Objects(counted_at, tracemalloc.take_snapshot()))
                next_objects = 2 * counted_at.wall
            if len(self._readings) > MOST_READINGS:
                del self._readings[1::2]
                pause *= 2
        if not self._over.is_set():  # the process that has begun the watch may have ended
            self._stop_tracing()

    def end(self) -> MemoryGrowth:
        """Ends the readings and returns the growth."""
        moment = self._clock.moment()
        self._over.set()
        self._thread.join()  # the thread may be counting objects, which takes a while
        peaks = () if self._allocations is None else self._allocations.end()
        gc.collect()
        self._readings.append(_Reading(moment, self._alive()))
        ends = self._ends(moment)
        lines = [*self._tensor_lines(ends)]
        snapshots = [snapshot for snapshot in self._objects if snapshot.moment.wall < moment.wall]
        if tracemalloc.is_tracing():
            traces = tracemalloc.take_snapshot()
            self._stop_tracing()  # else the rest would be traced too
            lines += _object_lines([*snapshots, _Objects(moment, traces)])
        resident = Growth("", "resident", "cpu", 1, tuple(reading.resident for reading in ends))
        lines.sort(key=lambda line: -line.size)
        grown = Counter(dict(_containers()))
        grown.subtract(self._containers)
        containers = tuple((name, more) for name, more in grown.most_common(MOST_LINES) if more > 0)
        return MemoryGrowth(moment.wall, resident, tuple(lines[:MOST_LINES]), containers, peaks)

    def _stop_tracing(self) -> None:
        if self._own_trace and tracemalloc.is_tracing():
            tracemalloc.stop()

    def _ends(self, total: _Moment) -> "list[_Reading]":
        """Returns the readings at the beginning and at the ends of the parts of the time."""
        shares = [(reading.moment.share(total), reading) for reading in self._readings]
        parts = [part / PARTS for part in range(PARTS)]
        return [min(shares, key=lambda pair: abs(pair[0] - part))[1] for part in parts] + [self._readings[-1]]

    def _tensor_lines(self, ends: "list[_Reading]") -> Iterator[Growth]:
        for allocation, (_, count) in ends[-1].tensors.items():
            sizes = tuple(reading.tensors.get(allocation, (0, 0))[0] for reading in ends)
            yield Growth(allocation.source, allocation.what, allocation.device, count, sizes)


def recorded_allocations(
    operation_in: "Callable[[FrameType], tuple[int, int] | None] | None" = None,
) -> "TensorAllocations | None":
    """Records the allocations of this thread from now on; returns None if PyTorch is not imported."""
    if "torch" not in sys.modules:
        return None
    from monarch_nb.diagnosis.tensor_allocations import TensorAllocations

    return TensorAllocations(operation_in)


class PeakReadings:
    """Records the allocations of `worker`, an actor for sharded tensors whose class this module does not import."""

    def __init__(self, worker: Any) -> None:
        self._worker, self._began = worker, time.monotonic()
        self._allocations = recorded_allocations(worker.operation_in)

    def end(self) -> MemoryGrowth:
        """Ends the recording and returns the peaks alone."""
        peaks: tuple[PeakMemory, ...] = ()
        if self._allocations is not None:
            self._allocations.label_numbers(self._worker.local_tensors())
            peaks = self._allocations.end()
        resident = Growth("", "resident", "cpu", 1, (0,))
        return MemoryGrowth(time.monotonic() - self._began, resident, (), (), peaks)


def _object_lines(snapshots: Sequence[_Objects]) -> Iterator[Growth]:
    """Yields the lines that have allocated Python objects, with sizes interpolated linearly between snapshots."""
    last = snapshots[-1]
    for source, size in last.sizes.most_common(MOST_LINES):
        points = [(0.0, 0), *((snapshot.moment.share(last.moment), snapshot.sizes[source]) for snapshot in snapshots)]
        sizes = [_between(points, part / PARTS) for part in range(PARTS)]
        yield Growth(source, "Python objects", "cpu", last.counts[source], (*sizes, size))


def _between(points: Sequence[tuple[float, int]], share: float) -> int:
    """Returns the value at a share of the time, by linear interpolation between the neighbouring points."""
    after = next(index for index in range(1, len(points)) if points[index][0] >= share or index == len(points) - 1)
    (begin, low), (end, high) = points[after - 1], points[after]
    return low + int((high - low) * (share - begin) / (end - begin)) if end > begin else high


def _containers() -> Iterator[tuple[str, int]]:
    """Yields the lists, dicts and sets of actors and of the program's modules, with their numbers of entries."""
    roots: list[tuple[str, object]] = [
        (cell.spec.class_name.rpartition(".")[2], vars(cell.obj))
        for cell in tuple(current_runtime().cells.values())
        if hasattr(cell.obj, "__dict__")
    ]
    roots += [
        (name, vars(module))
        for name, module in tuple(sys.modules.copy().items())
        if type(module) is ModuleType and is_users_file(getattr(module, "__file__", None) or os.devnull)
    ]
    ids: set[int] = set()
    yield from islice(_nested(roots, ids, DEEP), MOST_CONTAINERS)


def _nested(named: Iterable[tuple[str, object]], ids: set[int], depth: int) -> Iterator[tuple[str, int]]:
    for name, value in named:
        if id(value) in ids or type(value) not in (list, dict, set):
            continue
        ids.add(id(value))
        assert isinstance(value, list | dict | set)
        yield name, len(value)
        if depth and isinstance(value, dict):
            yield from _nested([(f"{name}.{key}", item) for key, item in tuple(value.items())], ids, depth - 1)
