"""Memory that a rank uses for the tensors of a stream, and time for moving shards between ranks."""

from collections.abc import Iterable, Sequence
from time import perf_counter

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Placement

from monarch_nb.host.linux import memory_resident, memory_used
from monarch_nb.tensor.propagation import Meta, placed
from monarch_nb.tensor.verbs import MemoryUsed, Spent


class Stopwatch:
    """Seconds that this rank spends in redistributions, including waits for other ranks, by cell and mesh dimensions.

    Collectives inside compiled graphs are not measured. Thread-safe for reading.
    """

    def __init__(self) -> None:
        self._cell = 0
        self._spent: dict[int, dict[tuple[int, ...], float]] = {0: {}}
        self._begun: dict[int, str] = {}  # groups of pending sums, by id of the result

    def begin(self, cell: int) -> None:
        """Starts another cell; the times of the last one are kept."""
        self._spent = {self._cell: self._spent[self._cell], cell: {}}
        self._cell = cell

    def placed(self, local: torch.Tensor, now: DTensorSpec, meta: Meta, spec: DTensorSpec) -> torch.Tensor:
        """Measures `propagation.placed`."""
        began = perf_counter()
        found = placed(local, now, meta, spec)
        took = perf_counter() - began
        dims = _moving(now.placements, spec.placements)
        if dims:
            self._add(dims, took)
        return found

    def begin_sum(self, shard: torch.Tensor, how: str, group: str) -> torch.Tensor:
        """Starts a sum over a group. Only the wait in `end_sum` counts."""
        found: torch.Tensor = torch.ops._c10d_functional.all_reduce.default(shard, how, group)
        self._begun[id(found)] = group
        return found

    def end_sum(self, shard: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        """Waits for the sum."""
        began = perf_counter()
        found: torch.Tensor = torch.ops._c10d_functional.wait_tensor(shard)
        took = perf_counter() - began
        group = self._begun.pop(id(shard), "")
        dim = next((dim for dim in range(mesh.ndim) if mesh.get_group(dim).group_name == group), None)
        if dim is not None:
            self._add((dim,), took)
        return found

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


def usage(tensors: Iterable[object], stopwatch: Stopwatch, device: str) -> MemoryUsed:
    """Bytes in use by these tensors, each storage once, and by the process or on its device."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            storage = tensor._local_tensor.untyped_storage()
            sizes[storage._cdata] = storage.nbytes()
    if device == "cuda":
        allocated, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    else:
        allocated, peak = _of_process()
    return MemoryUsed(sum(sizes.values()), allocated, peak, stopwatch.spent())


def _of_process() -> tuple[int, int]:
    """Bytes of memory that this process costs, and has cost at most: what others pay for now, they are taken to have
    paid for then."""
    used, _ = memory_used()
    resident, peak = memory_resident()
    return used, used + max(0, peak - resident)


def _moving(now: Sequence[Placement], wanted: Sequence[Placement]) -> tuple[int, ...]:
    """The mesh dimensions along which ranks communicate, which cutting a replicated tensor does not need."""
    return tuple(
        dim
        for dim, (was, will) in enumerate(zip(now, wanted, strict=True))
        if was is not will and not was.is_replicate() and was != will
    )
