"""What a rank has of a tensor, in a few numbers: read by any thread, beside the operations."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from monarch_nb.tensor.verbs import Values
from monarch_nb.tensor.workers.lost import Lost

_PIECE = 1 << 22  # elements that are looked at together: a large shard must not be copied whole


def values_of(held: Any, edge: int) -> Values:
    """What there is of what a stream holds under a number; None stands for nothing."""
    if isinstance(held, Lost):
        return Values("lost", held.failure.line)
    if not isinstance(held, DTensor):
        return Values("coming")
    with torch.no_grad():
        local = held.to_local()
        first = max(local.dim() - 2, 0)
        corner = local[tuple(slice(0, 1 if dim < first else edge) for dim in range(local.dim()))].cpu()
        shape = tuple(corner.shape)
        if corner.is_complex():
            corner = torch.view_as_real(corner.resolve_conj())
        numbers = corner.double() if corner.is_floating_point() else corner.long()
        found = _Statistics()
        for piece in _pieces(local):
            found.add(piece)
        return found.values(shape, tuple(numbers.flatten().tolist()))


def _pieces(local: torch.Tensor) -> Iterator[torch.Tensor]:
    """All elements, in the order of memory: most shards need not be copied for that."""
    order = sorted(range(local.dim()), key=local.stride, reverse=True)
    flat = local.permute(order).reshape(-1)
    for at in range(0, flat.numel(), _PIECE):
        yield flat[at : at + _PIECE]


class _Statistics:
    """Of all elements that were added, piece by piece."""

    def __init__(self) -> None:
        self._count = self._nan = self._infinite = 0
        self._sum, self._finite = 0.0, 0
        self._least: float | int | None = None
        self._most: float | int | None = None

    def add(self, piece: torch.Tensor) -> None:
        """Elements of one dimension, at least one."""
        self._count += piece.numel()
        if piece.is_complex():
            self._nan += int(piece.isnan().sum())
            self._infinite += int(piece.isinf().sum())
            return
        if not piece.is_floating_point():
            piece = piece.long()
            self._compare(*(int(one) for one in piece.aminmax()))
            self._sum, self._finite = self._sum + float(piece.double().sum()), self._finite + piece.numel()
            return
        piece = piece.float() if piece.dtype.itemsize < 4 else piece
        least, most = (float(one) for one in piece.aminmax())
        if not (math.isfinite(least) and math.isfinite(most)):
            missing = piece.isnan()
            self._nan += int(missing.sum())
            piece = piece[~missing]
            if not piece.numel():
                return
            least, most = (float(one) for one in piece.aminmax())
        self._compare(least, most)
        finite = piece if math.isfinite(least) and math.isfinite(most) else piece[piece.isfinite()]
        self._infinite += piece.numel() - finite.numel()
        self._sum, self._finite = self._sum + float(finite.sum(dtype=torch.float64)), self._finite + finite.numel()

    def _compare(self, least: float, most: float) -> None:
        self._least = least if self._least is None else min(self._least, least)
        self._most = most if self._most is None else max(self._most, most)

    def values(self, shape: tuple[int, ...], corner: tuple[float | int, ...]) -> Values:
        """What it came to."""
        mean = self._sum / self._finite if self._finite and math.isfinite(self._sum) else None
        return Values(
            "there", "", False, shape, corner, self._count, self._least, self._most, mean, self._nan, self._infinite
        )
