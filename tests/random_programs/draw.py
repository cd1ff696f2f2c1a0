"""Random choices, and the tensors that a line of a random program may name."""

import random
from collections.abc import Callable, Mapping, Sequence

import torch

Tensors = Mapping[str, torch.Tensor]
LIMIT = 300  # elements of a tensor


class Draw(random.Random):
    """Random choices that programs are made of."""

    def chance(self, likely: float) -> bool:
        return self.random() < likely

    def dim(self, ndim: int) -> int:
        """A dimension, counted from the front or from the back."""
        return self.randrange(-ndim, ndim) if ndim else self.choice((0, -1))

    def dims(self, ndim: int) -> tuple[int, ...]:
        """Some dimensions, each counted from the front or from the back."""
        dims = self.sample(range(ndim), self.randint(1, ndim)) if ndim else []
        return tuple(dim - ndim if self.chance(0.4) else dim for dim in dims)

    def index(self, size: int) -> int:
        return self.randrange(-size, size)

    def span(self, size: int) -> str:
        """A slice."""
        start, stop = sorted((self.randint(0, size), self.randint(0, size)))
        first = "" if not start or self.chance(0.2) else start - size if self.chance(0.3) else start
        last = "" if stop == size or self.chance(0.2) else stop - size if self.chance(0.3) else stop
        return f"{first}:{last}" + (self.choice([":2", ":3"]) if self.chance(0.25) else "")

    def subscript(self, shape: Sequence[int]) -> str:
        """Integers, slices, None and an ellipsis, as they stand in brackets."""
        entries = []
        for size in shape[: self.randint(1, len(shape))]:
            kind = self.random()
            entries.append(str(self.index(size)) if size and kind < 0.4 else self.span(size) if kind < 0.8 else ":")
        if self.chance(0.15):
            entries.insert(self.randrange(len(entries) + 1), "None")
        if self.chance(0.2):
            entries = [
                "...",
                *(str(self.index(shape[-1])) if shape[-1] and self.chance(0.5) else self.span(shape[-1]) for _ in [0]),
            ]
        return ", ".join(entries)

    def split(self, size: int) -> list[int]:
        """Sizes that add up to this."""
        cuts = sorted(self.randint(0, size) for _ in range(self.randint(1, 2)))
        return [stop - start for start, stop in zip([0, *cuts], [*cuts, size], strict=True)]

    def number(self) -> str:
        return self.choice(["0.5", "2.0", "-1.5", "3", "-2", "0.25"])


class Scope:
    """The tensors that a line may name."""

    def __init__(self, draw: Draw, tensors: Tensors) -> None:
        self.draw, self.tensors = draw, tensors
        self.recent = list(tensors)[-4:]

    def pick(self, fits: Callable[[torch.Tensor], bool] = lambda tensor: True) -> str | None:
        """The name of a tensor, rather of a recent one."""
        names = [name for name, tensor in self.tensors.items() if self._fits(fits, tensor)]
        recent = [name for name in names if name in self.recent]
        if recent and self.draw.chance(0.7):
            return self.draw.choice(recent)
        return self.draw.choice(names) if names else None

    def _fits(self, fits: Callable[[torch.Tensor], bool], tensor: torch.Tensor) -> bool:
        try:
            return fits(tensor)
        except RuntimeError:  # a view that autograd cannot follow any more
            return False

    def real(self, least: int = 0) -> tuple[str, torch.Tensor] | None:
        """A tensor of floating numbers, with so many dimensions."""
        return self.some(lambda t: t.is_floating_point() and t.dim() >= least)

    def some(self, fits: Callable[[torch.Tensor], bool]) -> tuple[str, torch.Tensor] | None:
        name = self.pick(fits)
        return None if name is None else (name, self.tensors[name])

    def fitting(self, x: torch.Tensor, real: bool = True) -> str | None:
        """A tensor that can be broadcast with this one."""
        return self.pick(lambda t: (t.is_floating_point() or not real) and broadcast(t.shape, x.shape) is not None)

    def filling(self, shape: Sequence[int], dtype: torch.dtype) -> str | None:
        """A tensor that can be broadcast to this shape."""
        return self.pick(lambda t: t.dtype == dtype and broadcast(t.shape, shape) == tuple(shape))


def broadcast(first: Sequence[int], second: Sequence[int]) -> tuple[int, ...] | None:
    try:
        shape = tuple(torch.broadcast_shapes(tuple(first), tuple(second)))
    except RuntimeError:
        return None
    return shape if torch.Size(shape).numel() <= LIMIT else None
