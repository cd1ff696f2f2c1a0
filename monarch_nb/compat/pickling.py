"""The pickling helpers that frameworks extend: `monarch._src.actor.pickle`.

`flatten` takes some objects out of a pickle and `unflatten` puts others in their places. Entries that a program adds to
the dispatch table of `_Pickler` or `_TorchPickler` count for messages of the engine too.
"""

import io
import pickle
import sys
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import cloudpickle.cloudpickle as cp

from monarch_nb.wire import DISPATCH_TABLE, REDUCERS, without_modes

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class Sink(Protocol):
    """The target of a pickle."""

    def write(self, data: "ReadableBuffer", /) -> object:
        """Writes some bytes."""


class Buffer:
    """Bytes that are being written."""

    def __init__(self) -> None:
        self._content = bytearray()

    def write(self, data: "ReadableBuffer") -> int:
        """Adds a copy of bytes; returns their number. Raises BufferError for memory with gaps."""
        view = memoryview(data)
        if not view.c_contiguous:
            raise BufferError("buffer is not C-contiguous: copy it first")
        self._content += view.cast("B") if view.nbytes else b""
        return view.nbytes

    def freeze(self) -> "FrozenBuffer":
        """Returns the content for reading. The buffer is empty afterwards."""
        content, self._content = bytes(self._content), bytearray()
        return FrozenBuffer(content)

    def __len__(self) -> int:
        return len(self._content)


class FrozenBuffer(io.BytesIO):
    """Bytes to be read."""

    def __len__(self) -> int:
        return self.getbuffer().nbytes


def _torch() -> ModuleType:
    import torch

    return torch


def maybe_torch() -> ModuleType | None:
    """Returns torch if this process has imported it."""
    return _torch() if "torch" in sys.modules else None


def _load_storage(content: bytes) -> object:
    return _torch().load(io.BytesIO(content), map_location="cpu", weights_only=False)


def _reduce_storage(storage: object) -> object:
    into = io.BytesIO()
    _torch().save(storage, into, _use_new_zipfile_serialization=False)
    return _load_storage, (into.getvalue(),)


_storages: dict[type, Callable[[Any], object]] = {}


def _ensure_torch_pickle() -> None:
    """Makes storages of torch pickled by value; imports torch."""
    storage = _torch().storage
    kinds: list[type] = [storage.UntypedStorage, storage.TypedStorage]
    for kind in kinds:
        kinds += kind.__subclasses__()
        _storages[kind] = _reduce_storage


class _TorchPickler(cp.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """Pickles code by value, and tensors with their storages."""

    dispatch_table: ClassVar[ChainMap[type, Callable[[Any], object]]] = ChainMap(
        REDUCERS, _storages, *DISPATCH_TABLE.maps
    )

    def __init__(self, file: Sink) -> None:
        if maybe_torch() is not None and not _storages:
            _ensure_torch_pickle()
        super().__init__(file)


class _Pickler(_TorchPickler):
    """As `_TorchPickler`, but leaves out objects for which `filter` is true, and keeps them in `_saved`."""

    _dispatch_table: ClassVar[dict[type, Callable[[Any], object]]] = REDUCERS

    def __init__(self, filter: Callable[[object], bool], file: Sink) -> None:
        super().__init__(file)
        self._filter = filter
        self._saved: list[object] = []

    def persistent_id(self, obj: object) -> int | None:
        """Returns the number of an object that is left out; None for the others."""
        if not self._filter(obj):
            return None
        self._saved.append(obj)
        return len(self._saved) - 1


class _Unpickler(pickle.Unpickler):
    """Reads the output of `_Pickler`, with other objects in the places of those that were left out."""

    def __init__(self, data: "bytes | FrozenBuffer", values: Iterable[object]) -> None:
        super().__init__(data if isinstance(data, FrozenBuffer) else io.BytesIO(data))
        self._left: Iterator[object] = iter(values)
        self._values: list[object] = []

    def persistent_load(self, number: int) -> object:
        """Returns the object that replaces the one with this number."""
        while number >= len(self._values):
            self._values.append(next(self._left))
        return self._values[number]


def flatten(obj: object, filter: Callable[[object], bool]) -> tuple[list[object], Buffer]:
    """Pickles `obj` without the objects for which `filter` is true; returns these, in order, and the pickle."""
    buffer = Buffer()
    pickler = _Pickler(filter, buffer)
    with without_modes():
        pickler.dump(obj)
    return pickler._saved, buffer


def unflatten(data: FrozenBuffer | bytes, values: Iterable[object]) -> Any:
    """Returns the object that `flatten` has pickled, with `values` in the places of the objects left out.

    Executes whatever the pickle contains: only for data of trusted processes.
    """
    with without_modes():
        return _Unpickler(data, values).load()


def torch_dump(obj: object, file: Sink) -> None:
    """Pickles `obj` into a file, tensors by value."""
    _ensure_torch_pickle()
    _TorchPickler(file).dump(obj)


def torch_loads(data: FrozenBuffer | bytes) -> Any:
    """Reads the output of `torch_dump`, with no mode of torch in force. Only for data of trusted processes."""
    return unflatten(data, ())


__all__ = ["Buffer", "FrozenBuffer", "flatten", "maybe_torch", "torch_dump", "torch_loads", "unflatten"]
