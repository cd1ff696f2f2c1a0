"""Sharding plans of modules, by patterns of names, and the tensor-parallel styles that a pattern can have."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
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

from monarch_nb.tensor.handle import MeshTensor
from monarch_nb.tensor.propagation import MeshLayout, Placements
from monarch_nb.tensor.sharding import ShardingSpec, placements_of
from monarch_nb.wire import kind_of

# The value of a pattern: "column", "row" or "sequence"; one of PyTorch's styles; a sharding spec of parameters.
Entry = str | ParallelStyle | Sequence[str | tuple[str, ...] | Placement | None]

_DATA = re.compile(r"data|dp|ddp|fsdp|batch|replica|shard")
_TENSOR = re.compile(r"model|tensor|tp|mp")
_NAMED = ("data_parallel", "fully_sharded")
AUTO = "auto"
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")  # the number of a layer, not one in a name like `w1`
# Styles in `tp_plan` that shard parameters of two or more dimensions: the dimension, counted from the end …
_COLUMNS = {"colwise", "colwise_gather_output", "colwise_rep", "local_colwise"}
_ROWS = {"rowwise", "rowwise_split_input", "rowwise_rep", "local_rowwise"}
_PACKED = {"packed_colwise": -2, "packed_rowwise": -1, "local_packed_rowwise": -1}  # two stacked matrices
_VECTORS = {"embedding_rowwise": -2, "embedding_colwise": -1}
# … and styles that only exchange gradients and sums, which follow from the placements here.
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
_FLOW = {*_NOTHING, *_SUMMED, *_EXPERTS, "sequence_parallel"}  # no parameter is sharded
_KNOWN = {*_COLUMNS, *_ROWS, *_PACKED, *_VECTORS, *_FLOW}
_SHORT: dict[str, type[ParallelStyle]] = {
    "column": ColwiseParallel,
    "row": RowwiseParallel,
    "sequence": SequenceParallel,
}
_ALSO = {"column": ", MultiheadAttention and the layers of PyTorch's transformers"}
_R = Replicate()

# For MultiheadAttention: one weight stacks queries, keys and values, and each rank has its heads of all three, which
# are strided shards.
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


def styles_of(style: str | ParallelStyle, path: str, module: nn.Module) -> dict[str, Style]:
    """Returns the styles of a module and its submodules by path.

    "column" for PyTorch's layers of a transformer shards attention by heads, the first of its two linear
    layers by columns, and the second by rows. Raises ValueError for a module that the style does not fit.
    """
    if style == "column":
        for kind, parts in _LAYERS.items():
            if isinstance(module, kind):
                return {
                    f"{path}.{name}" if path else name: _style_of(part, f"{path}.{name}", getattr(module, name))
                    for name, part in parts.items()
                }
    return {path: _style_of(style, path, module)}


def _style_of(style: str | ParallelStyle, path: str, module: nn.Module) -> Style:
    if style == "column" and isinstance(module, nn.MultiheadAttention):
        return Style(_HEADS, (_R, _R, _R), dict.fromkeys(("query", "key", "value"), _R), (_R,), module.num_heads)
    if isinstance(style, str):
        if style not in _SHORT:
            raise ValueError(f"plan: {style!r} is no style: {', '.join(map(repr, _SHORT))}, or one of PyTorch's")
        style = _SHORT[style]()
    untyped: Any = style  # its attributes are not typed
    match style:
        case ColwiseParallel():
            cut = _cut(module, path, "column", {"weight": Shard(0), "bias": Shard(0)}, {"weight": Shard(1)})
            return Style(cut, tuple(untyped.desired_input_layouts), {}, tuple(untyped.output_layouts))
        case RowwiseParallel():
            cut = _cut(module, path, "row", {"weight": Shard(1)}, {"weight": Shard(0)})
            inputs = (Replicate(),) if isinstance(module, nn.Embedding) else (Shard(-1),)
            return Style(cut, inputs, {}, tuple(untyped.output_layouts))
        case SequenceParallel():
            return Style({}, tuple(untyped.sequence_sharding), {}, tuple(untyped.sequence_sharding))
        case PrepareModuleInputOutput():
            before = _style_of(untyped.prepare_module_input, path, module)
            after = _style_of(untyped.prepare_module_output, path, module)
            return Style({}, before.inputs, before.keywords, after.outputs)
        case PrepareModuleInput():
            return Style({}, tuple(untyped.desired_input_layouts or ()), dict(untyped.desired_input_kwarg_layouts))
        case PrepareModuleOutput():
            return Style(outputs=tuple(untyped.desired_output_layouts))
    raise ValueError(
        f"plan: {type(style).__name__} for {path!r} is a style that only SPMD programs can take. Say where its "
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


@dataclass(frozen=True)
class Plan:
    """Sharding plan of a module.

    `styles` maps patterns to sharding along the mesh dimension `tensor`: a pattern is the name of a module or of a
    parameter, in which `*` matches anything, and a later one overrides an earlier. Its value is "column" (the
    outputs of a Linear, the columns of an Embedding), "row" (the inputs of a Linear, the vocabulary of an Embedding),
    "sequence" (the input of norms and dropouts, along dimension 1), one of PyTorch's `ParallelStyle`s, or, for
    parameters, a sharding spec. "column" shards a MultiheadAttention by heads, and PyTorch's layers of
    transformers entirely. Parameters that match no pattern are replicated. "auto" instead of a mapping is
    the model's own plan, such as `tp_plan` of Transformers.

    Batches are sharded along the mesh dimensions `data`. With `fully_sharded`, parameters are sharded along these, too:
    they are gathered where a module uses them, and their gradients are summed into shards.

    None for `data` and `tensor` chooses by the names of the mesh's dimensions: `data_parallel`, `dp`, `batch`… are for
    data, `model_parallel`, `tensor`, `tp`… for tensors; without such names, data gets the remaining dimensions.
    """

    styles: Mapping[str, Entry] | str = field(default_factory=dict)
    data: str | Sequence[str] | None = None
    tensor: str | None = None
    fully_sharded: bool = False

    @classmethod
    def of(cls, plan: object) -> "Plan":
        """Returns the plan for a value: a Plan, a mapping of patterns, "fully_sharded", or None for data-parallel.

        Raises TypeError or ValueError for anything else.
        """
        if isinstance(plan, Plan):
            return plan
        if plan == AUTO:
            return cls(styles=AUTO)
        if plan is None or isinstance(plan, str):
            if plan is not None and plan not in _NAMED:
                raise ValueError(
                    f'plan {plan!r} is not known: "data_parallel", "fully_sharded", "auto", or {{pattern: style}}'
                )
            return cls(fully_sharded=plan == "fully_sharded")
        if isinstance(plan, Mapping):
            return cls(styles=plan)
        raise TypeError(f"a plan is a Plan, a mapping of patterns to styles, a name or None, not {plan!r}")


class Resolved:
    """A plan on one mesh, for one module. Raises ValueError if it does not fit the mesh or the module."""

    def __init__(self, plan: Plan, layout: MeshLayout, module: nn.Module) -> None:
        self.layout = layout
        self.tensor = _tensor_dimension(plan, layout)
        self.data = _data_dimensions(plan, layout, self.tensor)
        self.fully_sharded = plan.fully_sharded
        if plan.fully_sharded and not self.data:
            raise ValueError(
                f"a fully sharded module is cut along mesh dimensions for data, and {_sizes(layout)} has none by name: "
                "Plan(fully_sharded=True, data=...) names them"
            )
        self._modules = dict(module.named_modules())
        self._owners = {
            f"{path}.{name}" if path else name: (path, name)
            for path, owner in self._modules.items()
            for name, parameter in owner._parameters.items()
            if parameter is not None
        }
        self.styles: dict[str, Style] = {}  # by the path of a module
        self._cuts: dict[str, Placement] = {}  # by the name of a parameter: along the dimension for tensors
        self._specs: dict[str, ShardingSpec] = {}  # by the name of a parameter: along all dimensions
        if isinstance(plan.styles, str):
            if plan.styles != AUTO:
                raise ValueError(f'plan: styles are {{pattern: style}} or "auto", not {plan.styles!r}')
            for path, style in _own_plan(module).items():
                self._take(path, style)
        else:
            for pattern, entry in plan.styles.items():
                self._enter(pattern, entry)

        self._share()

    def _share(self) -> None:
        """Shares the placement of a tied parameter among its names, if the plan has an entry for one of them."""
        names: dict[int, list[str]] = {}
        for name, (path, own) in self._owners.items():
            names.setdefault(id(self._modules[path]._parameters[own]), []).append(name)
        for aliases in names.values():
            silent = [name for name in aliases if name not in self._specs and name not in self._cuts]
            source = next((name for name in aliases if name not in silent), None)
            if source is not None:
                if source in self._specs:
                    self._specs |= dict.fromkeys(silent, self._specs[source])
                else:
                    self._cuts |= dict.fromkeys(silent, self._cuts[source])

    def _enter(self, pattern: str, entry: Entry) -> None:
        parameters = [name for name in self._owners if fnmatchcase(name, pattern)]
        modules = [path for path in self._modules if fnmatchcase(path, pattern)]
        if not parameters and not modules:
            some = ", ".join([*self._owners][:4])
            raise ValueError(f"plan: {pattern!r} is the name of no module and no parameter; parameters are {some}, …")
        if isinstance(entry, str | ParallelStyle):
            for path in modules or dict.fromkeys(self._owners[name][0] for name in parameters):
                for own, style in styles_of(entry, path, self._modules[path]).items():
                    self._take(own, style)
        elif parameters:
            self._specs |= dict.fromkeys(parameters, entry)
        else:
            raise ValueError(f"plan: {entry!r} says where parameters lie, but {pattern!r} names modules")

    def _take(self, path: str, style: Style) -> None:
        assert self.tensor is not None
        ranks = self.layout.shape[self.tensor]
        if style.pieces is not None and style.pieces % ranks:
            raise ValueError(
                f"plan: {path or 'the module'} has {style.pieces} heads, which do not divide into {ranks} equal parts "
                f"along {self.layout.names[self.tensor]!r}: leave it out of the plan, or take a mesh that fits"
            )
        self.styles[path] = style
        for name, cut in style.parameters.items():
            self._cuts[f"{path}.{name}" if path else name] = cut

    def placements(self, name: str, shape: Sequence[int]) -> Placements:
        """Returns the placements of a parameter."""
        if name in self._specs:
            return placements_of(self._specs[name], self.layout, len(shape))
        placements: list[Placement] = [Replicate()] * len(self.layout.shape)
        placed, cut = self._cuts.get(name), None
        if placed is not None and self._divides(placed, shape):
            assert self.tensor is not None
            placements[self.tensor], cut = placed, getattr(placed, "dim", None)
        if self.fully_sharded:
            parts = self.data_ranks
            free = [dim for dim, size in enumerate(shape) if dim != cut and size and size % parts == 0]
            for mesh_dim in self.data if free else ():
                placements[mesh_dim] = Shard(free[0])
        return tuple(placements)

    def _divides(self, placed: Placement, shape: Sequence[int]) -> bool:
        """Returns whether strided shards divide evenly; uneven ones are replicated instead."""
        if not isinstance(placed, _StridedShard):
            return True
        assert self.tensor is not None
        return shape[placed.dim] % (int(placed.split_factor) * self.layout.shape[self.tensor]) == 0

    def is_gathered(self, parameter: torch.Tensor) -> bool:
        """Returns whether a parameter is sharded along data dimensions and gathered for use."""
        return (
            self.fully_sharded
            and isinstance(parameter, MeshTensor)
            and any(not parameter.placements[dim].is_replicate() for dim in self.data)
        )

    @property
    def data_ranks(self) -> int:
        """Number of parts of a batch."""
        parts = 1
        for dim in self.data:
            parts *= self.layout.shape[dim]
        return parts

    @property
    def batch(self) -> Placements:
        """The placements of a batch."""
        return tuple(Shard(0) if dim in self.data else Replicate() for dim in range(len(self.layout.shape)))


def _tensor_dimension(plan: Plan, layout: MeshLayout) -> int | None:
    if plan.tensor is not None:
        return _dimension(plan.tensor, layout)
    if not plan.styles:
        return None
    named = [dim for dim, name in enumerate(layout.names) if _TENSOR.match(name)]
    data_dims = _named_data(plan, layout)
    candidates = named or [dim for dim in range(len(layout.names)) if dim not in data_dims]
    if candidates:
        return candidates[-1]
    if isinstance(plan.styles, str) or any(isinstance(entry, str | ParallelStyle) for entry in plan.styles.values()):
        raise ValueError(
            f"the styles of a plan cut along one mesh dimension, and {_sizes(layout)} has none for them by name: "
            "Plan(styles, tensor=...) names it"
        )
    return None


def _data_dimensions(plan: Plan, layout: MeshLayout, tensor: int | None) -> tuple[int, ...]:
    dims = _named_data(plan, layout)
    if plan.data is None and not dims:
        dims = tuple(dim for dim in range(len(layout.names)) if dim != tensor)
    if tensor in dims:
        raise ValueError(f"plan: mesh dimension {layout.names[tensor]!r} cannot be for both data and tensors")
    return dims


def _named_data(plan: Plan, layout: MeshLayout) -> tuple[int, ...]:
    if plan.data is not None:
        names = (plan.data,) if isinstance(plan.data, str) else plan.data
        return tuple(sorted(_dimension(name, layout) for name in names))
    return tuple(dim for dim, name in enumerate(layout.names) if _DATA.match(name))


def _dimension(name: str, layout: MeshLayout) -> int:
    if name not in layout.names:
        raise ValueError(f"plan: the mesh has no dimension {name!r}; it has {', '.join(map(repr, layout.names))}")
    return layout.names.index(name)


def _sizes(layout: MeshLayout) -> str:
    return "{" + ", ".join(f"{name}={size}" for name, size in zip(layout.names, layout.shape, strict=True)) + "}"


def _own_plan(module: nn.Module) -> dict[str, Style]:
    """Returns styles by path from the plans of a model and its submodels, or for PyTorch's layers without a plan.

    Raises ValueError if there is neither, and for unknown styles.
    """
    styles: dict[str, Style] = {}
    planned: list[str] = []
    for path, part in module.named_modules():
        plan = _plan_of(part)
        if plan and not any(path == parent or path.startswith(f"{parent}.") or not parent for parent in planned):
            planned.append(path)
            styles |= _styles(path, part, plan)
    if not styles:
        for path, part in module.named_modules():
            kinds = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.MultiheadAttention)
            if isinstance(part, kinds) and path not in styles:
                styles |= styles_of("column", path, part)
    if not styles:
        raise ValueError(
            f'plan: "auto" is for models that say themselves how they are cut, and {type(module).__name__} has no '
            'tp_plan: give {pattern: style}, as {"*.up": "column", "*.down": "row"}'
        )
    return styles


def _plan_of(module: nn.Module) -> Mapping[str, str]:
    for name in ("tp_plan", "_tp_plan"):
        plan = getattr(module, name, None)
        if isinstance(plan, Mapping) and plan:
            return plan
    return {}


def _styles(path: str, model: nn.Module, plan: Mapping[str, str]) -> dict[str, Style]:
    """Returns styles by paths of modules; named parameters are added to the style of their module."""
    modules = dict(model.named_modules())
    parameters = dict(model.named_parameters(remove_duplicate=False))
    styles: dict[str, Style] = {}
    for name, style in plan.items():
        if style not in _KNOWN:
            raise ValueError(
                f"plan: the own plan of {type(model).__name__} has {style!r} for {name!r}, which only SPMD programs "
                'can take: give {pattern: style} instead of "auto"'
            )
        for part_path, part in modules.items():
            if _NUMBER.sub("*", part_path) == name:
                old = styles.get(part_path, Style())
                new = _module_style(style, part_path, part)
                styles[part_path] = Style({**old.parameters, **new.parameters}, new.inputs, {}, new.outputs)
        for part_path, parameter in parameters.items():
            cut = _parameter_cut(style, part_path, parameter) if _NUMBER.sub("*", part_path) == name else None
            if cut is not None:
                owner, _, own = part_path.rpartition(".")
                old = styles.get(owner, Style())
                styles[owner] = Style({**old.parameters, own: cut}, old.inputs, {}, old.outputs)
    return {".".join(filter(None, (path, part_path))): style for part_path, style in styles.items()}


def _module_style(style: str, path: str, module: nn.Module) -> Style:
    own = dict(module.named_parameters(recurse=False))
    cuts = {name: _parameter_cut(style, f"{path}.{name}", parameter) for name, parameter in own.items()}
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


def _parameter_cut(style: str, path: str, parameter: torch.Tensor) -> Placement | None:
    """Returns the placement of a parameter along the tensor dimension; None if it is replicated."""
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
