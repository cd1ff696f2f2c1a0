"""Tensors of a mesh, assembled here from the shards of all ranks: all of a program's in one answer."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import Shard

from monarch_nb.distributed import Mesh, MeshTensor
from monarch_nb.tensor.commands import RunFunction, TensorOf
from monarch_nb.tensor.handle import current


class ShardsDiffer(Exception):
    """Shards of ranks do not make up a tensor with the placements of its handle. The text names the difference."""


def pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """On a rank: the bytes of all of its shards, one after the other."""
    shards = [torch.empty(0, dtype=torch.uint8)]
    for tensor in tensors:
        shard = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
        shards.append(shard.view(-1).view(torch.uint8))
    return torch.cat(shards)


def gather(mesh: Mesh, tensors: Sequence[MeshTensor]) -> list[Callable[[], torch.Tensor]]:
    """A reader of each tensor, which raises ShardsDiffer if shards do not fit together.

    Blocks. Raises TensorError for failed operations.
    """
    numbers = [TensorOf(current(tensor)) for tensor in tensors]
    answers = [s.numpy().tobytes() for s in mesh.stream.run_everywhere(RunFunction(pack, (numbers,), {})).values()]
    pieces = [_Pieces(mesh.shape, tensor) for tensor in tensors]
    offsets = [0] * len(answers)
    readers: list[Callable[[], torch.Tensor]] = []
    for piece in pieces:
        sizes = [math.prod(map(len, spans)) * piece.dtype.itemsize for spans in piece.spans]
        shards = [answer[start : start + size] for answer, start, size in zip(answers, offsets, sizes, strict=True)]
        offsets = [start + size for start, size in zip(offsets, sizes, strict=True)]
        readers.append(lambda piece=piece, shards=shards: piece.join(shards))  # type: ignore[misc]
    if any(start != len(answer) for start, answer in zip(offsets, answers, strict=True)):
        raise ShardsDiffer(f"ranks hold {[len(answer) for answer in answers]} bytes in place of {offsets}")
    return readers


class _Pieces:
    """The part of a tensor on each rank, by its placements."""

    def __init__(self, mesh: Sequence[int], tensor: MeshTensor) -> None:
        self.shape, self.dtype, self.placements = tuple(tensor.shape), tensor.dtype, tensor.placements
        self._points = list(itertools.product(*map(range, mesh)))
        self.spans = [_spans(self.shape, mesh, point, self.placements) for point in self._points]
        self._parts = [dim for dim, placement in enumerate(self.placements) if placement.is_partial()]

    def join(self, shards: Sequence[bytes]) -> torch.Tensor:
        """The full tensor, from the bytes of all ranks. Raises ShardsDiffer where copies are not equal."""
        tensors: dict[tuple[int, ...], torch.Tensor] = {}
        copies: dict[tuple[Any, ...], bytes] = {}
        for point, spans, data in zip(self._points, self.spans, shards, strict=True):
            part = tuple(point[dim] for dim in self._parts)
            key = (part, *spans)
            if key in copies:
                if copies[key] != data and not self._is_close(copies[key], data):
                    raise ShardsDiffer(f"ranks hold different copies of {self.placements}, at {point}")
                continue
            copies[key] = data
            tensor = tensors.setdefault(part, torch.zeros(self.shape, dtype=self.dtype))
            if data:
                shard = torch.frombuffer(bytearray(data), dtype=self.dtype).view([*map(len, spans)])
                if all(len(span) == size for span, size in zip(spans, self.shape, strict=True)):
                    tensor.copy_(shard)
                else:
                    tensor[torch.meshgrid(*map(torch.tensor, spans), indexing="ij")] = shard
        reduced = tensors
        for dim in reversed(self._parts):
            reduced = self._reduce(reduced, self.placements[dim])
        (tensor,) = reduced.values()
        return tensor

    def _is_close(self, left: bytes, right: bytes) -> bool:
        """Apart from the last bits."""
        first, second = (torch.frombuffer(bytearray(data), dtype=self.dtype) for data in (left, right))
        return torch.allclose(first.double(), second.double(), 1e-5, 1e-6, equal_nan=True)

    def _reduce(
        self, parts: dict[tuple[int, ...], torch.Tensor], placement: Any
    ) -> dict[tuple[int, ...], torch.Tensor]:
        groups: dict[tuple[int, ...], list[torch.Tensor]] = {}
        for key, part in parts.items():
            groups.setdefault(key[:-1], []).append(part)
        return {key: _combine(torch.stack(group), placement).to(self.dtype) for key, group in groups.items()}


def _combine(parts: torch.Tensor, placement: Any) -> torch.Tensor:
    norm = getattr(placement, "norm_type", None)
    if norm is not None:
        return torch.linalg.vector_norm(parts.double(), float(norm), 0)
    kind = placement.reduce_op
    wide = parts.double() if parts.is_floating_point() else parts.long()
    if kind == "sum":
        return wide.sum(0)
    if kind == "avg":
        return wide.mean(0)
    if kind == "product":
        return wide.prod(0)
    if kind in ("max", "min"):
        return getattr(wide, f"a{kind}")(0)
    raise ShardsDiffer(f"parts of an unknown kind: {placement!r}")


def _spans(
    shape: Sequence[int], mesh: Sequence[int], point: Sequence[int], placements: Sequence[Any]
) -> tuple[tuple[int, ...], ...]:
    """The indices along each dimension that the rank at this point of the mesh holds."""
    spans = [tuple(range(size)) for size in shape]
    for count, coordinate, placement in zip(mesh, point, placements, strict=True):
        if placement.is_replicate() or placement.is_partial():
            continue
        dim, factor = placement.dim, getattr(placement, "split_factor", 1)
        blocks = [spans[dim]] if isinstance(placement, Shard) and factor == 1 else _chunks(spans[dim], factor)
        spans[dim] = tuple(index for block in blocks for index in _piece(block, count, coordinate))
    return tuple(spans)


def _chunks(indices: Sequence[int], count: int) -> list[Sequence[int]]:
    return [_piece(indices, count, index) for index in range(count)]


def _piece(indices: Sequence[int], count: int, index: int) -> Sequence[int]:
    """One of `count` pieces, of which the first are full and the last may be empty, as torch.chunk makes them."""
    size = -(-len(indices) // count)
    return indices[size * index : size * (index + 1)]
