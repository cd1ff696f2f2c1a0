"""Contents of tensors after a heal: the lost ones, and those that a new process receives from a rank that holds them.

Surviving ranks agree on a tensor if they have run all operations that make it or write to it, and hold it. A part of
it on a lost rank is restored if the placement puts the same part on a surviving rank.
"""

import pickle
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from monarch_nb.tensor.propagation import MeshLayout, Placements
from monarch_nb.tensor.references import HeldObjects
from monarch_nb.tensor.verbs import ranks_text

_PACK_BYTES = 32 << 20  # bytes of storages that are sent together


class ShardTransfer(NamedTuple):
    """Tensors, by number, that one rank of a mesh sends to another."""

    source: int
    target: int
    numbers: tuple[int, ...]


class StreamContents(NamedTuple):
    """The tensors of a stream that have contents after a heal, and their transfers to new processes.

    `operations` were issued before.
    """

    kept: tuple[int, ...]
    transfers: tuple[ShardTransfer, ...]
    operations: int = 0

    @property
    def moved(self) -> set[int]:
        """The tensors that are transferred."""
        return {number for transfer in self.transfers for number in transfer.numbers}


def contents_of(
    objects: HeldObjects, layout: MeshLayout, start: int, ranks: Mapping[int, Collection[int]], reason: str
) -> StreamContents:
    """Returns the tensors that have contents, and marks the others as lost.

    `ranks` are the tensors that each surviving rank holds, which has run all operations before `start`.
    """
    fresh = [rank for rank in range(prod(layout.shape)) if rank not in ranks]
    common = set.intersection(*map(set, ranks.values())) if ranks else set[int]()
    unfinished = objects.written_from(start)
    unmade = f"an operation that makes it, or writes to it, has not run on all ranks: {reason}"
    references = [ref for entry in tuple(objects.entries.values()) if (ref := entry()) is not None]
    for number in (ref.number for ref in references):
        if number in unfinished or (number not in common and number not in objects.stale):
            objects.lose([number], unmade if ranks else f"all ranks that held it are lost: {reason}")
    views: list[int] | None = None
    while views is None or views:
        groups: dict[object, set[int]] = {}
        dims: dict[object, set[int]] = {}
        for ref in references:
            number = ref.number
            if number not in objects.lost and number not in objects.stale:
                # Tensors that share memory are transferred together.
                key = ref.memory if ref.memory is not None and ref.copied is None else ref
                groups.setdefault(key, set()).add(number)
                dims.setdefault(key, set()).update(_dividing_dims(objects.entries[number].meta.placements))
        dim_groups = [(frozenset(dims[key]), tuple(numbers)) for key, numbers in groups.items()]
        moves, missing = transfers(layout.shape, fresh, dim_groups)
        for number, rank in missing.items():
            objects.lose([number], f"its part on {ranks_text([rank])} of the mesh was on no other rank: {reason}")
        copies = [(ref.number, ref.copied.base.number) for ref in references if ref.copied is not None]
        views = [number for number, base in copies if base in objects.lost and number not in objects.lost]
        objects.lose(views, f"the tensor of which it is a view is lost: {reason}")
    retained = {number for numbers in groups.values() for number in numbers} - objects.lost.keys()
    return StreamContents(tuple(sorted(retained)), tuple(moves))


def _dividing_dims(placements: Placements) -> Iterable[int]:
    """Returns the dimensions of a mesh along which ranks hold different parts, or different summands."""
    return (dim for dim, placement in enumerate(placements) if not placement.is_replicate())


