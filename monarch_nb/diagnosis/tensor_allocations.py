"""The lines that allocated the living tensors of a thread, those of its peak, and those that issued its operations.

The second are noted on each rank; of sharded tensors, only the controller knows which lines and modules issued them.
"""

import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from types import CodeType, FrameType
from typing import Any, NamedTuple, TypeAlias

import msgspec
import torch
from torch._ops import OpOverload
from torch._subclasses import FakeTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from monarch_nb.diagnosis.nonfinite_rank import ForwardRecord, ModulePaths, NonFinite, WatchMode
from monarch_nb.runtime.tensor_memory import (
    BUFFERS,
    GRADIENTS,
    OTHER,
    PARAMETERS,
    STATES,
    HeldMemory,
    LivingTensors,
    NamedTensor,
    PeakMemory,
    PeakPart,
    tensors_of_optimizer,
    type_and_shape,
)
from monarch_nb.wire import users_frame

ACTIVATIONS, BACKWARD = "activations", "made in backward passes"
UNSEEN = "other memory of PyTorch's allocator, such as workspaces"
_NAMED = frozenset({PARAMETERS, GRADIENTS, STATES, BUFFERS})  # kinds that the program has names for
_KINDS = (torch.Tensor, torch.nn.Parameter)
MOST_ISSUED = 1 << 20  # operations whose lines are known

CallSite: TypeAlias = tuple[CodeType, int]
Sites: TypeAlias = Sequence[CallSite | None]
Issued: TypeAlias = Callable[[CallSite | None], CallSite | None]
Sent: TypeAlias = Callable[[int, int, Sites], None]
Joined: TypeAlias = Callable[[], None]


class AllocatedAt(NamedTuple):
    """The line that allocated memory of tensors of one kind."""

    source: str  # "file:line", "" where no line of the program is known
    what: str  # "float32 [64, 1024]"
    device: str


# The user's code and line, dtype, shape and device: the key of an allocation's record.
_Key: TypeAlias = "tuple[CodeType | None, int, torch.dtype, torch.Size, torch.device]"


class _Allocation:
    """One allocation, also after its end. `number` counts allocations from 1."""

    __slots__ = ("bytes", "issued", "key", "kind", "name", "number", "tensor")

    def __init__(self, key: _Key, size: int, number: int, kind: str = OTHER, module: str = "") -> None:
        self.key, self.bytes, self.number = key, size, number
        self.kind, self.name = kind, module
        self.issued: tuple[int, int] | None = None
        self.tensor: tuple[int, int] | None = None

    def part(self) -> PeakPart:
        """Returns its share of a peak, by name or module if it has one, else by line, else by type and shape."""
        site = _allocated_at(*self.key)
        name, source = self.name or site.what, "" if self.name else site.source
        return PeakPart(HeldMemory(self.kind, name, site.device, self.bytes), source, self.issued, self.tensor)


class _Storage(weakref.ref[torch.UntypedStorage]):
    """Memory of tensors while it lives, even if only the graph of a backward pass holds it."""

    __slots__ = ("allocation", "number")
    allocation: _Allocation
    number: int


class _Peak:
    """The sum of the allocations on one device, and the allocations of its peak that have ended since."""

    __slots__ = ("allocation", "ended", "most", "now")

    def __init__(self) -> None:
        self.now = self.most = 0
        self.allocation: _Allocation | None = None  # the last one before the peak
        self.ended: list[_Allocation] = []

    def begins(self, allocation: _Allocation) -> None:
        self.now += allocation.bytes
        if self.now > self.most:
            self.most, self.allocation = self.now, allocation
            self.ended.clear()

    def ends(self, allocation: _Allocation) -> None:
        self.now -= allocation.bytes
        if self.allocation is not None and allocation.number <= self.allocation.number:
            self.ended.append(allocation)


