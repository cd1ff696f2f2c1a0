"""Memory that a rank uses for the tensors of a stream, time for moving shards, and progress of a device."""

from collections.abc import Callable, Iterable, Mapping
from time import monotonic, perf_counter, sleep
from typing import Any, TypeVar

import torch
from torch.distributed.tensor import DTensor

from monarch_nb.host.linux import memory_resident, memory_used
from monarch_nb.runtime.tensor_memory import is_out_of_memory
from monarch_nb.tensor.verbs import MemoryUsed, Spent

_MOST_HELD = 256  # tensors that an error of memory names
_SETTLES_S = 0.2  # for a device to finish its work, unless it waits for another rank
G = TypeVar("G")
R = TypeVar("R")


class Stopwatch:
    """Seconds that this rank spends in redistributions, including waits for other ranks, by cell and mesh dimensions.

    Collectives inside compiled graphs are not measured. Thread-safe for reading.
    """

    def __init__(self) -> None:
        self._cell = 0
        self._spent: dict[int, dict[tuple[int, ...], float]] = {0: {}}

    def begin(self, cell: int) -> None:
        """Starts another cell; the times of the last one are kept."""
        self._spent = {self._cell: self._spent[self._cell], cell: {}}
        self._cell = cell

    def measured(self, dims: tuple[int, ...], call: Callable[[G], R]) -> Callable[[G], R]:
        """Returns the function, which waits for other ranks along these mesh dimensions, with its time measured."""
        if not dims:
            return call

        def timed(value: G) -> R:
            began = perf_counter()
            result = call(value)
            self._add(dims, perf_counter() - began)
            return result

        return timed

    def _add(self, dims: tuple[int, ...], seconds: float) -> None:
        spent = self._spent[self._cell]
        spent[dims] = spent.get(dims, 0.0) + seconds

    def spent(self) -> list[Spent]:
        """Times of the last two cells."""
        return [
            Spent(cell, dims, seconds)
            for cell, by_dims in tuple(self._spent.items())
            for dims, seconds in tuple(by_dims.items())
        ]


def held_if_full(error: BaseException, env: Mapping[int | float, object]) -> tuple[tuple[int, int], ...]:
    """Returns tensors by number with their bytes, each storage once, if the error means that memory ran out."""
    if not is_out_of_memory(type(error).__name__, str(error)):
        return ()
    largest = sorted(_storages(tuple(env.items())), key=lambda storage: -storage[1])
    rest = sum(size for _, size in largest[_MOST_HELD:])
    return (*largest[:_MOST_HELD], *([(0, rest)] if rest else ()))


def _storages(numbered: Iterable[tuple[int | float, object]]) -> Iterable[tuple[int, int]]:
    """Returns each storage of these tensors once: the number of the first tensor in it, and its bytes."""
    sizes: dict[int, tuple[int, int]] = {}
    for number, tensor in numbered:
        if isinstance(tensor, DTensor):
            storage = tensor._local_tensor.untyped_storage()
            sizes.setdefault(storage._cdata, (int(number), storage.nbytes()))
    return sizes.values()


def usage(tensors: Iterable[object], stopwatch: Stopwatch, device: str) -> MemoryUsed:
    """Returns the bytes of these tensors, each storage once, and of the process or on its device."""
    live = sum(size for _, size in _storages(enumerate(tensors)))
    if device == "cuda":
        allocated, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    else:
        allocated, peak = _of_process()
    return MemoryUsed(live, allocated, peak, stopwatch.spent())


def _of_process() -> tuple[int, int]:
    """Returns the bytes of memory that this process costs, and has cost at most: shared pages that others pay for now
    count as paid by them then."""
    used, _ = memory_used()
    resident, peak = memory_resident()
    return used, used + max(0, peak - resident)


def mark_on_device(*stream: object) -> Any:
    """Records an event behind the work that a device has been given."""
    event: Any = torch.cuda.Event  # without types
    mark = event()
    mark.record(*stream)
    return mark


def device_settles() -> bool:
    """Returns whether the device soon finishes its work, or else waits in a collective. Blocks up to `_SETTLES_S`."""
    mark, end = mark_on_device(torch.cuda.default_stream()), monotonic() + _SETTLES_S
    while not mark.query():
        if monotonic() > end:
            return False
        sleep(0.001)
    return True
