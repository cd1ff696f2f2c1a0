"""The memory of tensors in this process by name: parameters, gradients, states of optimizers, others."""

import gc
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from monarch_nb._package import imported
from monarch_nb.gpu import GpuMemoryError, load
from monarch_nb.wire import size_text

if TYPE_CHECKING:
    import torch
    from torch.optim import Optimizer

PARAMETERS, GRADIENTS, STATES, BUFFERS, OTHER = (
    "parameters",
    "gradients",
    "optimizer states",
    "buffers",
    "other tensors",
)
SAVED = "saved for backward passes, and others that Python does not see"
FEW = 3  # names of a kind that a text has
MOST = 8  # of a kind that have a name of their own
_ELSEWHERE = ("meta", "mesh")  # devices without memory of this process
# Texts of PyTorch's allocators for the host.
_NO_MEMORY = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory", "out of memory")
_NO_MEMORY_TYPES = frozenset({"MemoryError", "OutOfMemoryError", GpuMemoryError.__name__})


class HeldMemory(msgspec.Struct, array_like=True, frozen=True):
    """Memory of tensors of one kind and one name, in bytes; without a name, of all other ones of that kind."""

    kind: str
    name: str  # "Net.up.weight", "AdamW exp_avg of Net.up.weight", "float32 [64, 1024]"
    device: str
    size: int
    count: int = 1  # of allocations


class PeakPart(NamedTuple):
    """Memory of one kind at a peak. `source` is the line at which it was allocated, if nothing else is known.

    Of sharded tensors, `tensor` and `issued` are the numbers of its tensor and of the operation that made that, each
    with the number of the stream.
    """

    held: HeldMemory
    source: str = ""
    issued: tuple[int, int] | None = None
    tensor: tuple[int, int] | None = None


class PeakMemory(NamedTuple):
    """The most bytes of tensors at a time on one device, the line at which they existed, and their parts.

    `issued` is the operation on sharded tensors that made the last of them.
    """

    device: str
    size: int
    source: str
    parts: tuple[PeakPart, ...]
    issued: tuple[int, int] | None = None


class NamedTensor(NamedTuple):
    """A tensor with a name in the program."""

    kind: str
    name: str
    tensor: "torch.Tensor"


class LivingTensors:
    """The tensors of this process at a moment: named ones, and all. Holds the GIL for up to 0.1 s."""

    def __init__(self) -> None:
        self.all: list[torch.Tensor] = []
        self.named: list[NamedTensor] = []
        library = imported("torch")
        if library is None:
            return
        modules: list[torch.nn.Module] = []
        optimizers: list[Optimizer] = []
        for value in gc.get_objects():  # noqa: TID251 - the program has made them
            kind = type(value)  # without asking the object, which may be anything
            if issubclass(kind, library.Tensor):
                self.all.append(value)
            elif issubclass(kind, library.nn.Module):
                modules.append(value)
            elif issubclass(kind, library.optim.Optimizer):
                optimizers.append(value)
        self.named += _of_modules(modules)
        names = {id(named.tensor): named.name for named in self.named}
        for optimizer in optimizers:
            with suppress(Exception):
                self.named += tensors_of_optimizer(optimizer, lambda parameter: names.get(id(parameter)))


def _of_modules(modules: "Sequence[torch.nn.Module]") -> Iterator[NamedTensor]:
    """Yields parameters, gradients and buffers of the outermost modules; a name begins with the class of its module."""
    inner = {id(child) for module in modules for child in tuple(module.__dict__.get("_modules", {}).values())}
    for module in modules:
        if id(module) in inner:
            continue
        with suppress(Exception):  # a module under construction, or an unusual one
            prefix = type(module).__name__
            for name, parameter in module.named_parameters(prefix):
                yield NamedTensor(PARAMETERS, name, parameter)
                if parameter.grad is not None:
                    yield NamedTensor(GRADIENTS, name, parameter.grad)
            for name, buffer in module.named_buffers(prefix):
                yield NamedTensor(BUFFERS, name, buffer)


def tensors_of_optimizer(
    optimizer: "Optimizer", name_of: "Callable[[torch.Tensor], str | None]"
) -> Iterator[NamedTensor]:
    """Yields parameters, gradients and states of an optimizer; `name_of` returns the name of a parameter, if any."""
    title = type(optimizer).__name__
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in enumerate(parameters):
        name = name_of(parameter) or f"parameter {number} of {title}"
        yield NamedTensor(PARAMETERS, name, parameter)
        if parameter.grad is not None:
            yield NamedTensor(GRADIENTS, name, parameter.grad)
        state = optimizer.state.get(parameter, {})
        for key, value in state.items() if isinstance(state, dict) else ():
            if hasattr(value, "untyped_storage"):
                yield NamedTensor(STATES, f"{title} {key} of {name}", value)


class Allocated(NamedTuple):
    """The memory of a tensor; `key` is the same for all tensors in the same memory."""

    key: Hashable
    device: str
    size: int


def allocation_of(tensor: "torch.Tensor") -> Allocated | None:
    """Returns the memory of a tensor, or of a sharded tensor's part in this process; None if it has none here."""
    with suppress(Exception):  # tensors without a storage
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
        if storage.device.type not in _ELSEWHERE:
            return Allocated(storage._cdata, str(storage.device), storage.nbytes())
    return None


