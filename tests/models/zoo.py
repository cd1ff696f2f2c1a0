"""Usual models, tiny and with random weights: nothing is fetched. Each with a batch, and its loss."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional

WORDS, WIDTH, LENGTH, BATCH = 64, 32, 10, 8
Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Model:
    """A function that makes it, its inputs and loss, and its plan for tensor parallelism."""

    make: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    loss: Callable[[nn.Module, Batch], torch.Tensor]
    plan: Mapping[str, Any] | str = "auto"
    note: str = ""
    options: dict[str, Any] = field(default_factory=dict)


def _words() -> Batch:
    words = torch.randint(0, WORDS, (BATCH, LENGTH))
    return {"input_ids": words, "labels": words}


def _masked_words() -> Batch:
    words = torch.randint(0, WORDS, (BATCH, LENGTH))
    lengths = torch.randint(LENGTH // 2, LENGTH + 1, (BATCH, 1))
    mask = (torch.arange(LENGTH) < lengths).long()
    return {"input_ids": words, "attention_mask": mask, "labels": words.masked_fill(mask == 0, -100)}


def _own_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The loss that Transformers' models compute from labels."""
    return model(**batch).loss


def _decoder(kind: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers

        shape = {
            "vocab_size": WORDS,
            "hidden_size": WIDTH,
            "intermediate_size": 2 * WIDTH,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": WIDTH // 4,
            "max_position_embeddings": 64,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        config = getattr(transformers, f"{kind}Config")(**{**shape, **options})
        return getattr(transformers, f"{kind}ForCausalLM")(config)

    return make


def _mamba() -> nn.Module:
    from transformers import MambaConfig, MambaForCausalLM

    return MambaForCausalLM(
        MambaConfig(vocab_size=WORDS, hidden_size=WIDTH, state_size=8, num_hidden_layers=2, time_step_rank=4)
    )


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            vocab_size=WORDS,
            hidden_size=WIDTH,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=2 * WIDTH,
            max_position_embeddings=64,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            image_size=16,
            patch_size=4,
            num_channels=3,
            hidden_size=WIDTH,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=2 * WIDTH,
            num_labels=5,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=WORDS,
            d_model=WIDTH,
            d_kv=WIDTH // 4,
            d_ff=2 * WIDTH,
            num_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            decoder_start_token_id=0,
            pad_token_id=0,
        )
    )


class Recurrent(nn.Module):
    """Words into a recurrent net, and its output at each of them into classes."""

    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.net = kind(WIDTH, WIDTH, num_layers=2, batch_first=True, **options)
        self.head = nn.Linear(WIDTH * (2 if options.get("bidirectional") else 1), WORDS)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.net(self.words(input_ids))[0])


class Pictures(nn.Module):
    """Convolutions and the norms that go with them, a residual, pools, and classes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.batch = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.group = nn.GroupNorm(4, 8)
        self.third = nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False)
        self.instance = nn.InstanceNorm2d(16, affine=True)
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.layer = nn.LayerNorm([8, 8, 8])
        self.head = nn.Linear(8 * 4 * 4, 5)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        x = functional.relu(self.batch(self.first(pixel_values)))
        x = x + functional.gelu(self.group(self.second(x)))
        x = functional.max_pool2d(x, 2)
        x = functional.silu(self.instance(self.third(x)))
        x = self.layer(self.up(x))
        return self.head(functional.avg_pool2d(x, 2).flatten(1))


class Stacks(nn.Module):
    """PyTorch's own encoder and decoder layers, one over the other."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        shape: dict[str, Any] = {
            "d_model": WIDTH,
            "nhead": 4,
            "dim_feedforward": 2 * WIDTH,
            "dropout": 0.0,
            "batch_first": True,
        }
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(**shape), 2, enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(**shape, norm_first=True), 2)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.words(input_ids)
        return self.head(self.decoder(x.flip(1), self.encoder(x)))


