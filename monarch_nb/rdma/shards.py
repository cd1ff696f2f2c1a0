"""Shards of tensors that are offered in place: each reader copies its own parts, with any sharding."""

import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import partial
from math import prod

import msgspec

from monarch_nb.rdma.buffer import RDMABuffer, service
from monarch_nb.rdma.errors import OwnerLostError, RDMAError
from monarch_nb.rdma.handle import own_identity
from monarch_nb.rdma.limits import Limit, side_by_side
from monarch_nb.rdma.memory import memory_of
from monarch_nb.rdma.movers import Move
from monarch_nb.rdma.parameters import Box, Shard, common
from monarch_nb.wire import host_of, parse_address


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
