"""The lines of the program that allocated the tensors of one thread, as long as these live."""

import sys
import weakref
from collections.abc import Iterator, Set
from typing import NamedTuple

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from monarch_nb.diagnosis.nonfinite_rank import users_line


class AllocatedAt(NamedTuple):
    """Where tensors of the same kind were allocated."""

    source: str  # "file:line", "" where no line of the program is known
    what: str  # "float32 [64, 1024]"
    device: str


def _strided(values: object) -> Iterator[torch.Tensor]:
    for value in tree_leaves(values):
        if type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided:
            yield value


class _Storage:
    __slots__ = ("bytes", "key", "tensors")

    def __init__(self, key: AllocatedAt, size: int) -> None:
        self.key, self.bytes, self.tensors = key, size, 0


class TensorAllocations(TorchDispatchMode):
    """Records where the storages of tensors come from, and forgets those that are freed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages: dict[int, _Storage] = {}

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: tuple[type, ...],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        results = func(*args, **(kwargs or {}))
        given = {tensor.untyped_storage()._cdata for tensor in _strided((args, kwargs))}
        for tensor in _strided(results):
            self._record(tensor, given)
        return results

    def _record(self, tensor: torch.Tensor, given: Set[int]) -> None:
        storage = tensor.untyped_storage()
        number = storage._cdata
        known = self._storages.get(number)
        if known is None:
            if number in given:
                return  # a view of what was there before, or written in place
            what = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
            key = AllocatedAt(users_line(sys._getframe(2)), what, str(tensor.device))
            known = self._storages[number] = _Storage(key, storage.nbytes())
        known.tensors += 1
        weakref.finalize(tensor, self._forget, number, known).atexit = False

    def _forget(self, number: int, storage: _Storage) -> None:
        storage.tensors -= 1
        if not storage.tensors and self._storages.get(number) is storage:
            del self._storages[number]

    def alive(self) -> dict[AllocatedAt, tuple[int, int]]:
        """The bytes and the number of allocations that live, by where they were made. Any thread."""
        found: dict[AllocatedAt, tuple[int, int]] = {}
        for storage in tuple(self._storages.values()):
            size, count = found.get(storage.key, (0, 0))
            found[storage.key] = size + storage.bytes, count + 1
        return found
