"""Shards of tensors that one side offers and others read, with any sharding on each side: in place, or as parameters,
which are published in whole versions.
"""

import itertools
import struct
import time
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from typing import TYPE_CHECKING

import msgspec

from monarch_nb.rdma.buffer import RDMABuffer, aside, service
from monarch_nb.rdma.errors import Limit, OwnerLostError, RDMAError, side_by_side
from monarch_nb.rdma.memory import Memory, memory_of
from monarch_nb.rdma.movers import Move
from monarch_nb.rdma.verbs import own_identity
from monarch_nb.runtime import Future
from monarch_nb.wire import host_of, parse_address

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


class OfferedShard(msgspec.Struct, array_like=True, frozen=True):
    """A shard in the memory of a process. `buffer` is None for a shard without elements."""

    shape: tuple[int, ...]  # of the whole
    box: Box
    dtype: str
    size: int  # of an element
    buffer: RDMABuffer | None

    def __str__(self) -> str:
        if self.buffer is None:
            return "no elements"
        handle = self.buffer.handle
        return f"rank {parse_address(handle.process).rank} on {host_of(handle.process)}, {handle.owner}"


class OfferedShards:
    """Shards by the name of their tensor, of one process or of several. Send it; the bytes stay in place.

    Memory is offered until `drop()`, or the end of the actor that offered it.
    """

    def __init__(self, shards: Mapping[str, tuple[OfferedShard, ...]]) -> None:
        self._shards = dict(shards)

    @classmethod
    def offer(cls, shards: Mapping[str, Shard]) -> "OfferedShards":
        """Offers shards in memory of this process for reading. Raises ValueError for memory that cannot be offered."""
        return cls(
            {
                name: (
                    OfferedShard(
                        shard.shape,
                        shard.box,
                        str(shard.tensor.dtype),
                        shard.tensor.element_size(),
                        RDMABuffer(shard.tensor, readonly=True) if shard.box.count else None,
                    ),
                )
                for name, shard in shards.items()
            }
        )

    @classmethod
    def join(cls, several: "Iterable[OfferedShards]") -> "OfferedShards":
        """Joins the shards of several processes. Raises ValueError for shards that are not parts of the same tensor."""
        joined: dict[str, list[OfferedShard]] = defaultdict(list)
        for offered in several:
            for name, shards in offered._shards.items():
                joined[name] += shards
        for name, parts in joined.items():
            first = parts[0]
            for shard in parts:
                if (shard.shape, shard.dtype) != (first.shape, first.dtype):
                    raise ValueError(
                        f"{name} is {first.dtype} of shape {first.shape} on {first}, and {shard.dtype} of shape "
                        f"{shard.shape} on {shard}"
                    )
            if sum(box.count for box in {shard.box for shard in parts}) > prod(first.shape):
                raise ValueError(f"{name} has shards that overlap: they are of tensors that are placed differently")
        return cls({name: tuple(parts) for name, parts in joined.items()})

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The names of the tensors, with the shapes of the wholes."""
        return {name: shards[0].shape for name, shards in self._shards.items()}

    def check(self, name: str, shape: tuple[int, ...], dtype: str, box: Box | None = None) -> None:
        """Raises KeyError without a tensor of this name, ValueError if it differs or a part of the box is missing."""
        shards = self._shards.get(name)
        if shards is None:
            names = sorted(self._shards)
            more = f" and {len(names) - 8} others" if len(names) > 8 else ""
            raise KeyError(f"{name} is not among the shared tensors, which are {', '.join(names[:8])}{more}")
        first = shards[0]
        if (first.shape, first.dtype) != (shape, dtype):
            raise ValueError(
                f"{name} is {first.dtype} of shape {first.shape} on {first}, and cannot be loaded into {dtype} of "
                f"shape {shape}"
            )
        target = box if box is not None else Box((0,) * len(shape), shape)
        covered = sum((part & target).count for part in {shard.box for shard in shards})
        if covered < target.count:
            raise ValueError(
                f"{covered:,} of the {target.count:,} elements of {name} that are wanted are shared, by "
                f"{'; '.join(map(str, shards))}: join what all ranks share"
            )

    def read_into(self, shards: Mapping[str, Shard], timeout: float) -> None:
        """Reads the parts of these shards, from each process separately; blocks.

        Of equal parts it reads the nearest, and another one if its process is lost. Raises what `check` and
        `RDMABuffer.read_into` raise; OwnerLostError names the tensor and the rank.
        """
        for name, shard in shards.items():
            self.check(name, shard.shape, str(shard.tensor.dtype), shard.box)
        limit = Limit(timeout, "reading shared tensors")
        lost: dict[str, RDMAError] = {}
        while True:
            moves = self._moves(shards, lost)
            before = len(lost)
            if moves:
                side_by_side([partial(_read, process, own, limit, lost) for process, own in moves.items()])
            if len(lost) == before:
                return

    def local_shards(self) -> dict[str, object]:
        """Returns the shards with elements in memory of this process, as they were offered."""
        local: dict[str, object] = {}
        for name, shards in self._shards.items():
            for buffer in (shard.buffer for shard in shards):
                if buffer is not None and buffer.handle.process == service().address:
                    with service().regions.use(buffer.handle.number, buffer.handle.secret) as memory:
                        local[name] = memory.keeper
        return local

    def drop(self) -> None:
        """Ends the offers, from any process; blocks. Offers of ended processes are over already."""
        buffers = [shard.buffer for shards in self._shards.values() for shard in shards if shard.buffer is not None]
        for ended in [buffer.drop() for buffer in buffers]:
            try:
                ended.get()
            except OwnerLostError:
                pass

    def _moves(self, shards: Mapping[str, Shard], lost: Mapping[str, RDMAError]) -> dict[str, list[Move]]:
        """Returns the transfers into these shards, by process that has the memory. Raises OwnerLostError."""
        moves: dict[str, list[Move]] = defaultdict(list)
        for name, shard in shards.items():
            by_box: dict[Box, list[OfferedShard]] = defaultdict(list)
            for offered in self._shards[name]:
                if offered.buffer is not None and (offered.box & shard.box).count:
                    by_box[offered.box].append(offered)
            target = memory_of(shard.tensor, writable=True, what=name)
            for box, equal in by_box.items():
                buffers = [shard.buffer for shard in equal if shard.buffer is not None]
                living = [buffer for buffer in buffers if buffer.handle.process not in lost]
                if not living:
                    first = equal[0].buffer
                    assert first is not None
                    raise OwnerLostError(
                        f"{name} cannot be loaded: its part on {equal[0]} is lost, and on no other rank that lives: "
                        f"{lost[first.handle.process]}"
                    )
                handle, size = min(living, key=_distance).handle, equal[0].size
                for stretch in common(box, shard.box):
                    memory = target.part(stretch.target * size, stretch.count * size)
                    moves[handle.process].append(Move(handle, stretch.source * size, memory))
        return moves


def _read(process: str, moves: list[Move], limit: Limit, lost: dict[str, RDMAError]) -> None:
    try:
        service().routes.transfer(moves, limit, write=False)
    except OwnerLostError as error:
        lost[process] = error


def _distance(buffer: RDMABuffer) -> tuple[bool, bool, int]:
    """Returns a key that orders buffers of equal contents: this process, this machine, then an order of each reader."""
    handle, own = buffer.handle, service().address
    return (
        handle.process != own,
        not handle.identity.same_machine(own_identity()),
        zlib.crc32(f"{own} {handle.process}".encode()),
    )
