"""Memory of this process: address, size, access and owner."""

import builtins
import ctypes
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from monarch_nb._package import imported
from monarch_nb.gpu import GpuDriver, driver
from monarch_nb.wire import kind_of

if TYPE_CHECKING:
    import torch


class Memory:
    """A range of bytes at a fixed address. `keeper` is the object that owns the memory, kept alive by this one."""

    __slots__ = ("address", "device", "keeper", "readonly", "size", "stream")

    def __init__(
        self,
        address: int,
        size: int,
        keeper: object,
        *,
        readonly: bool = False,
        device: int | None = None,
        stream: int = 0,
    ) -> None:
        self.address = address
        self.size = size  # bytes
        self.keeper = keeper
        self.readonly = readonly
        self.device = device  # the GPU that it lies on; None: the host
        self.stream = stream  # a stream of the device, whose work on the memory comes first

    def fix(self) -> None:
        """Prevents that a tensor of the host gives its memory up while others use it, as `resize_` would."""
        library = imported("torch")
        if library is not None and isinstance(self.keeper, library.Tensor) and self.device is None:
            self.keeper.reshape(-1).view(library.uint8).numpy()  # memory that numpy has seen is not resizable any more

    def part(self, offset: int, size: int) -> "Memory":
        """Returns the part of `size` bytes at `offset`."""
        assert 0 <= offset <= offset + size <= self.size
        return Memory(
            self.address + offset, size, self.keeper, readonly=self.readonly, device=self.device, stream=self.stream
        )

    def read(self) -> builtins.bytes:
        """Returns a copy of the bytes."""
        if self.device is None:
            return builtins.bytes(self.view())
        with self.on_host(write=False) as room:
            return builtins.bytes(room)

    def write(self, data: bytes) -> None:
        """Replaces all bytes."""
        with self.on_host(write=True) as room:
            room[:] = data

    @contextmanager
    def on_host(self, *, write: bool) -> Iterator[memoryview]:
        """Yields the bytes in memory of the host: themselves, or a copy of those of a device, for a block.

        With `write` the block fills all of them, and they are copied to the device at its end. Of a device, take parts
        of a few megabytes. Raises GpuError where the device refuses.
        """
        if self.device is None:
            yield self.view()
            return
        room = bytearray(self.size)
        copy = Memory(ctypes.addressof(ctypes.c_char.from_buffer(room)) if room else 0, self.size, room)
        if not write:
            move_bytes(copy, self)
        yield memoryview(room)
        if write:
            move_bytes(self, copy)

    def view(self) -> memoryview:
        """Returns the bytes as a memoryview, writable unless the memory is read-only. Of memory of the host only."""
        assert self.device is None, "memory of a device has no view"
        content = (ctypes.c_ubyte * self.size).from_address(self.address)
        view = memoryview(content).cast("B")
        return view.toreadonly() if self.readonly else view


def move_bytes(target: Memory, source: Memory) -> None:
    """Copies bytes from `source` to fill `target`, each on the host or on a device; blocks until the copy is complete.

    Raises GpuError where a device refuses.
    """
    device = target.device if target.device is not None else source.device
    if device is None:
        ctypes.memmove(target.address, source.address, target.size)
        return
    gpu = _driver()
    stream = target.stream or source.stream
    gpu.copy(target.address, source.address, target.size, device=device, after=stream)


class BufferTypeError(TypeError, ValueError):
    """An object has no memory of its own; torchmonarch's error is a ValueError."""


def memory_of(data: Any, *, writable: bool = False, what: str = "data") -> Memory:
    """Returns the memory of a contiguous tensor, array or buffer, of any number of dimensions.

    `writable` requires writable memory. Raises ValueError for memory with gaps, on another device or not writable, and
    TypeError for an object without memory of its own. `what` names the argument in these errors.
    """
    library = imported("torch")
    if library is not None and isinstance(data, library.Tensor):
        return _of_tensor(data, what)
    try:
        view = memoryview(data)
    except TypeError:
        raise BufferTypeError(
            f"{what} must be a contiguous tensor, array, bytearray or memoryview, not {type(data).__name__}"
        ) from None
    if not view.c_contiguous:
        raise ValueError(
            f"{what} must be contiguous, and is a view with gaps: copy it, such as memoryview(bytes(view))"
        )
    if writable and view.readonly:
        raise ValueError(f"{what} is read-only memory ({type(data).__name__}) and cannot be written to")
    return Memory(_address_of(view), view.nbytes, view, readonly=view.readonly)