class Attention(nn.Module):
    """Attention of one sequence to another, with weights of another width."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.narrow = nn.Linear(WIDTH, WIDTH // 2)
        self.own = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.cross = nn.MultiheadAttention(
            WIDTH, 4, batch_first=True, kdim=WIDTH // 2, vdim=WIDTH // 2, add_bias_kv=True, add_zero_attn=True
        )
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.words(input_ids)
        x = x + self.own(x, x, x, need_weights=False)[0]
        context = self.narrow(x)
        attended, weights = self.cross(x, context, context)
        return self.head(x + attended) + weights.mean()


def _next_words(model: nn.Module, batch: Batch) -> torch.Tensor:
    words = batch["input_ids"]
    return functional.cross_entropy(model(words)[:, :-1].flatten(0, 1), words[:, 1:].flatten())


def _only_words() -> Batch:
    return {"input_ids": torch.randint(0, WORDS, (BATCH, LENGTH))}


def _pictures() -> Batch:
    return {"pixel_values": torch.randn(BATCH, 3, 16, 16), "labels": torch.randint(0, 5, (BATCH,))}


def _classes(model: nn.Module, batch: Batch) -> torch.Tensor:
    return functional.cross_entropy(model(batch["pixel_values"]), batch["labels"])


_BERT_PLAN = {
    "*.attention.self.query": "column",
    "*.attention.self.key": "column",
    "*.attention.self.value": "column",
    "*.attention.output.dense": "row",
    "*.intermediate.dense": "column",
    "*.layer.?.output.dense": "row",
}
_VIT_PLAN = {"*.[qkv]_proj": "column", "*.o_proj": "row", "*.fc1": "column", "*.fc2": "row"}
_T5_PLAN = {
    "*Attention.[qkv]": "column",
    "*Attention.o": "row",
    "*DenseReluDense.wi": "column",
    "*DenseReluDense.wo": "row",
    "shared": "row",
}
_MAMBA_PLAN = {"*.in_proj": "column", "*.out_proj": "row", "*.embeddings": "row"}
_RECURRENT_PLAN = {"net.weight_*": ["model", None], "net.bias_*": ["model"], "words": "row", "head": "column"}
_PICTURES_PLAN = {
    "first.weight": ["model", None, None, None],
    "first.bias": ["model"],
    "second.weight": ["model", None, None, None],
    "up.weight": ["model", None, None, None],
    "head": "row",
}

MODELS: dict[str, Model] = {
    "llama": Model(_decoder("Llama"), _words, _own_loss),
    "qwen3": Model(_decoder("Qwen3"), _masked_words, _own_loss),
    "mistral": Model(_decoder("Mistral", sliding_window=4), _words, _own_loss),
    "gemma": Model(_decoder("Gemma"), _words, _own_loss),
    "mixtral": Model(
        _decoder("Mixtral", num_local_experts=4, num_experts_per_tok=2, output_router_logits=True), _words, _own_loss
    ),
    "mamba": Model(_mamba, _words, _own_loss, _MAMBA_PLAN),
    "bert": Model(_bert, _masked_words, _own_loss, _BERT_PLAN),
    "vit": Model(_vit, _pictures, _own_loss, _VIT_PLAN),
    "t5": Model(_t5, _masked_words, _own_loss, _T5_PLAN),
    "LSTM": Model(lambda: Recurrent(nn.LSTM), _only_words, _next_words, _RECURRENT_PLAN),
    "GRU": Model(lambda: Recurrent(nn.GRU, bidirectional=True), _only_words, _next_words, _RECURRENT_PLAN),
    "convolutions": Model(Pictures, _pictures, _classes, _PICTURES_PLAN),
    "attention": Model(Attention, _only_words, _next_words, {"own": "column", "cross": "column"}),
    "transformer": Model(Stacks, _only_words, _next_words, {"*coder.layers.?": "column", "words": "row"}),
}
