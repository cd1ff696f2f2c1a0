"""NVIDIA's driver, by its own Python bindings (`cuda-bindings`), which PyTorch's CUDA builds bring along.

Sources: the CUDA Driver API, sections "Memory Management" (IPC handles), "Virtual Memory Management" (memory named by a
file descriptor) and "Stream Management"; docs.nvidia.com/cuda/cuda-driver-api.
"""

import ctypes
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from cuda.bindings import driver as cu

from monarch_nb._package import imported
from monarch_nb.gpu.driver import GpuError, GpuLoad, GpuMemoryError, load_by_nvml

if TYPE_CHECKING:
    import torch

_HANDLE_BYTES = 64  # CU_IPC_HANDLE_SIZE
_DEFAULT_STREAM = 1  # CU_STREAM_LEGACY: torch calls it 0, which means no stream here
_PIECE = 8 << 20  # bytes of one pinned buffer; used in pairs, alternately
_STICKY = frozenset(
    {
        "CUDA_ERROR_ILLEGAL_ADDRESS",
        "CUDA_ERROR_LAUNCH_TIMEOUT",
        "CUDA_ERROR_LAUNCH_FAILED",
        "CUDA_ERROR_ILLEGAL_INSTRUCTION",
        "CUDA_ERROR_MISALIGNED_ADDRESS",
        "CUDA_ERROR_INVALID_ADDRESS_SPACE",
        "CUDA_ERROR_INVALID_PC",
        "CUDA_ERROR_HARDWARE_STACK_ERROR",
        "CUDA_ERROR_ECC_UNCORRECTABLE",
        "CUDA_ERROR_ASSERT",
        "CUDA_ERROR_CONTEXT_IS_DESTROYED",
        "CUDA_ERROR_MPS_CLIENT_TERMINATED",
        "CUDA_ERROR_TENSOR_MEMORY_LEAK",
        "CUDA_ERROR_EXTERNAL_DEVICE",
        "CUDA_ERROR_CONTAINED",
    }
)
_FD = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