class TensorAllocations(WatchMode):
    """Records the origin of tensors' memory, and forgets memory that is freed, unless it lived at the peak.

    Memory of earlier tensors counts in peaks. In a worker of sharded tensors, `operation_in` returns the operation
    that runs in a frame.
    """

    def __init__(self, operation_in: Callable[[FrameType], tuple[int, int] | None] | None = None) -> None:
        super().__init__()
        self._operation_in = operation_in
        self._storages: dict[int, _Storage] = {}
        self._may_allocate: dict[OpOverload, bool] = {}
        self._count = 0
        self._peaks: dict[torch.device, _Peak] = {}
        self._names: Any = WeakTensorKeyDictionary()  # of parameters
        self._forward: ForwardRecord[str] = ForwardRecord()
        self._thread = threading.get_ident()
        self._modules = ModulePaths(lambda: threading.get_ident() == self._thread)
        self._hooks = [
            register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: self._step(optimizer)),
            register_optimizer_step_post_hook(lambda optimizer, args, kwargs: self._step(optimizer)),
        ]
        before = LivingTensors()
        for tensor in before.all:
            for local in _strided(getattr(tensor, "_local_tensor", tensor)):
                memory = local.untyped_storage()
                if memory._cdata not in self._storages and memory.device.type != "meta":
                    self._begins(memory, _Allocation(_key(local), memory.nbytes(), self._next_number()))
        self._before = self._count
        self._label(before.named)
        self._maxima = _allocator_maxima()
        self.enter()

    def end(self) -> tuple[PeakMemory, ...]:
        """Ends recording; freed memory is still forgotten. Returns the peak of each device, the largest first."""
        self.leave()
        for hook in self._hooks:
            hook.remove()
        self._modules.end()
        self._label(LivingTensors().named)
        return tuple(sorted(self._device_peaks(), key=lambda peak: -peak.size))

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: tuple[type, ...],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        if any(kind not in _KINDS for kind in types):
            if any(issubclass(kind, FakeTensor) for kind in types):
                return func(*args, **(kwargs or {}))  # has no memory
            return NotImplemented  # of a subclass, such as DTensor, the operations on its parts are seen
        results = func(*args, **kwargs) if kwargs else func(*args)
        is_backward = torch._C._current_graph_task_id() != -1
        if not is_backward and torch.is_grad_enabled():
            self._forward.note(lambda: self._modules.current)
        may_allocate = self._may_allocate.get(func)
        if may_allocate is None:
            may_allocate = any(item.alias_info is None or not item.alias_info.is_write for item in func._schema.returns)
            self._may_allocate[func] = may_allocate
        if may_allocate:
            for tensor in _strided(results):
                self._record(tensor, args, kwargs, is_backward=is_backward)
        return results

    def _record(self, tensor: torch.Tensor, args: object, kwargs: object, *, is_backward: bool) -> None:
        memory = tensor.untyped_storage()
        if memory._cdata in self._storages or tensor.is_meta:
            return
        if any(argument.untyped_storage()._cdata == memory._cdata for argument in _strided((args, kwargs))):
            return  # a view of memory that another thread has allocated
        frame = sys._getframe(2)
        users = users_frame(frame) if self._operation_in is None else None  # else its line is not in this process
        module = (self._forward.of_backward() or "") if is_backward else self._modules.current
        kind = BACKWARD if is_backward else ACTIVATIONS if module else OTHER
        allocation = _Allocation(_key(tensor, users.f_code if users else None, users.f_lineno if users else 0),
                                 memory.nbytes(), self._next_number(), kind, module)  # fmt: skip
        if self._operation_in is not None:
            allocation.issued = self._operation_in(frame)
        self._begins(memory, allocation)

    def _next_number(self) -> int:
        self._count += 1
        return self._count

    def _begins(self, memory: torch.UntypedStorage, allocation: _Allocation) -> None:
        storage = _Storage(memory, self._ends)
        storage.number, storage.allocation = memory._cdata, allocation
        self._storages[storage.number] = storage
        self._peaks.setdefault(allocation.key[-1], _Peak()).begins(allocation)

    def _ends(self, storage: weakref.ref[torch.UntypedStorage]) -> None:
        assert isinstance(storage, _Storage)
        if self._storages.get(storage.number) is storage:
            del self._storages[storage.number]
            self._peaks[storage.allocation.key[-1]].ends(storage.allocation)

    def _step(self, optimizer: Optimizer) -> None:
        """Labels the tensors of an optimizer, before and after its step, which may free gradients."""
        if not torch.compiler.is_compiling():
            if any(parameter not in self._names for group in optimizer.param_groups for parameter in group["params"]):
                self._label(LivingTensors().named)
            self._label(tensors_of_optimizer(optimizer, self._names.get))

    def _label(self, named: Iterable[NamedTensor]) -> None:
        for kind, name, tensor in named:
            if kind == PARAMETERS:
                self._names.setdefault(tensor, name)
            for local in _strided(getattr(tensor, "_local_tensor", tensor)):
                storage = self._storages.get(local.untyped_storage()._cdata)
                if storage is not None and storage.allocation.kind not in _NAMED:
                    storage.allocation.kind, storage.allocation.name = kind, name

    def label_numbers(self, tensors: Iterable[tuple[tuple[int, int], torch.Tensor]]) -> None:
        """Labels living tensors with the stream and number by which the controller knows them."""
        for number, tensor in tensors:
            storage = self._storages.get(tensor.untyped_storage()._cdata)
            if storage is not None and storage.allocation.tensor is None:
                storage.allocation.tensor = number

    def alive(self) -> dict[AllocatedAt, tuple[int, int]]:
        """Returns bytes and number of the living allocations since the beginning, by origin. Any thread."""
        by_key: dict[_Key, tuple[int, int]] = {}
        for storage in tuple(self._storages.values()):
            block = storage.allocation
            if block.number <= self._before:
                continue
            size, count = by_key.get(block.key, (0, 0))
            by_key[block.key] = size + block.bytes, count + 1
        return {_allocated_at(*key): value for key, value in by_key.items()}

    def _device_peaks(self) -> Iterator[PeakMemory]:
        maxima = _allocator_maxima()
        alive = [storage.allocation for storage in tuple(self._storages.values())]
        for device, peak in tuple(self._peaks.items()):
            last = peak.allocation
            if last is not None:
                lived = [block for block in alive if block.key[-1] == device and block.number <= last.number]
                parts = [block.part() for block in (*lived, *peak.ended)]
                unseen = maxima.get(device, 0) - peak.most
                if unseen > 0 and maxima[device] > self._maxima.get(device, 0):  # the allocator's peak is recent
                    parts.append(PeakPart(HeldMemory(UNSEEN, "", str(device), unseen, 0)))
                size = peak.most + sum(part.held.size for part in parts[len(lived) + len(peak.ended) :])
                yield PeakMemory(str(device), size, _allocated_at(*last.key).source, _summed(parts), last.issued)


