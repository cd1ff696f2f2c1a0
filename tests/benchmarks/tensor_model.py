"""A small transformer, tensor-parallel, for both sides of a comparison: only how a tensor is placed differs."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

LAYERS, WIDTH, HEADS, WORDS = 4, 256, 8, 512
BATCH, LENGTH = 8, 64
COLUMNS, ROWS, WHOLE = (Shard(0),), (Shard(1),), (Replicate(),)

Place = Callable[[torch.Tensor, tuple[Any, ...]], torch.Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        def heads(t: torch.Tensor) -> torch.Tensor:
            return t.view(BATCH, LENGTH, HEADS, WIDTH // HEADS).transpose(1, 2)

        normed = self.before(x)
        query, key, value = heads(self.query(normed)), heads(self.key(normed)), heads(self.value(normed))
        weights = (query @ key.transpose(-1, -2) * (WIDTH // HEADS) ** -0.5 + mask).softmax(-1)
        x = x + self.out((weights @ value).transpose(1, 2).reshape(BATCH, LENGTH, WIDTH))
        return x + self.down(nn.functional.gelu(self.up(self.between(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.last = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: torch.Tensor, at: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places(at)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.last(x))


PLACED = {"query": COLUMNS, "key": COLUMNS, "value": COLUMNS, "up": COLUMNS, "out": ROWS, "down": ROWS}


def stepper(place: Place) -> Callable[[], torch.Tensor]:
    """One step of training on the same batch again and again; gives the loss."""
    torch.manual_seed(0)
    model = Model()
    tokens, targets = torch.randint(0, WORDS, (BATCH, LENGTH)), torch.randint(0, WORDS, (BATCH * LENGTH,))
    for name, module in model.named_modules():
        for key, parameter in list(module._parameters.items()):
            if parameter is not None:
                wanted = PLACED.get(name.rpartition(".")[2], WHOLE)
                module._parameters[key] = nn.Parameter(place(parameter.data, wanted))
    batch, wanted = place(tokens, WHOLE), place(targets, WHOLE)
    at = place(torch.arange(LENGTH), WHOLE)
    mask = place(torch.full((LENGTH, LENGTH), float("-inf")).triu(1), WHOLE)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(batch, at, mask).flatten(0, 1), wanted)
        loss.backward()
        optimizer.step()
        return loss

    return step
