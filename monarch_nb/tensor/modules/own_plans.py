"""Plans that models bring with them: those of Transformers, which say in `tp_plan` how they are cut, and PyTorch's."""

import re
from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from monarch_nb.tensor.modules.styles import Style, styles_of

AUTO = "auto"
_R = Replicate()
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")  # that of a layer; none in a name like `w1`

# Names of styles in `tp_plan`: along which dimension, counted from the end, parameters are cut that have at least two …
_COLUMNS = {"colwise", "colwise_gather_output", "colwise_rep", "local_colwise"}
_ROWS = {"rowwise", "rowwise_split_input", "rowwise_rep", "local_rowwise"}
_PACKED = {"packed_colwise": -2, "packed_rowwise": -1, "local_packed_rowwise": -1}  # two, one after the other
_VECTORS = {"embedding_rowwise": -2, "embedding_colwise": -1}
# … and what says only how gradients and sums are exchanged, which follows from the placements here.
_NOTHING = {
    "replicate",
    "replicated_with_grad_allreduce",
    "local_params",
    "local",
    "mla_kv_a_proj",
    "moe_identity_expert",
}
_SUMMED = {"all_reduce", "gather"}
_EXPERTS = {"moe_tp_experts"}
_FLOW = {*_NOTHING, *_SUMMED, *_EXPERTS, "sequence_parallel"}  # no parameter is cut
_KNOWN = {*_COLUMNS, *_ROWS, *_PACKED, *_VECTORS, *_FLOW}


def own_plan(module: nn.Module) -> dict[str, Style]:
    """What a model and the models within it say of themselves, by path; and PyTorch's own layers, where none does.

    Raises ValueError where nobody says anything, and for a style that is not known here.
    """
    found: dict[str, Style] = {}
    planned: list[str] = []
    for path, part in module.named_modules():
        plan = _plan_of(part)
        if plan and not any(path == other or path.startswith(f"{other}.") or not other for other in planned):
            planned.append(path)
            found |= _styles(path, part, plan)
    if not found:
        for path, part in module.named_modules():
            kinds = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.MultiheadAttention)
            if isinstance(part, kinds) and path not in found:
                found |= styles_of("column", path, part)
    if not found:
        raise ValueError(
            f'plan: "auto" is for models that say themselves how they are cut, and {type(module).__name__} has no '
            'tp_plan: give {pattern: style}, as {"*.up": "column", "*.down": "row"}'
        )
    return found


def _plan_of(module: nn.Module) -> Mapping[str, str]:
    for name in ("tp_plan", "_tp_plan"):
        plan = getattr(module, name, None)
        if isinstance(plan, Mapping) and plan:
            return plan
    return {}


def _styles(path: str, model: nn.Module, plan: Mapping[str, str]) -> dict[str, Style]:
    """By the paths of modules; a parameter that is named itself is one of its module's."""
    modules = dict(model.named_modules())
    parameters = dict(model.named_parameters(remove_duplicate=False))
    found: dict[str, Style] = {}
    for name, style in plan.items():
        if style not in _KNOWN:
            raise ValueError(
                f"plan: the own plan of {type(model).__name__} has {style!r} for {name!r}, which only SPMD programs "
                'can take: give {pattern: style} instead of "auto"'
            )
        for at, part in modules.items():
            if _NUMBER.sub("*", at) == name:
                known = found.get(at, Style())
                made = _of_module(style, at, part)
                found[at] = Style({**known.parameters, **made.parameters}, made.inputs, {}, made.outputs)
        for at, parameter in parameters.items():
            cut = _of_parameter(style, at, parameter) if _NUMBER.sub("*", at) == name else None
            if cut is not None:
                owner, _, own = at.rpartition(".")
                known = found.get(owner, Style())
                found[owner] = Style({**known.parameters, own: cut}, known.inputs, {}, known.outputs)
    return {".".join(filter(None, (path, at))): style for at, style in found.items()}


def _of_module(style: str, path: str, module: nn.Module) -> Style:
    own = dict(module.named_parameters(recurse=False))
    cuts = {name: _of_parameter(style, f"{path}.{name}", parameter) for name, parameter in own.items()}
    parameters = {name: cut for name, cut in cuts.items() if cut is not None}
    if style in _COLUMNS:
        gathers = style in ("colwise_gather_output", "colwise_rep")
        return Style(parameters, (_R,), {}, (_R if gathers else Shard(-1),))
    if style in _ROWS:
        return Style(parameters, (Shard(-1),), {}, (_R,))
    if style in _VECTORS:
        return Style(parameters, (_R,), {}, (_R,))
    if style in _PACKED:
        return Style(parameters, (_R,) if style == "packed_colwise" else ())
    if style in _EXPERTS:
        return Style({}, (_R, _R, _R), {}, (_R,))
    if style in _SUMMED:
        return Style({}, (), {}, (_R,))
    if style == "sequence_parallel":
        return Style({}, (Shard(1),), {}, (Shard(1),))
    return Style()


def _of_parameter(style: str, path: str, parameter: torch.Tensor) -> Placement | None:
    """How a parameter is cut; None for not at all."""
    ndim = parameter.dim()
    if style in _COLUMNS:
        return Shard(max(ndim - 2, 0))
    if style in _ROWS:
        return None if path.rpartition(".")[2] == "bias" else Shard(ndim - 1)
    if style in _VECTORS:
        return Shard(max(ndim + _VECTORS[style], 0))
    if style in _PACKED:
        if ndim < 2 and style != "packed_colwise":
            return None
        return _StridedShard(max(ndim + _PACKED[style], 0), split_factor=2)
    return None
