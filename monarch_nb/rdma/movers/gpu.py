"""For buffers on a GPU that this process uses too: opens the owner's allocation, and copies on the device."""

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from monarch_nb.gpu import GpuDriver, GpuError, driver
from monarch_nb.rdma.errors import Limit, OwnerLostError
from monarch_nb.rdma.memory import Memory, move_bytes
from monarch_nb.rdma.movers import CannotReachError, Move
from monarch_nb.rdma.movers.cross_memory import check_identity, check_offered, written
from monarch_nb.rdma.verbs import BufferHandle, DeviceRegion

_PIECE = 8 << 30  # bytes copied between two checks of the limit: some milliseconds on the device
_OPEN = 32  # allocations that stay open: each keeps its owner's memory from being freed


class _OpenAllocation:
    """An allocation of another process that is open here."""

    __slots__ = ("address", "device", "users")

    def __init__(self, address: int, device: int) -> None:
        self.address, self.device, self.users = address, device, 0


class GpuMover:
    """Moves bytes of buffers that lie on a GPU of this process, from and to its own GPU and host memory."""

    alone = True

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: OrderedDict[tuple[str, bytes], _OpenAllocation] = OrderedDict()  # the least recently used first

    def read(self, moves: Sequence[Move], limit: Limit) -> None:
        """Copies, then checks that all are offered: a dropped buffer's allocation stays open, and may be reused."""
        with self._allocations(moves) as allocations:
            self._copy(moves, allocations, limit, write=False)
            check_offered(moves)

    def write(self, moves: Sequence[Move], limit: Limit) -> None:
        """Writes into buffers whose memory stays meanwhile."""
        with self._allocations(moves) as allocations, written(moves):
            self._copy(moves, allocations, limit, write=True)

    def close(self) -> None:
        """Closes the allocations that are not in use; the others are closed with the process."""
        with self._lock:
            self._evict(0)

    def _copy(
        self, moves: Sequence[Move], allocations: Sequence[_OpenAllocation], limit: Limit, *, write: bool
    ) -> None:
        for move, allocation in zip(moves, allocations, strict=True):
            assert move.handle.device is not None
            opened = Memory(
                allocation.address + move.handle.device.offset + move.offset,
                move.local.size,
                allocation,
                device=allocation.device,
            )
            for start in range(0, move.local.size, _PIECE):
                limit.remaining()
                size = min(_PIECE, move.local.size - start)
                remote, local = opened.part(start, size), move.local.part(start, size)
                move_bytes(*((remote, local) if write else (local, remote)))

    @contextlib.contextmanager
    def _allocations(self, moves: Sequence[Move]) -> Iterator[list[_OpenAllocation]]:
        """Yields the allocations of these buffers, which stay open during the block."""
        check_identity(moves[0].handle)
        gpu = driver()
        if gpu is None or not gpu.devices():
            raise CannotReachError  # without a text: a process without a GPU is normal in a notebook
        allocations: list[_OpenAllocation] = []
        try:
            for move in moves:
                allocations.append(self._take(gpu, move.handle))
            yield allocations
        except OwnerLostError:
            self._forget(moves[0].handle.process)
            raise
        finally:
            with self._lock:
                for allocation in allocations:
                    allocation.users -= 1

    def _take(self, gpu: GpuDriver, handle: BufferHandle) -> _OpenAllocation:
        region = handle.device
        if region is None:
            raise CannotReachError  # without a text, since memory of the host is no surprise
        if not region.lent:
            raise CannotReachError("its GPU memory cannot be lent to other processes (expandable segments, or a pool)")
        key = handle.process, region.lent
        with self._lock:
            allocation = self._open.get(key)
            if allocation is None:
                allocation = self._open[key] = self._opened(gpu, region)
            self._open.move_to_end(key)
            allocation.users += 1
            self._evict(_OPEN)
        return allocation

    def _opened(self, gpu: GpuDriver, region: DeviceRegion) -> _OpenAllocation:
        for device in gpu.devices():
            if gpu.identity(device) == region.identity:
                try:
                    return _OpenAllocation(gpu.open(region.lent, device), device)
                except GpuError as error:
                    if error.sticky:
                        raise
                    raise CannotReachError(f"its GPU memory cannot be opened here ({error})") from error
        raise CannotReachError("it lies on a GPU that this process does not see")

    def _forget(self, process: str) -> None:
        """Closes the allocations of a process that has ended, except those in use."""
        with self._lock:
            self._close([key for key, allocation in self._open.items() if key[0] == process and not allocation.users])

    def _evict(self, most: int) -> None:
        idle = [key for key, allocation in self._open.items() if not allocation.users]
        self._close(idle[: max(0, len(self._open) - most)])

    def _close(self, keys: Sequence[tuple[str, bytes]]) -> None:
        gpu = driver()
        for key in keys:
            allocation = self._open.pop(key)
            if gpu is not None:
                with contextlib.suppress(GpuError):  # its context is gone
                    gpu.close(allocation.address)
