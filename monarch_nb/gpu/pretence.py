"""A driver of pretence: runs the engine's GPU code on a machine without a GPU.

The memory of its devices consists of memory files, so that other processes can open it, descriptors and mappings keep
it alive, and the kernel frees it when a process is killed, as for CUDA's. `ASSUMPTIONS` lists the assumed properties of
the real driver; `make gpu-report PART=driver` checks each on a GPU.
"""

import ctypes
import mmap
import os
import struct
import sys
import threading
from bisect import bisect_right
from typing import TYPE_CHECKING, Any

from monarch_nb.gpu.driver import GpuError, GpuLoad, GpuMemoryError

if TYPE_CHECKING:
    import torch

ASSUMPTIONS = (
    "a descriptor of create() outlives the process that made it, in whoever holds it",
    "what one process writes to mapped memory, another that maps the same descriptor reads",
    "memory that nobody holds any more is free again, also after a process was killed",
    "a descriptor travels by pidfd_getfd",
    "an allocation of torch's can be lent, opened by another process, and read at an offset",
    "an allocation cannot be opened by the process that lends it",
    "an opened allocation can be read after its owner was killed, or the read is an error: it never hangs",
    "create() on a full device raises GpuMemoryError, and the device is usable after it",
    "copy() waits for the work of the stream that it is given",
    "copy() moves bytes between pageable memory and the device in both directions",
    "load() counts what this process has on the device, which is no less than its tensors",
    "after a kernel's illegal access, check() raises a sticky error, in this process only",
)
_HANDLE = struct.Struct("<8sqqq")  # a mark, process, descriptor, bytes
_MARK = b"pretence"
_HANDLE_BYTES = 64  # of a CUipcMemHandle
_GRANULE = 2 << 20  # bytes, as of an H100
_STICKY_CODE = 700  # CUDA_ERROR_ILLEGAL_ADDRESS