def _allocator_maxima() -> dict[torch.device, int]:
    """Returns the most bytes that PyTorch has had allocated at a time, by GPU; empty while CUDA is not in use."""
    is_in_use: Callable[[], bool] = torch.cuda.is_initialized  # without types
    gpus = range(torch.cuda.device_count() if is_in_use() else 0)
    return {torch.device("cuda", index): torch.cuda.max_memory_allocated(index) for index in gpus}


def _summed(parts: Iterable[PeakPart]) -> tuple[PeakPart, ...]:
    """Merges parts that are alike; the largest first."""
    alike: dict[PeakPart, list[HeldMemory]] = {}
    for part in parts:
        alike.setdefault(part._replace(held=msgspec.structs.replace(part.held, size=0)), []).append(part.held)
    sums = [
        part._replace(held=msgspec.structs.replace(part.held, size=sum(item.size for item in group), count=len(group)))
        for part, group in alike.items()
    ]
    return tuple(sorted(sums, key=lambda part: -part.held.size))


def _key(tensor: torch.Tensor, code: CodeType | None = None, line: int = 0) -> _Key:
    return code, line, tensor.dtype, tensor.shape, tensor.device


def _allocated_at(
    code: CodeType | None, line: int, dtype: torch.dtype, shape: torch.Size, device: torch.device
) -> AllocatedAt:
    source = f"{code.co_filename}:{line}" if code is not None else ""
    return AllocatedAt(source, type_and_shape(dtype, shape), str(device))