class CudaDriver:
    """The GPUs of this process. Uses the primary contexts, as PyTorch does, and streams of its own."""

    name = "cuda"

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._devices: dict[int, _Device] = {}
        self._initialised = False

    def device_of_tensor(self, tensor: "torch.Tensor | torch.UntypedStorage") -> int | None:
        """See GpuDriver."""
        return tensor.device.index if tensor.device.type == "cuda" else None

    def new_storage(self, size: int, device: int) -> "torch.UntypedStorage":
        """See GpuDriver."""
        library = sys.modules["torch"]
        memory: torch.Tensor = library.empty(size, dtype=library.uint8, device=library.device("cuda", device))
        return memory.untyped_storage()

    def current_stream(self, device: int) -> int:
        """See GpuDriver."""
        return int(sys.modules["torch"].cuda.current_stream(device).cuda_stream) or _DEFAULT_STREAM

    def devices(self) -> tuple[int, ...]:
        """See GpuDriver."""
        cuda = getattr(imported("torch"), "cuda", None)
        return tuple(range(cuda.device_count())) if cuda is not None and cuda.is_initialized() else ()

    def device_of(self, address: int) -> int | None:
        """See GpuDriver."""
        self._init()
        kind, ordinal = (
            cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
            cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
        )
        error, memory_type = cu.cuPointerGetAttribute(kind, address)
        if error == cu.CUresult.CUDA_ERROR_INVALID_VALUE:
            return None  # memory that CUDA does not know
        _checked(error, "cuPointerGetAttribute")
        if int(memory_type) != int(cu.CUmemorytype.CU_MEMORYTYPE_DEVICE):
            return None
        return int(_call(cu.cuPointerGetAttribute, ordinal, address))

    def range_of(self, address: int) -> tuple[int, int]:
        """See GpuDriver."""
        self._init()
        start, size = _call(cu.cuMemGetAddressRange, address)
        return int(start), int(size)

    def copy(self, target: int, source: int, size: int, *, device: int, after: int = 0) -> None:
        """See GpuDriver."""
        if not size:
            return
        gpu = self._device(device)
        with gpu.current(), gpu.stream() as stream:
            if after:
                gpu.wait_for(stream, after)
            target_pinned, source_pinned = self._quick(target), self._quick(source)
            if target_pinned and source_pinned:
                _call(cu.cuMemcpyAsync, target, source, size, stream)
                _call(cu.cuStreamSynchronize, stream)
            else:
                gpu.staged(target, source, size, stream, to_host=not target_pinned)

    def lend(self, address: int) -> bytes:
        """See GpuDriver."""
        with self._device(self._owner(address)).current():
            named = _call(cu.cuIpcGetMemHandle, address)
            return ctypes.string_at(int(named.getPtr()), _HANDLE_BYTES)  # the name of its field changed in 13.5

    def open(self, handle: bytes, device: int) -> int:
        """See GpuDriver."""
        named = cu.CUipcMemHandle()
        ctypes.memmove(int(named.getPtr()), handle.ljust(_HANDLE_BYTES, b"\0"), _HANDLE_BYTES)
        lazily = cu.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS.value
        with self._device(device).current():
            return int(_call(cu.cuIpcOpenMemHandle, named, lazily))

    def close(self, address: int) -> None:
        """See GpuDriver."""
        with self._device(self._owner(address)).current():
            _call(cu.cuIpcCloseMemHandle, address)

    def create(self, size: int, device: int) -> tuple[int, int]:
        """See GpuDriver."""
        gpu = self._device(device)
        with gpu.current():
            rounded = -(-size // gpu.granularity) * gpu.granularity
            memory = _call(cu.cuMemCreate, rounded, gpu.allocation, 0)
            try:
                return int(_call(cu.cuMemExportToShareableHandle, memory, _FD, 0)), rounded
            finally:
                _call(cu.cuMemRelease, memory)  # the descriptor holds it from here on

    def map(self, descriptor: int, size: int, device: int) -> int:
        """See GpuDriver."""
        gpu = self._device(device)
        with gpu.current():
            memory = _call(cu.cuMemImportFromShareableHandle, descriptor, _FD)
            try:
                address = int(_call(cu.cuMemAddressReserve, size, 0, 0, 0))
                try:
                    _call(cu.cuMemMap, address, size, 0, memory, 0)
                    try:
                        _call(cu.cuMemSetAccess, address, size, [gpu.access], 1)
                    except GpuError:
                        cu.cuMemUnmap(address, size)
                        raise
                except GpuError:
                    cu.cuMemAddressFree(address, size)
                    raise
            finally:
                _call(cu.cuMemRelease, memory)  # the mapping holds it from here on
        return address

    def unmap(self, address: int, size: int) -> None:
        """See GpuDriver."""
        self._init()
        _call(cu.cuMemUnmap, address, size)
        _call(cu.cuMemAddressFree, address, size)

    def identity(self, device: int) -> str:
        """See GpuDriver."""
        return bytes(_call(cu.cuDeviceGetUuid, self._device(device).number).bytes).hex()

    def memory(self, device: int) -> tuple[int, int]:
        """See GpuDriver."""
        with self._device(device).current():
            free, total = _call(cu.cuMemGetInfo)
        return int(free), int(total)

    def load(self, device: int) -> GpuLoad:
        """See GpuDriver."""
        free, total = self.memory(device)
        return load_by_nvml(str(uuid.UUID(hex=self.identity(device))), total - free, total)

    def check(self) -> None:
        """See GpuDriver."""
        self._init()
        for index in range(int(_call(cu.cuDeviceGetCount))):
            _, active = _call(cu.cuDevicePrimaryCtxGetState, _call(cu.cuDeviceGet, index))
            if active:
                self._device(index).check()

    def _init(self) -> None:
        if not self._initialised:
            _call(cu.cuInit, 0)
            self._initialised = True

    def _device(self, number: int) -> "_Device":
        device = self._devices.get(number)
        if device is None:
            with self._lock:
                self._init()
                device = self._devices.get(number) or self._devices.setdefault(number, _Device(number))
        return device

    def _owner(self, address: int) -> int:
        device = self.device_of(address)
        if device is None:
            raise GpuError(f"{address:#x} is no address of a GPU's memory")
        return device

    def _quick(self, address: int) -> bool:
        """Returns whether the device itself can reach the memory: its own, or pinned memory of the host."""
        kind = cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
        error, _ = cu.cuPointerGetAttribute(kind, address)
        return bool(error == cu.CUresult.CUDA_SUCCESS)


class _Device:
    """One GPU: its primary context, streams that wait for work, and pinned memory for staging."""

    def __init__(self, index: int) -> None:
        self.number = _call(cu.cuDeviceGet, index)
        self._context = _call(cu.cuDevicePrimaryCtxRetain, self.number)
        self._lock = threading.Lock()
        self._streams: list[cu.CUstream] = []
        self._pinned: list[tuple[int, int]] = []  # pairs of buffers
        self.allocation = cu.CUmemAllocationProp()
        self.allocation.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self.allocation.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self.allocation.location.id = index
        self.allocation.requestedHandleTypes = _FD
        self.access = cu.CUmemAccessDesc()
        self.access.location = self.allocation.location
        self.access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        least = cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        with self.current():
            self.granularity = int(_call(cu.cuMemGetAllocationGranularity, self.allocation, least))

    @contextmanager
    def current(self) -> Iterator[None]:
        """A block in which the calling thread's driver calls go to this device."""
        _call(cu.cuCtxPushCurrent, self._context)
        try:
            yield
        finally:
            cu.cuCtxPopCurrent()

    @contextmanager
    def stream(self) -> Iterator[cu.CUstream]:
        """A stream that no other block uses meanwhile, and that waits for no other stream."""
        with self._lock:
            stream = self._streams.pop() if self._streams else None
        if stream is None:
            stream = _call(cu.cuStreamCreate, cu.CUstream_flags.CU_STREAM_NON_BLOCKING.value)
        yield stream  # not reused after an error, since copies may be in progress
        with self._lock:
            self._streams.append(stream)

    def wait_for(self, stream: cu.CUstream, awaited: int) -> None:
        """Makes further work of `stream` wait for the present work of another stream."""
        if cu.cuStreamQuery(cu.CUstream(awaited))[0] == cu.CUresult.CUDA_SUCCESS:
            return
        event = _call(cu.cuEventCreate, cu.CUevent_flags.CU_EVENT_DISABLE_TIMING.value)
        try:
            _call(cu.cuEventRecord, event, cu.CUstream(awaited))
            _call(cu.cuStreamWaitEvent, stream, event, 0)
        finally:
            cu.cuEventDestroy(event)

    def staged(self, target: int, source: int, size: int, stream: cu.CUstream, *, to_host: bool) -> None:
        """Copies between the device and pageable memory: one pinned buffer is filled while the other is emptied."""
        with self._lock:
            buffers = self._pinned.pop() if self._pinned else None
        if buffers is None:
            buffers = (_pinned(_PIECE), _pinned(_PIECE))
        before: tuple[int, int, int] | None = None  # buffer, offset and size of the piece in transit to the host
        events = [_call(cu.cuEventCreate, cu.CUevent_flags.CU_EVENT_DISABLE_TIMING.value) for _ in buffers]
        try:
            for number, start in enumerate(range(0, size, _PIECE)):
                turn, count = number % 2, min(_PIECE, size - start)
                if to_host:
                    _call(cu.cuMemcpyAsync, buffers[turn], source + start, count, stream)
                    _call(cu.cuEventRecord, events[turn], stream)
                    if before is not None:
                        last, offset, length = before
                        _call(cu.cuEventSynchronize, events[last])
                        ctypes.memmove(target + offset, buffers[last], length)
                    before = (turn, start, count)
                else:
                    if number > 1:
                        _call(cu.cuEventSynchronize, events[turn])
                    ctypes.memmove(buffers[turn], source + start, count)
                    _call(cu.cuMemcpyAsync, target + start, buffers[turn], count, stream)
                    _call(cu.cuEventRecord, events[turn], stream)
            _call(cu.cuStreamSynchronize, stream)
            if before is not None:
                last, offset, length = before
                ctypes.memmove(target + offset, buffers[last], length)
        finally:
            for event in events:
                cu.cuEventDestroy(event)
        with self._lock:
            self._pinned.append(buffers)

    def check(self) -> None:
        """Raises the sticky error of the context, if it has one."""
        with self.current(), self.stream() as stream:
            _call(cu.cuStreamQuery, stream)


def _pinned(size: int) -> int:
    return int(_call(cu.cuMemHostAlloc, size, 0))


def _call(function: Callable[..., Any], *args: object) -> Any:
    """Calls the driver; returns its results after the error number, alone or as a tuple."""
    error, *results = function(*args)
    _checked(error, function.__name__)
    return results[0] if len(results) == 1 else tuple(results)


def _checked(error: cu.CUresult, title: str) -> None:
    if error == cu.CUresult.CUDA_SUCCESS:
        return
    name = getattr(error, "name", str(error))
    code, text = int(error), f"{title}: {name}"
    _, described = cu.cuGetErrorString(error)
    if described:
        text += f" ({described.decode()})"
    if name == "CUDA_ERROR_OUT_OF_MEMORY":
        raise GpuMemoryError(text, code)
    raise GpuError(text, code, sticky=name in _STICKY)
