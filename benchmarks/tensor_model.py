"""A transformer of four layers for both sides of a comparison: only how a tensor is placed differs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

LAYERS, BATCH = 4, 8
COLUMNS, ROWS, WHOLE = (Shard(0),), (Shard(1),), (Replicate(),)

Place = Callable[[torch.Tensor, tuple[Any, ...]], torch.Tensor]


@dataclass(frozen=True)
class Size:
    """The operations of `SMALL` take the workers less time than the messages about them."""

    width: int
    heads: int
    words: int
    length: int


LARGE, SMALL = Size(256, 8, 512, 64), Size(64, 4, 128, 32)


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size, width = size, size.width
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        depth = self.size.width // self.size.heads

        def heads(t: torch.Tensor) -> torch.Tensor:
            return t.view(*x.shape[:2], self.size.heads, depth).transpose(1, 2)

        normed = self.before(x)
        query, key, value = heads(self.query(normed)), heads(self.key(normed)), heads(self.value(normed))
        weights = (query @ key.transpose(-1, -2) * depth**-0.5 + mask).softmax(-1)
        x = x + self.out((weights @ value).transpose(1, 2).reshape(x.shape))
        return x + self.down(nn.functional.gelu(self.up(self.between(x))))


class Model(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.width
        self.words, self.positions = nn.Embedding(size.words, width), nn.Embedding(size.length, width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(LAYERS))
        self.last = nn.LayerNorm(width)
        self.head = nn.Linear(width, size.words, bias=False)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.last(x))


ROWS_OF_BATCH: dict[str, Any] = {"weights": {}, "batch": (Shard(0),)}  # how data-parallel steps are placed
TENSOR_PARALLEL = {"query": COLUMNS, "key": COLUMNS, "value": COLUMNS, "up": COLUMNS, "out": ROWS, "down": ROWS}


def stepper(
    place: Place,
    size: Size = LARGE,
    *,
    weights: dict[str, tuple[Any, ...]] = TENSOR_PARALLEL,
    batch: tuple[Any, ...] = WHOLE,
    rest: tuple[Any, ...] = WHOLE,
    compiled: Callable[[Any], Any] = lambda function: function,
) -> Callable[[], torch.Tensor]:
    """One step of training on the same batch again and again; gives the loss.

    `weights` says by the last part of a module's name how its parameters are cut, `batch` how the batch is, and `rest`
    how everything else is. `compiled` compiles the forward pass and the optimizer's step.
    """
    torch.manual_seed(0)
    model = Model(size)
    tokens = torch.randint(0, size.words, (BATCH, size.length))
    targets = torch.randint(0, size.words, (BATCH * size.length,))
    for name, module in model.named_modules():
        for key, parameter in list(module._parameters.items()):
            if parameter is not None:
                cut = weights.get(name.rpartition(".")[2], weights.get("", rest))
                module._parameters[key] = nn.Parameter(place(parameter.data, cut))
    words, targets = place(tokens, batch), place(targets, batch)
    positions = place(torch.arange(size.length), rest)
    mask = place(torch.full((size.length, size.length), float("-inf")).triu(1), rest)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)

    @compiled
    def forward() -> torch.Tensor:
        return nn.functional.cross_entropy(model(words, positions, mask).flatten(0, 1), targets)

    update = compiled(optimizer.step)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = forward()
        loss.backward()
        update()
        return loss

    return step
