"""The memory of one process: what it uses now, and what grows while it is watched."""

import gc
import os
import sys
import threading
import time
import tracemalloc
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import islice
from types import ModuleType
from typing import TYPE_CHECKING

from monarch_nb.diagnosis.verbs import ProcessMemory, TensorsAlike
from monarch_nb.host.linux import memory_limit, memory_resident, memory_used
from monarch_nb.runtime import current_runtime
from monarch_nb.wire import ENGINE, is_users_file

if TYPE_CHECKING:
    from monarch_nb.diagnosis.tensor_allocations import AllocatedAt

PERIOD_S = 0.1  # between two readings, at first
OBJECTS_S = 1.0  # after which Python objects are first counted
MOST_SECONDS = 3600.0  # of tracing
MOST_READINGS = 64  # then every other one is dropped, and they are taken half as often
PARTS = 4  # of the time, at whose ends memory is compared
MOST_LINES = 8
FRAMES = 3  # of the stack of an allocation: with six, tracing takes three times as long
MOST_CONTAINERS = 20_000
DEEP = 4  # containers in containers that are counted


@dataclass(frozen=True)
class Growth:
    """Memory that was allocated at one line in the watched time and still lives; or all of a process.

    `sizes` are the bytes at the beginning and at the ends of four equal parts of the time.
    """

    source: str
    what: str  # "float32 [64, 1024]", "Python objects", "resident"
    device: str
    count: int  # allocations that live
    sizes: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes by which it has grown."""
        return self.sizes[-1] - self.sizes[0]


@dataclass(frozen=True)
class MemoryGrowth:
    """What a process has allocated while it was watched."""

    seconds: float
    resident: Growth
    lines: tuple[Growth, ...]
    containers: tuple[tuple[str, int], ...]  # lists and dicts that have grown, and by how many entries


# -- now ---------------------------------------------------------------------------------------------------------------


def memory_use() -> ProcessMemory:
    """What this process uses. Holds the GIL while it counts the tensors."""
    used, measure = memory_used()
    resident, peak = memory_resident()
    torch = sys.modules.get("torch")
    cuda = reserved = 0
    with suppress(Exception):  # a device that has failed
        if torch is not None and torch.cuda.is_initialized():
            cuda, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    limit, free = memory_limit()
    return ProcessMemory(used, measure, resident, peak, limit, free, cuda, reserved, tuple(_tensors()))


def _tensors() -> Iterator[TensorsAlike]:
    """The tensors that live, by kind, those that take the most memory first."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "Tensor"):
        return
    seen = set()
    sizes, counts = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for value in gc.get_objects():  # noqa: TID251 - the program has made them
        if not issubclass(type(value), torch.Tensor):  # without asking the object, which may be anything
            continue
        with suppress(Exception):  # tensors without a storage
            storage = value.untyped_storage()
            if storage._cdata not in seen and value.device.type != "meta":
                seen.add(storage._cdata)
                kind = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}", str(value.device)
                sizes[kind] += storage.nbytes()
                counts[kind] += 1
    for (what, device), size in sizes.most_common(MOST_LINES):
        yield TensorsAlike(what, device, counts[what, device], size)


# -- while it is watched -----------------------------------------------------------------------------------------------


class _Reading:
    __slots__ = ("objects", "resident", "seconds", "tensors")

    def __init__(self, seconds: float, tensors: "dict[AllocatedAt, tuple[int, int]]") -> None:
        self.seconds, self.tensors = seconds, tensors
        self.resident = memory_resident()[0]


class _Objects:
    """Python objects that live at a time, by the line that has allocated them."""

    def __init__(self, seconds: float, traces: tracemalloc.Snapshot) -> None:
        self.seconds = seconds
        self.sizes, self.counts = Counter[str](), Counter[str]()
        sizes, counts = defaultdict[int, int](int), defaultdict[int, int](int)
        frames = {}  # by id: traces of the same place share one object, and while all is traced, new ones cost much
        for _, size, trace, _ in vars(traces.traces)["_traces"]:
            frames[id(trace)] = trace
            sizes[id(trace)] += size
            counts[id(trace)] += 1
        for key, trace in frames.items():
            source = next((f"{file}:{line}" for file, line in trace if is_users_file(file)), "")
            if source or not any(file.startswith(ENGINE) for file, _ in trace):
                self.sizes[source] += sizes[key]
                self.counts[source] += counts[key]


