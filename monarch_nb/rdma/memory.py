"""Memory of this process: address, size, access and owner."""

import ctypes
import sys
from bisect import bisect_left, bisect_right
from typing import Any

from monarch_nb.wire import kind_of

__all__ = ["Memory", "Ranges", "memory_of"]


class Memory:
    """A range of bytes at a fixed address. `keeper` is the object that owns the memory, which this keeps alive."""

    __slots__ = ("address", "keeper", "readonly", "size")

    def __init__(self, address: int, size: int, keeper: object, *, readonly: bool = False) -> None:
        self.address = address
        self.size = size  # bytes
        self.keeper = keeper
        self.readonly = readonly

    def part(self, offset: int, size: int) -> "Memory":
        """The part of `size` bytes at `offset`."""
        assert 0 <= offset <= offset + size <= self.size
        return Memory(self.address + offset, size, self.keeper, readonly=self.readonly)

    def view(self) -> memoryview:
        """The bytes as a memoryview, writable unless the memory is read-only."""
        held = (ctypes.c_ubyte * self.size).from_address(self.address)
        view = memoryview(held).cast("B")
        return view.toreadonly() if self.readonly else view


def memory_of(data: Any, *, writable: bool = False, what: str = "data") -> Memory:
    """The memory of a contiguous tensor, array or buffer, of any number of dimensions.

    `writable` asks for memory that may be written. Raises ValueError for what has gaps, lies on another device or may
    not be written, and TypeError for what has no memory of its own. `what` names the argument in these errors.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(data, torch.Tensor):
        return _of_tensor(data, what)
    try:
        view = memoryview(data)
    except TypeError:
        raise TypeError(
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
        """Returns whether the set has any byte of this memory."""
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


def _of_tensor(tensor: Any, what: str) -> Memory:
    if tensor.device.type != "cpu":
        raise ValueError(
            f"{what} lies on {tensor.device}: only memory of the host is moved so far; "
            "move a copy of it, such as tensor.cpu(), and copy back"
        )
    layout = str(tensor.layout)
    if layout != "torch.strided":
        raise ValueError(f"{what} is a tensor of layout {layout}; only dense (strided) ones have one piece of memory")
    if not tensor.is_contiguous():
        raise ValueError(
            f"{what} must be contiguous, and is a tensor of shape {tuple(tensor.shape)} with strides "
            f"{tuple(tensor.stride())}: use tensor.contiguous() and keep that"
        )
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError(f"{what} is a view that changes signs when read: use tensor.resolve_conj().resolve_neg()")
    size = tensor.numel() * tensor.element_size()
    try:
        address = tensor.data_ptr()
    except RuntimeError:
        address = 0
    if size and not address:
        raise ValueError(f"{what} is {kind_of(tensor)}, which has no memory of its own: use its local part")
    return Memory(address, size, tensor.detach())


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
