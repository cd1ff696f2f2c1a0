"""Parameters that one side publishes and others pull, in whole versions, with any sharding on each side."""

import itertools
import struct
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING

import msgspec

from monarch_nb.rdma.buffer import RDMABuffer, aside, service
from monarch_nb.rdma.limits import Limit
from monarch_nb.rdma.memory import Memory, memory_of
from monarch_nb.rdma.movers import Move
from monarch_nb.runtime import Future

if TYPE_CHECKING:
    import torch

_TIMEOUT_S = 60.0
_VERSIONS = struct.Struct("<qq")  # the newest whole version, and the version being written
_AGAIN_S = 0.001


class Box(msgspec.Struct, array_like=True, frozen=True):
    """A shard of an array: its start and size in each dimension. Its own memory is row-major."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    def inside(self, shape: tuple[int, ...]) -> bool:
        """Returns whether the box lies within an array of a shape."""
        return len(self.start) == len(self.shape) == len(shape) and all(
            0 <= start <= start + size <= length
            for start, size, length in zip(self.start, self.shape, shape, strict=True)
        )

    def __and__(self, other: "Box") -> "Box":
        """Returns the intersection, which may be empty."""
        starts = tuple(max(a, b) for a, b in zip(self.start, other.start, strict=True))
        ends = (min(a + m, b + n) for a, m, b, n in zip(self.start, self.shape, other.start, other.shape, strict=True))
        return Box(starts, tuple(max(0, end - start) for start, end in zip(starts, ends, strict=True)))

    def index_of(self, point: tuple[int, ...]) -> int:
        """Row-major index of an element in the box."""
        number = 0
        for coordinate, start, size in zip(point, self.start, self.shape, strict=True):
            number = number * size + coordinate - start
        return number


class Stretch(msgspec.Struct, array_like=True, frozen=True):
    """A run of elements that is contiguous in both shards."""

    source: int  # index of the first element in the source
    target: int  # and in the target
    count: int


def common(source: Box, target: Box) -> Iterator[Stretch]:
    """Yields the stretches that two shards have in common, each as long as possible, in order."""
    both = source & target
    if not both.count:
        return
    dim = len(both.shape)  # from this dimension on, both shards consist of their intersection
    while dim and both.shape[dim - 1] == source.shape[dim - 1] == target.shape[dim - 1]:
        dim -= 1
    outer = max(0, dim - 1)
    count = prod(both.shape[outer:])
    ranges = (range(start, start + size) for start, size in zip(both.start[:outer], both.shape[:outer], strict=True))
    for point in itertools.product(*ranges):
        corner = (*point, *both.start[outer:])
        yield Stretch(source.index_of(corner), target.index_of(corner), count)


class Shard:
    """A tensor that is a part of a parameter: `start` is its place in the whole, whose shape is `of`."""

    def __init__(self, tensor: "torch.Tensor", *, start: Sequence[int], of: Sequence[int]) -> None:
        self.tensor = tensor
        self.shape = tuple(of)
        self.box = Box(tuple(start), tuple(tensor.shape))
        if not self.box.inside(self.shape):
            raise ValueError(
                f"a shard of shape {tuple(tensor.shape)} that starts at {tuple(start)} is not part of {tuple(of)}"
            )


class Part(msgspec.Struct, array_like=True, frozen=True):
    """A published parameter or shard."""

    shape: tuple[int, ...]  # of the whole
    box: Box
    dtype: str
    offset: int  # of its bytes in each slot
    size: int  # of an element


class PublishedParameters(msgspec.Struct, array_like=True, frozen=True):
    """The published parameters of a store, for readers."""

    parts: dict[str, Part]
    versions: RDMABuffer  # of the newest version and the one being written
    slots: tuple[RDMABuffer, ...]  # version n is in slot n % 2


class ParameterStore:
    """Publishes parameters: `publish()` copies their present values as the next version, and returns after the copy.

    `parameters` is a module, or tensors and `Shard`s by name, all on the CPU. The store holds two versions beside them,
    so that readers of the last one are not disturbed while the next is written: twice the memory of the parameters.
    """

    def __init__(self, parameters: "Mapping[str, torch.Tensor | Shard] | torch.nn.Module") -> None:
        self._shards = {name: _shard(tensor) for name, tensor in _named(parameters).items()}
        if not self._shards:
            raise ValueError("a ParameterStore publishes at least one parameter")
        self._parts: dict[str, Part] = {}
        offset = 0
        for name, shard in self._shards.items():
            size = shard.tensor.element_size()
            offset = -(-offset // 64) * 64
            self._parts[name] = Part(shard.shape, shard.box, str(shard.tensor.dtype), offset, size)
            offset += shard.box.count * size
        self._slots = [bytearray(max(1, offset)) for _ in range(2)]
        self._versions = bytearray(_VERSIONS.pack(0, 0))
        self._buffers = [RDMABuffer(memory, readonly=True) for memory in (self._versions, *self._slots)]

    @property
    def version(self) -> int:
        """Number of the latest version; 0 before the first."""
        return int(_VERSIONS.unpack(self._versions)[0])

    @property
    def source(self) -> "ParameterSource":
        """The source for readers, which pull from it: send it to them."""
        return ParameterSource((PublishedParameters(self._parts, self._buffers[0], tuple(self._buffers[1:])),))

    def publish(self) -> int:
        """Copies the parameters as the newest version; returns its number. Blocks meanwhile."""
        version = self.version + 1
        slot = memoryview(self._slots[version % 2])
        self._versions[:] = _VERSIONS.pack(version - 1, version)
        for name, shard in self._shards.items():
            part, memory = self._parts[name], memory_of(shard.tensor.detach().contiguous(), what=name)
            slot[part.offset : part.offset + memory.size] = (
                memory.read() if memory.device is not None else memory.view() if memory.size else b""
            )
        self._versions[:] = _VERSIONS.pack(version, version)
        return version

    def drop(self) -> None:
        """Ends the store: later pulls fail with BufferDroppedError."""
        for buffer in self._buffers:
            buffer.drop().get()


class ParameterSource:
    """Source of parameters: one store, or several with shards of the same parameters."""

    def __init__(self, stores: Iterable[PublishedParameters]) -> None:
        self._stores = tuple(stores)

    @classmethod
    def of(cls, sources: "Iterable[ParameterSource]") -> "ParameterSource":
        """Joins sources whose shards together are the parameters, such as those of all ranks of a learner."""
        return cls(store for source in sources for store in source._stores)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The published parameters, with the shapes of the wholes."""
        return {name: part.shape for store in self._stores for name, part in store.parts.items()}

    def pull(
        self,
        into: "Mapping[str, torch.Tensor | Shard] | torch.nn.Module",
        *,
        after: int = 0,
        timeout: float = _TIMEOUT_S,
    ) -> Future[int]:
        """Reads one whole version, the same of all stores, into tensors or `Shard`s; the future has its number.

        `after` waits for a later version than that. Raises KeyError for a parameter that nobody publishes, and
        ValueError where shapes or types differ, or shards are missing. The future fails as that of
        `RDMABuffer.read_into`.
        """
        shards = {name: _shard(tensor) for name, tensor in _named(into).items()}
        moves = [self._moves(store, shards) for store in self._stores]
        self._check(shards)
        least = max(1, after + 1)

        def work(limit: Limit) -> int:
            while True:
                version = self._newest(limit)
                if version >= least:
                    for store, pieces in zip(self._stores, moves, strict=True):
                        handle = store.slots[version % 2].handle
                        _transfer([Move(handle, offset, memory) for offset, memory in pieces], limit)
                    if all(writing < version + 2 for _, writing in self._marks(limit)):
                        return version
                limit.remaining()
                time.sleep(_AGAIN_S)

        return aside(work, Limit(timeout, "pulling parameters"))

    def _newest(self, limit: Limit) -> int:
        """Returns the newest version that all stores have."""
        return min(version for version, _ in self._marks(limit))

    def _marks(self, limit: Limit) -> list[tuple[int, int]]:
        marks = []
        for store in self._stores:
            room = bytearray(_VERSIONS.size)
            _transfer([Move(store.versions.handle, 0, memory_of(room, writable=True))], limit)
            marks.append(_VERSIONS.unpack(room))
        return marks

    @staticmethod
    def _moves(store: PublishedParameters, shards: Mapping[str, Shard]) -> list[tuple[int, Memory]]:
        """Returns the reads from a store: offsets in its slots, and local memory."""
        moves = []
        for name, shard in shards.items():
            part = store.parts.get(name)
            if part is None:
                continue
            dtype = str(shard.tensor.dtype)
            if (part.shape, part.dtype) != (shard.shape, dtype):
                raise ValueError(
                    f"{name} is published as {part.dtype} of shape {part.shape}, and is to be pulled into {dtype} of "
                    f"shape {shard.shape}"
                )
            target = memory_of(shard.tensor, writable=True, what=name)
            for stretch in common(part.box, shard.box):
                memory = target.part(stretch.target * part.size, stretch.count * part.size)
                moves.append((part.offset + stretch.source * part.size, memory))
        return moves

    def _check(self, shards: Mapping[str, Shard]) -> None:
        """Raises if a parameter, or a part of one, is not published."""
        for name, shard in shards.items():
            parts = [store.parts[name] for store in self._stores if name in store.parts]
            if not parts:
                raise KeyError(f"nobody publishes {name}; there are {', '.join(sorted(self.shapes))}")
            covered = sum((part.box & shard.box).count for part in {part.box: part for part in parts}.values())
            if covered < shard.box.count:
                raise ValueError(
                    f"the stores of this source have {covered:,} of the {shard.box.count:,} elements of {name} that are"
                    " wanted: join the sources of all ranks with ParameterSource.of(...)"
                )


def _transfer(moves: list[Move], limit: Limit) -> None:
    if moves:
        service().routes.transfer(moves, limit, write=False)


def _named(parameters: "Mapping[str, torch.Tensor | Shard] | torch.nn.Module") -> "dict[str, torch.Tensor | Shard]":
    if isinstance(parameters, Mapping):
        return dict(parameters)
    if hasattr(parameters, "state_dict"):
        return dict(parameters.state_dict())
    raise TypeError(f"parameters are a module, or tensors by name, not {type(parameters).__name__}")


def _shard(tensor: "torch.Tensor | Shard") -> Shard:
    if isinstance(tensor, Shard):
        return tensor
    shape = tuple(tensor.shape)
    return Shard(tensor, start=(0,) * len(shape), of=shape)