def transfers(
    shape: Sequence[int], fresh: Collection[int], groups: Sequence[tuple[frozenset[int], tuple[int, ...]]]
) -> tuple[list[ShardTransfer], dict[int, int]]:
    """Returns the transfers that fill `fresh` ranks of a mesh, and the tensors without a source, with the rank.

    Each group has the dimensions along which its tensors differ between ranks, and comes from one source.
    """
    points = list(product(*map(range, shape)))
    by_dims: dict[frozenset[int], list[int]] = {}
    for dims, numbers in groups:
        by_dims.setdefault(dims, []).extend(numbers)
    sources: dict[tuple[int, frozenset[int]], int] = {}
    missing: dict[int, int] = {}
    load: Counter[int] = Counter()
    for target in sorted(fresh):
        candidates = {
            dims: {
                rank
                for rank, point in enumerate(points)
                if rank not in fresh and all(point[dim] == points[target][dim] for dim in dims)
            }
            for dims in by_dims
        }
        for dims in [dims for dims, ranks in candidates.items() if not ranks]:
            missing = dict.fromkeys(by_dims[dims], target) | missing
        open_dims = [dims for dims, ranks in candidates.items() if ranks]
        while open_dims:
            coverage = Counter(rank for dims in open_dims for rank in candidates[dims])
            source = min(coverage, key=lambda rank: (-coverage[rank], load[rank], rank))
            load[source] += 1
            for dims in [dims for dims in open_dims if source in candidates[dims]]:
                sources[target, dims] = source
                open_dims.remove(dims)
    numbers_of: dict[tuple[int, int], list[int]] = {}
    for (target, dims), source in sources.items():
        numbers_of.setdefault((source, target), []).extend(n for n in by_dims[dims] if n not in missing)
    moves = [ShardTransfer(*ends, tuple(sorted(numbers))) for ends, numbers in sorted(numbers_of.items()) if numbers]
    return moves, missing


# -- on the workers ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _SentShard:
    """The shard of one tensor: its place in a storage, and the placement of the whole."""

    storage: int
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    is_conj: bool
    is_neg: bool
    placements: Placements
    whole: torch.Size
    whole_stride: tuple[int, ...]

    def tensor(self, bytes_: torch.Tensor, mesh: DeviceMesh) -> DTensor:
        """Returns the tensor in a received storage."""
        local = torch.empty(0, dtype=self.dtype, device=bytes_.device)
        local.set_(bytes_.untyped_storage(), self.offset, self.size, self.stride)
        local = local.conj() if self.is_conj else local
        local = torch._neg_view(local) if self.is_neg else local
        return DTensor.from_local(
            local, mesh, self.placements, run_check=False, shape=self.whole, stride=self.whole_stride
        )


def send(tensors: Sequence[DTensor], rank: int) -> None:
    """Sends the shards of tensors to a rank of the group, with the memory that they share. Blocks."""
    storages: dict[int, tuple[int, torch.Tensor]] = {}
    parts = []
    for tensor in tensors:
        local = torch.ops._c10d_functional.wait_tensor(tensor._local_tensor)
        storage = local.untyped_storage()
        if storage._cdata not in storages:
            bytes_ = torch.empty(0, dtype=torch.uint8, device=local.device).set_(storage)
            storages[storage._cdata] = (len(storages), bytes_)
        index, _ = storages[storage._cdata]
        parts.append(
            _SentShard(
                index,
                local.dtype,
                local.storage_offset(),
                tuple(local.shape),
                local.stride(),
                local.is_conj(),
                local.is_neg(),
                tuple(tensor.placements),
                tensor.shape,
                tensor.stride(),
            )
        )
    sizes = [bytes_.numel() for _, bytes_ in storages.values()]
    header = bytearray(pickle.dumps((parts, sizes)))
    dist.send(torch.tensor([len(header)]), rank)
    dist.send(torch.frombuffer(header, dtype=torch.uint8), rank)
    buffers = [bytes_ for _, bytes_ in storages.values()]
    _in_packs(sizes, lambda first, stop: dist.send(torch.cat([buffer.cpu() for buffer in buffers[first:stop]]), rank))


def receive(mesh: DeviceMesh, rank: int) -> list[DTensor]:
    """Receives the tensors that a rank of the group sends. Blocks."""
    length = torch.empty(1, dtype=torch.int64)
    dist.recv(length, rank)
    header = torch.empty(int(length), dtype=torch.uint8)
    dist.recv(header, rank)
    parts, sizes = pickle.loads(header.numpy().tobytes())
    storages: list[torch.Tensor] = []

    def take(first: int, stop: int) -> None:
        packed = torch.empty(sum(sizes[first:stop]), dtype=torch.uint8)
        dist.recv(packed, rank)
        # Storages of their own, so that each is freed with its tensors.
        storages.extend(buffer.to(mesh.device_type, copy=True) for buffer in torch.split(packed, sizes[first:stop]))

    _in_packs(sizes, take)
    return [part.tensor(storages[part.storage], mesh) for part in parts]


def _in_packs(sizes: Sequence[int], call: Callable[[int, int], object]) -> None:
    """Calls with the bounds of runs of storages that are sent together."""
    first, total = 0, 0
    for index, size in enumerate(sizes):
        if index > first and total + size > _PACK_BYTES:
            call(first, index)
            first, total = index, 0
        total += size
    if first < len(sizes):
        call(first, len(sizes))
