"""Pickling of torch tensors: their storage out of band, everything else in a short pickle.

A received tensor equals the sent one in shape, dtype, values, strides, `requires_grad` and being a Parameter. A tensor
on a GPU arrives on the GPU of the same number, or on the current one if there are fewer; on the CPU in a process
without a GPU, and in the controller, which leaves GPUs alone. Its bytes go through the memory of the host. A tensor
that covers at least half of its storage brings the storage along, and every later view of that storage in the same
message shares it there too. A smaller view brings only its own elements, never the large storage behind it (a scattered
one becomes dense). Tensors without plain strided memory (sparse, nested, quantized, meta, subclasses, tensors with
attributes or hooks of their own) are pickled by torch itself; storages within them are sent out of band all the same.
"""

import ctypes
import importlib
import os
import pickle
import sys
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import TYPE_CHECKING, Any

from monarch_nb.gpu import SMALLEST, DeviceFile, Marker, driver

if TYPE_CHECKING:
    import torch

    from monarch_nb.wire.body import Frame

# torch.dtype -> its name in torch
_dtype_names: "dict[torch.dtype, str]" = {}
_STAGED = 1 << 20  # bytes; above, pinned memory is worthwhile


class _Landing:
    """The devices on which tensors of GPUs arrive in this process."""

    on_gpus = False  # tensors are put on its GPU, if it has one
    pretends = False  # its GPUs are pretended: for torch, their tensors are on the CPU


def land_on_gpus() -> None:
    """Puts received tensors of GPUs on this process's GPU from now on, if it has one."""
    _Landing.on_gpus = True
    _Landing.pretends = os.environ.get("MONARCH_NB_GPU") == "pretence"


class Storage:
    """The bytes of one storage for a message; `device` is the GPU that they come from."""

    __slots__ = ("buffer", "device")

    def __init__(self, buffer: Any, device: int | None = None) -> None:
        self.buffer = buffer
        self.device = device

    def __reduce__(self) -> tuple[object, ...]:
        buffer = pickle.PickleBuffer(self.buffer)
        return (open_storage, (buffer,)) if self.device is None else (open_on_gpu, (buffer, self.device))


def _torch() -> Any:
    import torch  # waits for a thread that is importing it

    return torch


# Types whose objects Python would search by name in every module, and might find in the program's own, or not at all.
NAMED_BY_TORCH = frozenset({"memory_format", "layout", "qscheme"})


def torchs_own(name: str) -> object:
    """Returns the object that PyTorch calls `torch.<name>`, with the prefix or without."""
    return getattr(importlib.import_module("torch"), name.removeprefix("torch."))


def tensor_types() -> tuple[type, ...]:
    """Returns `torch.Tensor` and `Parameter`, if torch is imported; else nothing."""
    parameter = getattr(sys.modules.get("torch.nn.parameter"), "Parameter", None)
    return () if parameter is None else (sys.modules["torch"].Tensor, parameter)


def reduce_tensor(tensor: Any, storages: dict[tuple[int, int], Storage], *, gpu: bool = False) -> object:
    """Returns a reduction of `tensor`, or NotImplemented for torch's own. `storages` are the message's so far.

    With `gpu`, large tensors of a GPU are sent as files of it (`DeviceFile`).
    """
    torch = sys.modules["torch"]
    on_cpu = tensor.is_cpu
    if (
        not (on_cpu or tensor.is_cuda)
        or tensor.layout is not torch.strided
        or tensor.is_quantized
        or tensor.is_nested
        or tensor.__dict__
        or tensor._backward_hooks
    ):
        return NotImplemented
    dtype = tensor.dtype
    name = _dtype_names.get(dtype) or _dtype_names.setdefault(dtype, str(dtype).removeprefix("torch."))
    requires_grad = tensor.requires_grad
    is_parameter = type(tensor) is not torch.Tensor
    plain = tensor.detach() if requires_grad or is_parameter else tensor
    if plain.is_conj() or plain.is_neg():
        plain = plain.resolve_conj().resolve_neg()
    shape = tuple(plain.shape)
    if not plain.numel():
        return rebuild_tensor, (None, name, 0, shape, plain.stride(), requires_grad, is_parameter)
    memory = plain.untyped_storage()
    size = memory.nbytes()
    key = (memory.data_ptr(), size)
    storage = storages.get(key)
    if storage is None:
        if not size:
            return NotImplemented  # its memory was freed
        if 2 * plain.nbytes < size:
            if plain.is_contiguous():
                span = _taken(torch, memory, plain.storage_offset() * plain.itemsize, plain.nbytes, gpu)
                return rebuild_tensor, (span, name, 0, shape, None, requires_grad, is_parameter)
            plain = plain.clone(memory_format=torch.preserve_format)
            memory = plain.untyped_storage()
            size = memory.nbytes()
            key = (memory.data_ptr(), size)
        storage = storages[key] = _taken(torch, memory, 0, size, gpu)
    offset = plain.storage_offset()
    strides = None if plain.is_contiguous() else plain.stride()
    return rebuild_tensor, (storage, name, offset, shape, strides, requires_grad, is_parameter)


def reduce_storage(storage: Any, storages: dict[tuple[int, int], Storage], *, gpu: bool = False) -> object:
    """Returns a reduction of a bare torch storage within torch's own pickling of tensors, with its bytes out of band.

    A storage without bytes is left to torch.
    """
    untyped = getattr(storage, "_untyped_storage", storage)  # access to the typed one itself warns
    size, dtype = untyped.nbytes(), None if untyped is storage else storage.dtype
    if untyped.device.type == "meta" or not size:
        return NotImplemented
    memory = untyped.cpu() if untyped.device.type not in ("cpu", "cuda") else untyped
    key = (memory.data_ptr(), size)
    stored = storages.get(key) or storages.setdefault(key, _taken(sys.modules["torch"], memory, 0, size, gpu))
    return rebuild_storage, (stored, dtype)