class Ranges:
    """A set of address ranges, in which adjacent ranges are merged."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def hits(self, memory: Memory) -> bool:
        """Returns whether the set contains any byte of this memory."""
        index = bisect_right(self._ends, memory.address)
        return index < len(self._starts) and self._starts[index] < memory.address + memory.size

    def add(self, memory: Memory) -> None:
        """Adds the bytes of this memory."""
        start, end = memory.address, memory.address + memory.size
        first, last = bisect_left(self._ends, start), bisect_right(self._starts, end)
        if first < last:
            start, end = min(start, self._starts[first]), max(end, self._ends[last - 1])
        self._starts[first:last] = [start]
        self._ends[first:last] = [end]


def _of_tensor(tensor: "torch.Tensor", title: str) -> Memory:
    device = _device_of(tensor, title)
    layout = str(tensor.layout)
    if layout != "torch.strided":
        raise ValueError(f"{title} is a tensor of layout {layout}; only dense (strided) ones have one piece of memory")
    if not tensor.is_contiguous():
        raise ValueError(
            f"{title} must be contiguous, and is a tensor of shape {tuple(tensor.shape)} with strides "
            f"{tuple(tensor.stride())}: use tensor.contiguous() and keep that"
        )
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError(f"{title} is a view that changes signs when read: use tensor.resolve_conj().resolve_neg()")
    size = tensor.numel() * tensor.element_size()
    try:
        address = tensor.data_ptr()
    except RuntimeError:
        address = 0
    if size and not address:
        raise ValueError(f"{title} is {kind_of(tensor)}, which has no memory of its own: use its local part")
    stream = 0 if device is None else _driver().current_stream(device)
    return Memory(address, size, tensor.detach(), device=device, stream=stream)


def _device_of(tensor: "torch.Tensor", title: str) -> int | None:
    """Returns the GPU that a tensor is on; None for one on the CPU. Raises ValueError for other devices."""
    if tensor.device.type == "cpu":
        gpu = driver()
        return gpu.device_of_tensor(tensor) if gpu is not None and gpu.name == "pretence" else None
    if tensor.device.type != "cuda":
        raise ValueError(
            f"{title} lies on {tensor.device}: memory of the host and of GPUs is moved; "
            "move a copy of it, such as tensor.cpu(), and copy back"
        )
    if driver() is None:
        raise ValueError(
            f"{title} lies on {tensor.device}, and cuda-bindings, which speaks to its driver, cannot be imported: "
            "pip install 'monarch-nb[gpu]', or move a copy of it, such as tensor.cpu()"
        )
    return int(tensor.device.index)


def _driver() -> GpuDriver:
    gpu = driver()
    assert gpu is not None, "memory of a device without a driver"
    return gpu


def _address_of(view: memoryview) -> int:
    if view.nbytes == 0:
        return 0
    holder = _PyBuffer()
    _get_buffer(view, ctypes.byref(holder), 0)
    try:
        return int(holder.buf or 0)
    finally:
        _release_buffer(ctypes.byref(holder))


class _PyBuffer(ctypes.Structure):
    """CPython's Py_buffer (docs.python.org/3/c-api/buffer.html); also read-only memory has an address."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes = (ctypes.py_object, ctypes.POINTER(_PyBuffer), ctypes.c_int)
_get_buffer.restype = ctypes.c_int
_release_buffer = ctypes.pythonapi.PyBuffer_Release
_release_buffer.argtypes = (ctypes.POINTER(_PyBuffer),)
_release_buffer.restype = None