class PretenceDriver:
    """Devices of `capacity` bytes each. A tensor is on one if its memory came from `new_storage` (or `map`)."""

    name = "pretence"

    def __init__(self, capacity: int = 1 << 30, devices: int = 1) -> None:
        self.capacity = capacity
        self.others = 0  # bytes that other processes use on each device
        self.share, self.slowed = 0.0, ""  # results of `load`
        self.copies: list[tuple[int | None, int | None, int]] = []  # target and source device (None: the host), bytes
        self._lock = threading.RLock()
        self._maps: dict[int, tuple[mmap.mmap, int, int]] = {}  # by address: mapping, bytes, device
        self._starts: list[int] = []
        self._lent: dict[int, int] = {}  # by address: descriptor
        self._used = dict.fromkeys(range(devices), 0)
        self._error: GpuError | None = None

    def break_down(self, reason: str = "CUDA_ERROR_ILLEGAL_ADDRESS") -> None:
        """Makes every call fail from now on, as after an illegal access by a kernel."""
        self._error = GpuError(f"pretence: {reason}", _STICKY_CODE, sticky=True)

    # -- torch's side -------------------------------------------------------------------------------------------------

    def device_of_tensor(self, tensor: Any) -> int | None:
        """See GpuDriver."""
        memory = tensor if type(tensor).__name__ == "UntypedStorage" else tensor.untyped_storage()
        return self._find(memory.data_ptr()) if memory.device.type == "cpu" and memory.nbytes() else None

    def new_storage(self, size: int, device: int) -> "torch.UntypedStorage":
        """See GpuDriver."""
        descriptor, rounded = self.create(size, device)
        with self._lock:
            address = self.map(descriptor, rounded, device)
            self._lent[address] = descriptor
            self._used[device] += rounded
        holder: Any = (ctypes.c_ubyte * size).from_address(address)
        holder.memory = _PretendedMemory(self, address, rounded, device)
        library = sys.modules["torch"]
        memory: torch.Tensor = library.frombuffer(holder, dtype=library.uint8)
        return memory.untyped_storage()

    def current_stream(self, device: int) -> int:
        """See GpuDriver."""
        return 0

    def devices(self) -> tuple[int, ...]:
        """See GpuDriver."""
        return tuple(device for device, used in self._used.items() if used)

    # -- addresses ----------------------------------------------------------------------------------------------------

    def device_of(self, address: int) -> int | None:
        """See GpuDriver."""
        self.check()
        return self._find(address)

    def range_of(self, address: int) -> tuple[int, int]:
        """See GpuDriver."""
        self.check()
        with self._lock:
            index = bisect_right(self._starts, address) - 1
            if index >= 0 and address < (start := self._starts[index]) + self._maps[start][1]:
                return start, self._maps[start][1]
        raise GpuError(f"{address:#x} is no address of a device")

    def copy(self, target: int, source: int, size: int, *, device: int, after: int = 0) -> None:
        """See GpuDriver."""
        self.check()
        self.copies.append((self._find(target), self._find(source), size))
        ctypes.memmove(target, source, size)

    # -- memory that others lend --------------------------------------------------------------------------------------

    def lend(self, address: int) -> bytes:
        """See GpuDriver."""
        self.check()
        with self._lock:
            if address not in self._lent:
                raise GpuError(f"{address:#x} is not the start of an allocation")
            handle = _HANDLE.pack(_MARK, os.getpid(), self._lent[address], self._maps[address][1])
        return handle.ljust(_HANDLE_BYTES, b"\0")

    def open(self, handle: bytes, device: int) -> int:
        """See GpuDriver."""
        self.check()
        mark, pid, descriptor, size = _HANDLE.unpack_from(handle)
        if mark != _MARK:
            raise GpuError("this is no handle of an allocation")
        if pid == os.getpid():
            raise GpuError("a process cannot open what it lends itself")
        try:
            own = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise GpuError(f"the allocation is gone: {error.strerror}") from error
        try:
            return self.map(own, size, device)
        finally:
            os.close(own)

    def close(self, address: int) -> None:
        """See GpuDriver."""
        self.unmap(address, self.range_of(address)[1])

    # -- memory of our own --------------------------------------------------------------------------------------------

    def create(self, size: int, device: int) -> tuple[int, int]:
        """See GpuDriver."""
        self.check()
        rounded = -(-size // _GRANULE) * _GRANULE
        if rounded > self.memory(device)[0]:
            raise GpuMemoryError(f"pretence: device {device} has no room for {size:,} bytes")
        descriptor = os.memfd_create("monarch-nb-gpu", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, rounded)
        return descriptor, rounded

    def map(self, descriptor: int, size: int, device: int) -> int:
        """See GpuDriver."""
        self.check()
        try:
            mapping = mmap.mmap(descriptor, size)
        except (OSError, ValueError) as error:
            raise GpuError(f"the memory cannot be mapped: {error}") from error
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        with self._lock:
            self._maps[address] = (mapping, size, device)
            self._starts = sorted(self._maps)
        return address

    def unmap(self, address: int, size: int) -> None:
        """See GpuDriver."""
        with self._lock:
            mapping, length, _ = self._maps.pop(address)
            self._starts = sorted(self._maps)
        assert size == length, f"mapped as {length:,} bytes, unmapped as {size:,}"
        mapping.close()

    # -- state --------------------------------------------------------------------------------------------------------

    def identity(self, device: int) -> str:
        """See GpuDriver."""
        return f"pretence-{device}"

    def memory(self, device: int) -> tuple[int, int]:
        """See GpuDriver: counts this process's allocations, and the memory that others pretend to use."""
        self.check()
        return self.capacity - self.others - self._used[device], self.capacity

    def load(self, device: int) -> GpuLoad:
        """See GpuDriver."""
        free, total = self.memory(device)
        return GpuLoad(self.share, self._used[device], total - free, total, self.slowed)

    def check(self) -> None:
        """See GpuDriver."""
        if self._error is not None:
            raise self._error

    def _find(self, address: int) -> int | None:
        with self._lock:
            index = bisect_right(self._starts, address) - 1
            if index < 0:
                return None
            start = self._starts[index]
            _, size, device = self._maps[start]
            return device if address < start + size else None


class _PretendedMemory:
    """Memory behind a storage; frees itself with the last reference."""

    def __init__(self, driver: PretenceDriver, address: int, size: int, device: int) -> None:
        self._free = (driver, address, size, device)

    def __del__(self) -> None:
        driver, address, size, device = self._free
        with driver._lock:
            driver._used[device] -= size
            os.close(driver._lent.pop(address))
            driver.unmap(address, size)
