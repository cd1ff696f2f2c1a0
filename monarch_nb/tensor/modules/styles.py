"""Tensor-parallel styles of modules: PyTorch's styles, three of which have short names."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from monarch_nb.wire import kind_of

_NAMED: dict[str, type[ParallelStyle]] = {
    "column": ColwiseParallel,
    "row": RowwiseParallel,
    "sequence": SequenceParallel,
}
_ALSO = {"column": ", MultiheadAttention and the layers of PyTorch's transformers"}
_R = Replicate()

# Of MultiheadAttention: queries, keys and values stand one below the other in a weight, and each rank has its heads of
# all three.
_HEADS: dict[str, Placement] = {
    "in_proj_weight": _StridedShard(0, split_factor=3),
    "in_proj_bias": _StridedShard(0, split_factor=3),
    "q_proj_weight": Shard(0),
    "k_proj_weight": Shard(0),
    "v_proj_weight": Shard(0),
    "bias_k": Shard(2),
    "bias_v": Shard(2),
    "out_proj.weight": Shard(1),
}
_LINEAR = {"linear1": "column", "linear2": "row"}
_LAYERS: dict[type[nn.Module], dict[str, str]] = {
    nn.TransformerEncoderLayer: {"self_attn": "column", **_LINEAR},
    nn.TransformerDecoderLayer: {"self_attn": "column", "multihead_attn": "column", **_LINEAR},
}


@dataclass(frozen=True)
class Style:
    """Sharding of a module along one mesh dimension; None among inputs and outputs leaves a tensor unchanged.

    `parameters` has the placements of parameters by name, for those that are not replicated. `pieces` is the number of
    indivisible parts, such as attention heads, of which each rank gets an equal number.
    """

    parameters: Mapping[str, Placement] = field(default_factory=dict)
    inputs: tuple[Placement | None, ...] = ()
    keywords: Mapping[str, Placement | None] = field(default_factory=dict)
    outputs: tuple[Placement | None, ...] = ()
    pieces: int | None = None


def styles_of(wanted: str | ParallelStyle, path: str, module: nn.Module) -> dict[str, Style]:
    """Returns the styles of a module and its submodules by path.

    "column" of PyTorch's layers of a transformer is attention with its heads cut, and the first of its two linear
    layers by columns, the second by rows. Raises ValueError for a module that the style is not for.
    """
    if wanted == "column":
        for kind, parts in _LAYERS.items():
            if isinstance(module, kind):
                return {
                    f"{path}.{name}" if path else name: _style_of(each, f"{path}.{name}", getattr(module, name))
                    for name, each in parts.items()
                }
    return {path: _style_of(wanted, path, module)}


def _style_of(wanted: str | ParallelStyle, path: str, module: nn.Module) -> Style:
    if wanted == "column" and isinstance(module, nn.MultiheadAttention):
        return Style(_HEADS, (_R, _R, _R), dict.fromkeys(("query", "key", "value"), _R), (_R,), module.num_heads)
    if isinstance(wanted, str):
        if wanted not in _NAMED:
            raise ValueError(f"plan: {wanted!r} is no style: {', '.join(map(repr, _NAMED))}, or one of PyTorch's")
        wanted = _NAMED[wanted]()
    given: Any = wanted  # its attributes are not typed
    match wanted:
        case ColwiseParallel():
            cut = _cut(module, path, "column", {"weight": Shard(0), "bias": Shard(0)}, {"weight": Shard(1)})
            return Style(cut, tuple(given.desired_input_layouts), {}, tuple(given.output_layouts))
        case RowwiseParallel():
            cut = _cut(module, path, "row", {"weight": Shard(1)}, {"weight": Shard(0)})
            inputs = (Replicate(),) if isinstance(module, nn.Embedding) else (Shard(-1),)
            return Style(cut, inputs, {}, tuple(given.output_layouts))
        case SequenceParallel():
            return Style({}, tuple(given.sequence_sharding), {}, tuple(given.sequence_sharding))
        case PrepareModuleInputOutput():
            before = _style_of(given.prepare_module_input, path, module)
            after = _style_of(given.prepare_module_output, path, module)
            return Style({}, before.inputs, before.keywords, after.outputs)
        case PrepareModuleInput():
            return Style({}, tuple(given.desired_input_layouts or ()), dict(given.desired_input_kwarg_layouts))
        case PrepareModuleOutput():
            return Style(outputs=tuple(given.desired_output_layouts))
    raise ValueError(
        f"plan: {type(wanted).__name__} for {path!r} is a style that only SPMD programs can take. Say where its "
        f'parameters lie instead: {{"{path}.weight": [Shard(0), Replicate()]}}'
    )


def _cut(
    module: nn.Module, path: str, style: str, linear: Mapping[str, Placement], embedding: Mapping[str, Placement]
) -> Mapping[str, Placement]:
    if isinstance(module, nn.Linear):
        return linear
    if isinstance(module, nn.Embedding):
        return embedding
    raise ValueError(
        f"plan: {style!r} is for Linear and Embedding{_ALSO.get(style, '')}, and {path!r} is {kind_of(module)}. A "
        "pattern that names its parameters may say where they lie, by a sharding spec"
    )
