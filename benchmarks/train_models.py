"""Models that people train, small enough for two ranks of one machine, each with a batch and a loss."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

BATCH = 16
Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class TrainedModel:
    """Makes a module and its batch; `loss` is the mean over the batch."""

    make: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    loss: Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]


def _conv() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 14 * 14, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def _pictures() -> Batch:
    return torch.randn(BATCH, 1, 28, 28), torch.randint(0, 10, (BATCH,))


def _words(words: int, length: int) -> Callable[[], Batch]:
    def batch() -> Batch:
        drawn = torch.randint(0, words, (BATCH, length))
        return drawn, drawn

    return batch


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            vocab_size=256,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=256,
            max_position_embeddings=64,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
        )
    )


def _classes(module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(module(inputs), targets)


def _of_words(module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    output: Any = module(input_ids=inputs, labels=targets)
    loss: torch.Tensor = output.loss
    return loss


MODELS = {
    "conv": TrainedModel(_conv, _pictures, _classes),
    "bert": TrainedModel(_bert, _words(256, 32), _of_words),
    "llama": TrainedModel(_llama, _words(256, 32), _of_words),
}


def module_and_batch(name: str) -> tuple[TrainedModel, nn.Module, Batch]:
    """The same numbers in each process."""
    torch.manual_seed(0)
    model = MODELS[name]
    return model, model.make().train(), model.batch()


def step_of(model: TrainedModel, module: nn.Module, batch: Batch) -> Callable[[], torch.Tensor]:
    """One step of training on the same batch again and again; gives the loss."""
    kinds: dict[type, list[torch.Tensor]] = {}  # fused kernels take no DTensors among tensors
    for parameter in module.parameters():
        kinds.setdefault(type(parameter.data), []).append(parameter)
    optimizer = torch.optim.AdamW([{"params": parameters} for parameters in kinds.values()], 1e-3, fused=True)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model.loss(module, *batch)
        loss.backward()
        optimizer.step()
        return loss

    return step
