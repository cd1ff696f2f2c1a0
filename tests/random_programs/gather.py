"""Tensors of a mesh, put together here from what each rank holds: all of a program's in one answer."""

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
    """What ranks hold does not make up a tensor that is placed as its handle says. The text says in what."""


def held(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """On a rank: the bytes of all of its shards, one after the other."""
    shards = [torch.empty(0, dtype=torch.uint8)]
    for tensor in tensors:
        shard = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
        shards.append(shard.view(-1).view(torch.uint8))
    return torch.cat(shards)


def wholes(mesh: Mesh, tensors: Sequence[MeshTensor]) -> list[Callable[[], torch.Tensor]]:
    """Each tensor, for whoever calls for it: it is a ShardsDiffer then where shards do not fit together.

    Blocks. Raises TensorError for what failed.
    """
    numbers = [TensorOf(current(tensor)) for tensor in tensors]
    answers = [s.numpy().tobytes() for s in mesh.stream.run_everywhere(RunFunction(held, (numbers,), {})).values()]
    pieces = [_Pieces(mesh.shape, tensor) for tensor in tensors]
    at = [0] * len(answers)
    found: list[Callable[[], torch.Tensor]] = []
    for piece in pieces:
        sizes = [math.prod(map(len, spans)) * piece.dtype.itemsize for spans in piece.spans]
        each = [answer[start : start + size] for answer, start, size in zip(answers, at, sizes, strict=True)]
        at = [start + size for start, size in zip(at, sizes, strict=True)]
        found.append(lambda piece=piece, each=each: piece.joined(each))  # type: ignore[misc]
    if any(start != len(answer) for start, answer in zip(at, answers, strict=True)):
        raise ShardsDiffer(f"ranks hold {[len(answer) for answer in answers]} bytes in place of {at}")
    return found


class _Pieces:
    """What each rank holds of a tensor, as its placements say."""

    def __init__(self, mesh: Sequence[int], tensor: MeshTensor) -> None:
        self.shape, self.dtype, self.placements = tuple(tensor.shape), tensor.dtype, tensor.placements
        self._points = list(itertools.product(*map(range, mesh)))
        self.spans = [_spans(self.shape, mesh, point, self.placements) for point in self._points]
        self._parts = [dim for dim, one in enumerate(self.placements) if one.is_partial()]

    def joined(self, each: Sequence[bytes]) -> torch.Tensor:
        """The whole, of the bytes of all ranks. Raises ShardsDiffer where copies are not equal."""
        wholes: dict[tuple[int, ...], torch.Tensor] = {}
        given: dict[tuple[Any, ...], bytes] = {}
        for point, spans, data in zip(self._points, self.spans, each, strict=True):
            part = tuple(point[dim] for dim in self._parts)
            key = (part, *spans)
            if key in given:
                if given[key] != data and not self._alike(given[key], data):
                    raise ShardsDiffer(f"ranks hold different copies of {self.placements}, at {point}")
                continue
            given[key] = data
            whole = wholes.setdefault(part, torch.zeros(self.shape, dtype=self.dtype))
            if data:
                shard = torch.frombuffer(bytearray(data), dtype=self.dtype).view([*map(len, spans)])
                if all(len(span) == size for span, size in zip(spans, self.shape, strict=True)):
                    whole.copy_(shard)
                else:
                    whole[torch.meshgrid(*map(torch.tensor, spans), indexing="ij")] = shard
        found = wholes
        for dim in reversed(self._parts):
            found = self._reduced(found, self.placements[dim])
        (whole,) = found.values()
        return whole

    def _alike(self, one: bytes, other: bytes) -> bool:
        """Apart from the last bits."""
        first, second = (torch.frombuffer(bytearray(data), dtype=self.dtype) for data in (one, other))
        return torch.allclose(first.double(), second.double(), 1e-5, 1e-6, equal_nan=True)

    def _reduced(
        self, parts: dict[tuple[int, ...], torch.Tensor], placement: Any
    ) -> dict[tuple[int, ...], torch.Tensor]:
        groups: dict[tuple[int, ...], list[torch.Tensor]] = {}
        for key, part in parts.items():
            groups.setdefault(key[:-1], []).append(part)
        return {key: _together(torch.stack(group), placement).to(self.dtype) for key, group in groups.items()}


def _together(parts: torch.Tensor, placement: Any) -> torch.Tensor:
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
    found = [tuple(range(size)) for size in shape]
    for count, at, placement in zip(mesh, point, placements, strict=True):
        if placement.is_replicate() or placement.is_partial():
            continue
        dim, factor = placement.dim, getattr(placement, "split_factor", 1)
        blocks = [found[dim]] if isinstance(placement, Shard) and factor == 1 else _chunks(found[dim], factor)
        found[dim] = tuple(index for block in blocks for index in _piece(block, count, at))
    return tuple(found)


def _chunks(indices: Sequence[int], count: int) -> list[Sequence[int]]:
    return [_piece(indices, count, at) for at in range(count)]


def _piece(indices: Sequence[int], count: int, at: int) -> Sequence[int]:
    """One of `count` pieces, of which the first are full and the last may be empty, as torch.chunk makes them."""
    size = -(-len(indices) // count)
    return indices[size * at : size * (at + 1)]
