"""The lines of the program that allocated the tensors of one thread, as long as these live."""

import sys
import weakref
from collections.abc import Iterator
from types import CodeType
from typing import NamedTuple, TypeAlias

import torch
from torch._ops import OpOverload

from monarch_nb.diagnosis.nonfinite_rank import WatchMode
from monarch_nb.wire import users_frame

_KINDS = (torch.Tensor, torch.nn.Parameter)


class AllocatedAt(NamedTuple):
    """Where tensors of the same kind were allocated."""

    source: str  # "file:line", "" where no line of the program is known
    what: str  # "float32 [64, 1024]"
    device: str


# The user's code and line, dtype, shape and device: what a record of an allocation is made from.
_Key: TypeAlias = "tuple[CodeType | None, int, torch.dtype, torch.Size, torch.device]"


class _Storage:
    """Memory of tensors, with references to those that live."""

    __slots__ = ("bytes", "key", "tensors")

    def __init__(self, key: _Key, size: int) -> None:
        self.key, self.bytes = key, size
        self.tensors: dict[int, _Reference] = {}  # by id: as keys they would be compared, as tensors are


class _Reference(weakref.ref[torch.Tensor]):
    """One tensor in a storage."""

    __slots__ = ("number", "storage")
    number: int
    storage: _Storage


class TensorAllocations(WatchMode):
    """Records where the storages of tensors come from, and forgets those that are freed."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, _Storage] = {}
        self._may_allocate: dict[OpOverload, bool] = {}

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: tuple[type, ...],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        results = func(*args, **kwargs) if kwargs else func(*args)
        may_allocate = self._may_allocate.get(func)
        if may_allocate is None:
            may_allocate = any(each.alias_info is None or not each.alias_info.is_write for each in func._schema.returns)
            self._may_allocate[func] = may_allocate
        if may_allocate:
            for tensor in _strided(results):
                self._record(tensor, args, kwargs)
        return results

    def _record(self, tensor: torch.Tensor, args: object, kwargs: object) -> None:
        memory = tensor.untyped_storage()
        number = memory._cdata
        storage = self._storages.get(number)
        if storage is None:
            if any(given.untyped_storage()._cdata == number for given in _strided((args, kwargs))):
                return  # a view of what was there before
            frame = users_frame(sys._getframe(2))
            line = (frame.f_code, frame.f_lineno) if frame is not None else (None, 0)
            storage = _Storage((*line, tensor.dtype, tensor.shape, tensor.device), memory.nbytes())
            self._storages[number] = storage
        reference = _Reference(tensor, self._forget)
        reference.number, reference.storage = number, storage
        storage.tensors[id(reference)] = reference

    def _forget(self, reference: weakref.ref[torch.Tensor]) -> None:
        assert isinstance(reference, _Reference)
        storage = reference.storage
        del storage.tensors[id(reference)]
        if not storage.tensors and self._storages.get(reference.number) is storage:
            del self._storages[reference.number]

    def alive(self) -> dict[AllocatedAt, tuple[int, int]]:
        """The bytes and the number of allocations that live, by where they were made. Any thread."""
        by_key: dict[_Key, tuple[int, int]] = {}
        for storage in tuple(self._storages.values()):
            size, count = by_key.get(storage.key, (0, 0))
            by_key[storage.key] = size + storage.bytes, count + 1
        return {_allocated_at(*key): value for key, value in by_key.items()}


def _allocated_at(
    code: CodeType | None, line: int, dtype: torch.dtype, shape: torch.Size, device: torch.device
) -> AllocatedAt:
    source = f"{code.co_filename}:{line}" if code is not None else ""
    return AllocatedAt(source, f"{str(dtype).removeprefix('torch.')} {list(shape)}", str(device))


def _strided(values: object) -> Iterator[torch.Tensor]:
    """Yields the strided tensors in arguments or results, which are tensors, or lists, tuples and dicts of these."""
    if isinstance(values, torch.Tensor):
        if type(values) in _KINDS and values.layout is torch.strided:
            yield values
    elif isinstance(values, list | tuple):
        for each in values:
            yield from _strided(each)
    elif isinstance(values, dict):
        yield from _strided(list(values.values()))