class _GrowthWatch:
    """Records allocations of Python and, on this thread, of PyTorch."""

    def __init__(self) -> None:
        self._entered = ExitStack()
        self._alive: Callable[[], dict[AllocatedAt, tuple[int, int]]] = dict
        if "torch" in sys.modules:
            from monarch_nb.diagnosis.tensor_allocations import TensorAllocations

            self._alive = self._entered.enter_context(TensorAllocations()).alive
        self._own_trace = not tracemalloc.is_tracing()
        if self._own_trace:
            tracemalloc.start(FRAMES)
        self._containers = dict(_containers())
        self._over, self._began = threading.Event(), time.monotonic()
        self._readings = [_Reading(0.0, {})]
        self._objects: list[_Objects] = []  # each after twice the time of the one before
        self._thread = threading.Thread(target=self._run, name="monarch-memory", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        pause, next_objects = PERIOD_S, OBJECTS_S
        while not self._over.wait(pause) and (seconds := time.monotonic() - self._began) < MOST_SECONDS:
            self._readings.append(_Reading(seconds, self._alive()))
            if seconds >= next_objects and tracemalloc.is_tracing():
                self._objects.append(_Objects(seconds, tracemalloc.take_snapshot()))
                next_objects = 2 * seconds
            if len(self._readings) > MOST_READINGS:
                del self._readings[1::2]
                pause *= 2
        if not self._over.is_set():  # whoever has begun it may be gone
            self._stop_tracing()

    def end(self) -> MemoryGrowth:
        seconds = time.monotonic() - self._began
        self._over.set()
        self._thread.join()  # it may count objects, which takes a while
        self._entered.close()
        gc.collect()
        self._readings.append(_Reading(seconds, self._alive()))
        ends = self._ends(seconds)
        lines = [*self._tensor_lines(ends)]
        counted = [each for each in self._objects if each.seconds < seconds]
        if tracemalloc.is_tracing():
            traces = tracemalloc.take_snapshot()
            self._stop_tracing()  # else what follows would be traced, too
            lines += _object_lines([*counted, _Objects(seconds, traces)])
        resident = Growth("", "resident", "cpu", 1, tuple(each.resident for each in ends))
        lines.sort(key=lambda line: -line.size)
        grown = Counter(dict(_containers()))
        grown.subtract(self._containers)
        containers = tuple((name, more) for name, more in grown.most_common(MOST_LINES) if more > 0)
        return MemoryGrowth(seconds, resident, tuple(lines[:MOST_LINES]), containers)

    def _stop_tracing(self) -> None:
        if self._own_trace and tracemalloc.is_tracing():
            tracemalloc.stop()

    def _ends(self, seconds: float) -> "list[_Reading]":
        """The readings at the beginning and at the ends of the parts of the time."""
        times = [seconds * part / PARTS for part in range(PARTS)]
        return [min(self._readings, key=lambda each: abs(each.seconds - at)) for at in times] + [self._readings[-1]]

    def _tensor_lines(self, ends: "list[_Reading]") -> Iterator[Growth]:
        for at, (_, count) in ends[-1].tensors.items():
            sizes = tuple(each.tensors.get(at, (0, 0))[0] for each in ends)
            yield Growth(at.source, at.what, at.device, count, sizes)


def _object_lines(known: Sequence[_Objects]) -> Iterator[Growth]:
    """The lines that have allocated Python objects; between the times that are known, they are taken to grow evenly."""
    last = known[-1]
    for source, size in last.sizes.most_common(MOST_LINES):
        points = [(0.0, 0), *((each.seconds, each.sizes[source]) for each in known)]
        sizes = [_between(points, last.seconds * part / PARTS) for part in range(PARTS)]
        yield Growth(source, "Python objects", "cpu", last.counts[source], (*sizes, size))


def _between(points: Sequence[tuple[float, int]], seconds: float) -> int:
    """The value at a time, on the line between the points before and after it."""
    after = next(index for index in range(1, len(points)) if points[index][0] >= seconds)
    (begin, low), (end, high) = points[after - 1], points[after]
    return low + int((high - low) * (seconds - begin) / (end - begin)) if end > begin else high


def _containers() -> Iterator[tuple[str, int]]:
    """The lists, dicts and sets of actors and of the program's modules, and how many entries they have."""
    roots: list[tuple[str, object]] = [
        (cell.spec.class_name.rpartition(".")[2], vars(cell.obj))
        for cell in tuple(current_runtime().cells.values())
        if hasattr(cell.obj, "__dict__")
    ]
    roots += [
        (name, vars(module))
        for name, module in tuple(sys.modules.items())
        if type(module) is ModuleType and is_users_file(getattr(module, "__file__", None) or os.devnull)
    ]
    seen: set[int] = set()
    yield from islice(_below(roots, seen, DEEP), MOST_CONTAINERS)


def _below(named: Iterable[tuple[str, object]], seen: set[int], deep: int) -> Iterator[tuple[str, int]]:
    for name, value in named:
        if id(value) in seen or type(value) not in (list, dict, set):
            continue
        seen.add(id(value))
        assert isinstance(value, list | dict | set)
        yield name, len(value)
        if deep and isinstance(value, dict):
            yield from _below([(f"{name}.{key}", each) for key, each in tuple(value.items())], seen, deep - 1)


_watches: dict[int, _GrowthWatch] = {}


def begin(number: int) -> None:
    """Begins to watch what this process, and PyTorch on this thread, allocates."""
    _watches[number] = _GrowthWatch()


def end(number: int) -> MemoryGrowth:
    """Ends it. Raises RuntimeError if none runs."""
    if number not in _watches:
        raise RuntimeError("its process is a new one, which was not watched")
    return _watches.pop(number).end()