def rebuild_storage(storage: "torch.UntypedStorage", dtype: "torch.dtype | None") -> object:
    """Returns the storage that `reduce_storage` reduced; `dtype` is that of a typed one."""
    if dtype is None:
        return storage
    kind = _torch().TypedStorage
    return kind(wrap_storage=storage, dtype=dtype, _internal=True)


def open_storage(buffer: "Frame") -> Any:
    """Returns the torch storage on `buffer`, without a copy if it is writable."""
    torch = _torch()
    if memoryview(buffer).readonly:
        buffer = bytearray(buffer)
    return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()


def open_on_gpu(buffer: Any, device: int) -> Any:
    """Returns the torch storage on `buffer`, on a GPU if this process puts tensors there; blocks until it is."""
    gpu = driver()
    if type(buffer) is DeviceFile:
        assert gpu is not None, "a file of a GPU in a process that has none"
        landed = gpu.new_storage(buffer.length, device)
        buffer.copy_to(landed.data_ptr(), device)
        return landed
    host = open_storage(buffer)
    if not _Landing.on_gpus:
        return host
    size = host.nbytes()
    if _Landing.pretends and gpu is not None:
        storage = gpu.new_storage(size, device)
        gpu.copy(storage.data_ptr(), host.data_ptr(), size, device=device)
        return storage
    torch = sys.modules["torch"]
    if not torch.cuda.is_available():
        return host
    index = device if device < torch.cuda.device_count() else torch.cuda.current_device()
    if gpu is None or size < _STAGED:
        return torch.empty(0, dtype=torch.uint8).set_(host).to(torch.device("cuda", index)).untyped_storage()
    storage = gpu.new_storage(size, index)
    gpu.copy(storage.data_ptr(), host.data_ptr(), size, device=index, after=gpu.current_stream(index))
    return storage


def rebuild_tensor(
    storage: "torch.UntypedStorage | None",
    dtype: str,
    offset: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None,
    requires_grad: bool,
    is_parameter: bool,
) -> Any:
    """Returns the tensor that `reduce_tensor` reduced."""
    torch = _torch()
    # The device is explicit because of `torch.set_default_device`.
    if storage is None:
        tensor = torch.empty_strided(shape, strides or (), dtype=getattr(torch, dtype), device="cpu")
    else:
        tensor = torch.empty(0, dtype=getattr(torch, dtype), device=storage.device)
        if strides is None:
            strides = _contiguous(shape)
        tensor.set_(storage, offset, shape, strides)
    if is_parameter:
        return torch.nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_() if requires_grad else tensor


def without_modes() -> AbstractContextManager[None]:
    """Returns a context in which no torch mode (fake tensors, default devices…) of the calling thread is in force."""
    functions: Any = getattr(sys.modules.get("torch"), "_C", None)
    try:
        dispatching, overriding = functions._len_torch_dispatch_stack(), functions._len_torch_function_stack()
    except AttributeError:  # no torch, or one without these
        return _NOTHING
    if not dispatching and not overriding:
        return _NOTHING
    return _ModesOff(dispatching > 0, overriding > 0)


_NOTHING = nullcontext()


class _ModesOff:
    def __init__(self, dispatching: bool, overriding: bool) -> None:
        torch = _torch()
        contexts = (torch.utils._python_dispatch._disable_current_modes(),) if dispatching else ()
        # DisableTorchFunction also disables the effect of modes on functions.
        self._contexts: list[Any] = [*contexts, *((torch._C.DisableTorchFunction(),) if overriding else ())]

    def __enter__(self) -> None:
        for context in self._contexts:
            context.__enter__()

    def __exit__(self, *error: object) -> None:
        for context in reversed(self._contexts):
            context.__exit__(*error)


def _taken(torch: ModuleType, memory: Any, start: int, size: int, as_file: bool) -> Storage:
    """Returns the bytes of a part of a storage; for a GPU a copy, made after its present work."""
    on_gpu = memory.device.type == "cuda"
    gpu = driver() if on_gpu or _Landing.pretends else None
    device: int | None = memory.device.index if on_gpu else None
    if gpu is not None and _Landing.pretends:
        device = gpu.device_of_tensor(memory)
    if device is None:
        return Storage(_bytes_of(torch, memory, start, size))
    if as_file and gpu is not None and size >= SMALLEST:
        file = DeviceFile.holding(memory.data_ptr() + start, size, device)
        if file is not None:
            marker = Marker()
            marker.file = file
            return Storage(marker, device)
    if gpu is None or size < _STAGED:
        part = torch.empty(0, dtype=torch.uint8, device=memory.device).set_(memory, start, (size,), (1,))
        host = part.cpu() if part.is_cuda else part.clone()
    else:
        host = torch.empty(size, dtype=torch.uint8, device="cpu")
        address, stream = memory.data_ptr() + start, gpu.current_stream(device)
        gpu.copy(host.data_ptr(), address, size, device=device, after=stream)
    return Storage(_bytes_of(torch, host.untyped_storage(), 0, size), device)


def _bytes_of(torch: ModuleType, memory: Any, start: int, size: int) -> object:
    """Returns a buffer over the storage `memory` that keeps it alive."""
    raw = torch.empty(0, dtype=torch.uint8, device="cpu").set_(memory, start, (size,), (1,))
    try:
        return raw.numpy()
    except RuntimeError:  # torch without numpy
        array: Any = (ctypes.c_ubyte * size).from_address(raw.data_ptr())
        array.owner = raw
        return array


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= length
    return tuple(reversed(strides))
