"""What tensor-parallel styles mean for one module. PyTorch's own are taken, and ours are names for three of them."""

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
from torch.distributed.tensor.placement_types import Placement

from monarch_nb.wire import kind_of

_NAMED: dict[str, type[ParallelStyle]] = {
    "column": ColwiseParallel,
    "row": RowwiseParallel,
    "sequence": SequenceParallel,
}


@dataclass(frozen=True)
class Style:
    """How a module is cut along one mesh dimension; None among inputs and outputs leaves a tensor as it comes.

    `parameters` has the dimension along which a parameter is cut, for those that are not whole.
    """

    parameters: Mapping[str, int] = field(default_factory=dict)
    inputs: tuple[Placement | None, ...] = ()
    keywords: Mapping[str, Placement | None] = field(default_factory=dict)
    outputs: tuple[Placement | None, ...] = ()


def style_of(wanted: str | ParallelStyle, path: str, module: nn.Module) -> Style:
    """What a style means for this module. Raises ValueError for a module that it is not for."""
    if isinstance(wanted, str):
        if wanted not in _NAMED:
            raise ValueError(f"plan: {wanted!r} is no style: {', '.join(map(repr, _NAMED))}, or one of PyTorch's")
        wanted = _NAMED[wanted]()
    given: Any = wanted  # its attributes are not typed
    match wanted:
        case ColwiseParallel():
            cut = _cut(module, path, "column", {"weight": 0, "bias": 0}, {"weight": 1})
            return Style(cut, tuple(given.desired_input_layouts), {}, tuple(given.output_layouts))
        case RowwiseParallel():
            cut = _cut(module, path, "row", {"weight": 1}, {"weight": 0})
            inputs = (Replicate(),) if isinstance(module, nn.Embedding) else (Shard(-1),)
            return Style(cut, inputs, {}, tuple(given.output_layouts))
        case SequenceParallel():
            return Style({}, tuple(given.sequence_sharding), {}, tuple(given.sequence_sharding))
        case PrepareModuleInputOutput():
            before = style_of(given.prepare_module_input, path, module)
            return Style(
                {}, before.inputs, before.keywords, style_of(given.prepare_module_output, path, module).outputs
            )
        case PrepareModuleInput():
            return Style({}, tuple(given.desired_input_layouts or ()), dict(given.desired_input_kwarg_layouts))
        case PrepareModuleOutput():
            return Style(outputs=tuple(given.desired_output_layouts))
    raise ValueError(
        f"plan: {type(wanted).__name__} for {path!r} is a style that only SPMD programs can take. Say where its "
        f'parameters lie instead: {{"{path}.weight": [Shard(0), Replicate()]}}'
    )


def _cut(
    module: nn.Module, path: str, style: str, linear: Mapping[str, int], embedding: Mapping[str, int]
) -> Mapping[str, int]:
    if isinstance(module, nn.Linear):
        return linear
    if isinstance(module, nn.Embedding):
        return embedding
    raise ValueError(
        f"plan: {style!r} is for Linear and Embedding, and {path!r} is {kind_of(module)}. A pattern that names "
        "its parameters may say where they lie, by a sharding spec"
    )