def _strided(values: object) -> Iterator[torch.Tensor]:
    """Yields the strided tensors in arguments or results, which are tensors, or lists, tuples and dicts of these."""
    if isinstance(values, torch.Tensor):
        if type(values) in _KINDS and values.layout is torch.strided:
            yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _strided(value)
    elif isinstance(values, dict):
        yield from _strided(list(values.values()))


class _Site(tuple[CodeType, int]):
    """A call site, with the module that ran there, or whose backward pass it belongs to."""

    module = ""
    is_backward = False
    forward: "_Site | None" = None


class Origin(NamedTuple):
    """The line that issued an operation, its module, "" outside of modules, and whether a backward pass did."""

    source: str
    module: str = ""
    backward: bool = False

    @property
    def kind(self) -> str:
        """The kind of memory that the operation allocates."""
        return BACKWARD if self.backward else ACTIVATIONS if self.module else OTHER


def _line(site: CallSite) -> str:
    code, instruction = site
    lines = (line for _, end, line in code.co_lines() if line is not None and end > instruction)
    return f"{code.co_filename}:{next(lines, code.co_firstlineno)}"


class IssuedOperations:
    """Notes where operations are issued, from `begin` to `end`; `observe` takes the functions that note them."""

    def __init__(self, observe: Callable[[Issued | None, Sent, Joined], None]) -> None:
        self._observe = observe
        self._sent: deque[tuple[int, int, Sites]] = deque()  # streams, first numbers, sites
        self._count = 0
        self._forward: ForwardRecord[_Site] = ForwardRecord()
        self._modules: ModulePaths | None = None

    def begin(self, joined: Joined = lambda: None) -> None:
        """Begins; `joined` is called when further actors execute operations."""
        self._modules = ModulePaths(lambda: True)
        self._observe(self._note_issued, self._note_sent, joined)

    def end(self) -> None:
        """Ends; may be called several times."""
        if self._modules is not None:
            self._modules.end()
            self._modules = None
            self._observe(None, self._note_sent, lambda: None)

    def located(self, event: NonFinite | None) -> NonFinite | None:
        """Returns the event with the line and the module that issued its operation, if they are known."""
        if event is None or event.issued is None:
            return event
        origin = self.origin(event.issued)
        return event if origin is None else replace(event, **origin._asdict())

    def origin(self, issued: tuple[int, int]) -> "Origin | None":
        """Returns the origin of the operation with this number of a stream; None if it was issued before `begin`."""
        stream, number = issued
        for of_stream, first, sites in self._sent:
            if of_stream == stream and first <= number < first + len(sites):
                site = sites[number - first]
                if isinstance(site, _Site):
                    source = site.forward or site
                    return Origin(_line(source), source.module, site.is_backward)
                return None if site is None else Origin(_line(site))
        return None

    def _note_issued(self, call_site: CallSite | None) -> CallSite | None:
        if call_site is None or self._modules is None or type(call_site) is not tuple:
            return call_site  # of a compiled step: the sites of all its operations
        site = _Site(call_site)
        if torch._C._current_graph_task_id() != -1:
            site.is_backward = True
            site.forward = self._forward.of_backward()
        else:
            site.module = self._modules.current
            if torch.is_grad_enabled():
                self._forward.note(lambda: site)
        return site

    def _note_sent(self, stream: int, first: int, sites: Sites) -> None:
        self._sent.append((stream, first, sites))
        self._count += len(sites)
        while self._count > MOST_ISSUED:
            self._count -= len(self._sent.popleft()[2])