def type_and_shape(dtype: object, shape: Iterable[int]) -> str:
    """Formats a type and a shape: `float32 [64, 1024]`."""
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def held_memory(living: LivingTensors | None = None) -> tuple[HeldMemory, ...]:
    """Returns the memory of this process's tensors, each once, by the first name that it has; the largest first.

    Memory that only autograd holds, in the graphs of backward passes, is no object of Python. On a GPU it is known from
    the total of PyTorch's allocator.
    """
    living = living or LivingTensors()
    keys: set[Hashable] = set()
    parts: list[HeldMemory] = []
    for kind, name, tensor in living.named:
        if (memory := allocation_of(tensor)) is not None and memory.key not in keys:
            keys.add(memory.key)
            parts.append(HeldMemory(kind, name, memory.device, memory.size))
    sizes, counts = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for tensor in living.all:
        if (memory := allocation_of(tensor)) is not None and memory.key not in keys:
            keys.add(memory.key)
            alike = type_and_shape(tensor.dtype, tensor.shape), memory.device
            sizes[alike] += memory.size
            counts[alike] += 1
    parts += [HeldMemory(OTHER, label, device, size, counts[label, device]) for (label, device), size in sizes.items()]
    on_gpu = sum(part.size for part in parts if part.device.startswith("cuda"))
    unseen = _allocated_on_gpu() - on_gpu
    if unseen > 0:
        parts.append(HeldMemory(SAVED, "", "cuda", unseen, 0))
    return summed(parts)


def _allocated_on_gpu() -> int:
    """Returns the bytes of PyTorch's allocator on the GPU of this process; 0 without one."""
    cuda = getattr(imported("torch"), "cuda", None)
    with suppress(Exception):  # a device that has failed
        if cuda is not None and cuda.is_initialized():
            return int(sum(cuda.memory_allocated(device) for device in range(cuda.device_count())))
    return 0


def summed(parts: Iterable[HeldMemory]) -> tuple[HeldMemory, ...]:
    """Returns the largest of each kind, and the sum of all others of that kind; the kind with the most bytes first."""
    totals: dict[tuple[str, str, str], tuple[int, int]] = {}
    for part in parts:
        size, count = totals.get((part.kind, part.device, part.name), (0, 0))
        totals[part.kind, part.device, part.name] = size + part.size, count + part.count
    by_kind: dict[tuple[str, str], list[HeldMemory]] = {}
    for (kind, device, name), (size, count) in totals.items():
        if size:
            by_kind.setdefault((kind, device), []).append(HeldMemory(kind, name, device, size, count))
    groups = sorted(by_kind.values(), key=lambda group: -sum(part.size for part in group))
    summary: list[HeldMemory] = []
    for group in groups:
        group.sort(key=lambda part: (not part.name, -part.size))
        largest, rest = group[:MOST], group[MOST:]
        summary += largest
        if rest:
            size, count = sum(part.size for part in rest), sum(part.count for part in rest)
            summary.append(HeldMemory(rest[0].kind, "", rest[0].device, size, count))
    return tuple(summary)


def lines_of(parts: Iterable[HeldMemory]) -> list[str]:
    """Returns a line for each kind: `parameters 1.20 GB: Net.up.weight 400 MB, Net.down.weight 400 MB, 20 more`."""
    by_kind: dict[tuple[str, str], list[HeldMemory]] = {}
    for part in parts:
        by_kind.setdefault((part.kind, part.device), []).append(part)
    lines = []
    for (kind, device), group in by_kind.items():
        named = [part for part in group if part.name]
        texts = [_text(part) for part in named[:FEW]]
        unnamed = sum(part.count for part in group) - sum(part.count for part in named[:FEW])
        texts += [f"{unnamed:,} more"] * (unnamed > 0)
        location = "" if device == "cpu" else f" on {device}"
        size = size_text(sum(part.size for part in group))
        lines.append(f"{kind}{location} {size}" + (f": {', '.join(texts)}" if texts else ""))
    return lines


def _text(part: HeldMemory) -> str:
    name = part.name if part.count < 2 else f"{part.count:,} × {part.name}"
    return f"{name} {size_text(part.size)}"


def is_out_of_memory(type_name: str, text: str) -> bool:
    """Returns whether an error of this type and text means that memory of the host or of a GPU ran out."""
    if type_name in _NO_MEMORY_TYPES:
        return True
    return type_name in ("RuntimeError", "AcceleratorError") and any(part in text for part in _NO_MEMORY)


def out_of_memory_note() -> str:
    """Describes the memory of this process, by name, for an error of memory that ran out; "" if nothing is known."""
    lines: list[str] = []
    with suppress(Exception):  # the error is more important than its explanation
        lines += lines_of(held_memory())
        gpu = load()
        if gpu is not None and gpu.own >= 0 and gpu.used - gpu.own > gpu.total // 100:
            lines.append(f"other processes have {size_text(gpu.used - gpu.own)} of the GPU's {size_text(gpu.total)}")
    return "\n  ".join(["What holds the memory of this process, by name:", *lines]) if lines else ""
