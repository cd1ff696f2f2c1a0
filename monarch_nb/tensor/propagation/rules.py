"""Sharding rules for operations whose rules in PyTorch are missing or wrong.

A rule is a list of rows, each with placements of results and inputs along one mesh dimension. The row that moves the
fewest bytes is chosen for each mesh dimension separately; full replication is always possible.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from .lowered import Lowering, Unfit
from .meta import Meta, Placements
from .operation import Leaf, Operation, has_parts, slots
from .plan import Slot

R = Replicate()
Row = tuple[Sequence[Placement | None], Sequence[Placement]]
Rule = Callable[[Operation, Sequence[Leaf]], list[Row]]

IS_BEFORE_2_13 = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
NONE, MEAN, SUM = 0, 1, 2  # how losses are reduced
_NEVER = float("inf")
_REDUCED_LISTS = frozenset({"_foreach_norm", "_foreach_max", "_foreach_powsum", "_fused_rms_norm"})


def has_own_rule(operation: Operation) -> bool:
    """Returns whether an own rule replaces PyTorch's."""
    return _rule_of(operation) is not None


def _rule_of(operation: Operation) -> Rule | None:
    return _RULES.get(operation.packet) or _RULES.get(operation.name)


def by_own_rules(operation: Operation, leaves: Sequence[Leaf]) -> Lowering:
    """Returns the cheapest way to run the operation. Raises Unfit if there is no rule."""
    rule = _rule_of(operation)
    if rule is None and torch.Tag.pointwise in operation.func.tags:
        rule = _pointwise
    if rule is None:
        raise Unfit("no rule is known")
    rows = [*rule(operation, leaves), ([R] * len(leaves), [R] * len(operation.metas))]
    dims = range(len(operation.metas[0].layout.shape))
    best = [min(rows, key=lambda row: _cost(operation, row, dim)) for dim in dims]
    if any(_cost(operation, row, dim) == _NEVER for dim, row in enumerate(best)):
        raise Unfit("a tensor that changes in place would have to be placed otherwise")
    inputs = tuple(tuple(row[1][index] for row in best) for index in range(len(operation.metas)))
    return Lowering(
        _of_one_rank(operation, inputs[0]),
        inputs,
        tuple(None if leaf is None else tuple(row[0][index] or R for row in best) for index, leaf in enumerate(leaves)),
    )


def by_equal_placements(operation: Operation, leaves: Sequence[Leaf]) -> Lowering | None:
    """Returns the way to run an elementwise operation on tensors with equal placements, on which it runs unchanged.

    In lists of tensors, those at the same position must have equal placements. None for other operations. PyTorch's
    rules would try all combinations of placements to find this one.
    """
    packet = operation.packet
    if packet.startswith(("_foreach_", "_fused_")) and packet not in _REDUCED_LISTS:
        lists = [slots(value) for value in (*operation.args, *operation.kwargs.values()) if isinstance(value, list)]
        groups = [list(group) for group in zip(*filter(None, lists), strict=False)]
        leaf_groups = [[leaf] for leaf in leaves] if len(leaves) == len(groups) else [[]] * len(groups)
        complete = {*map(len, filter(None, lists))} == {len(groups)} and len(leaves) in (0, len(groups))
    else:
        groups, leaf_groups = [[*range(len(operation.metas))]], [list(leaves)]
        complete = torch.Tag.pointwise in operation.func.tags
    if not complete or operation.random:
        return None
    grouped = {index for group in groups for index in group}
    if any(meta.shape or not meta.is_replicated for index, meta in enumerate(operation.metas) if index not in grouped):
        return None
    outputs: list[Placements] = []
    for group, results in zip(groups, leaf_groups, strict=True):
        metas = [meta for meta in (operation.metas[index] for index in group) if meta.shape or not meta.is_replicated]
        shapes = {tuple(leaf[0].shape) for leaf in results if leaf is not None} | {meta.shape for meta in metas}
        if len(shapes) != 1 or len({meta.placements for meta in metas}) != 1 or any(map(has_parts, metas)):
            return None
        outputs += [metas[0].placements] * len(results)
    return Lowering(operation, tuple(meta.placements for meta in operation.metas), tuple(outputs))


def _cost(operation: Operation, row: Row, dim: int) -> float:
    """Returns the approximate number of bytes to move."""
    cost = 0.0
    for index, (meta, target) in enumerate(zip(operation.metas, row[1], strict=True)):
        current = meta.placements[dim]
        if current == target:
            continue
        if index in operation.writes:
            return _NEVER
        if current.is_partial():
            cost += 2 * meta.nbytes if target.is_replicate() else meta.nbytes
        elif not current.is_replicate():
            cost += meta.nbytes if target.is_replicate() else meta.nbytes / meta.layout.shape[dim]
        else:
            cost += 1  # no move, but keeps tensors replicated: else gradients would be sums over more ranks
    return cost


def _along(shape: Sequence[int], dim: int, ndim: int) -> Placement:
    """Returns the placement of a tensor that is broadcast to `ndim` dimensions, which are sharded along `dim`."""
    own = dim - (ndim - len(shape))
    return Shard(own) if own >= 0 and shape[own] != 1 else R


def _pointwise(operation: Operation, leaves: Sequence[Leaf]) -> list[Row]:
    """Elementwise: any dimension of the results can be sharded."""
    shapes = [tuple(leaf[0].shape) for leaf in leaves if leaf is not None]
    shapes = shapes or [operation.metas[register].shape for register in operation.writes]
    ndim = max(map(len, shapes), default=0)
    if any(shape != shapes[0] for shape in shapes):
        return []
    return [
        ([Shard(dim)] * len(leaves), [_along(meta.shape, dim, ndim) for meta in operation.metas])
        for dim in range(ndim)
        if shapes[0][dim] > 1
    ]


def _unread(operation: Operation, leaves: Sequence[Leaf]) -> list[Row]:
    """Only the shape of the input matters: the result of a partial input is replicated."""
    return [([R if p.is_partial() else p], [p]) for p in dict.fromkeys(operation.metas[0].placements)]


def _convolution(operation: Operation, leaves: Sequence[Leaf]) -> list[Row]:
    """Sharded along the batch, or along output channels with weight and bias."""
    inputs, weight = operation.args[0], operation.args[1]
    assert isinstance(inputs, Slot)
    strides = operation.args[3]
    assert isinstance(strides, list | tuple)
    if len(operation.metas[inputs.register].shape) != len(strides) + 2:
        return []
    assert isinstance(weight, Slot)
    bias = [R] * (len(operation.metas) - 2)
    rows: list[Row] = [([Shard(0)], [Shard(0), R, *bias])]
    channels = 1 if operation.args[6] else 0
    filters, ranks = operation.metas[weight.register].shape[channels], operation.metas[weight.register].layout.size
    if operation.args[8] == 1 and -(-filters // ranks) * (ranks - 1) < filters:  # each rank has some
        rows.append(([Shard(1)], [R, Shard(channels), *(Shard(0) for _ in bias)]))
    return rows


def _convolution_backward(operation: Operation, leaves: Sequence[Leaf]) -> list[Row]:
    """Sharded along the batch; gradients of weight and bias are partial."""
    outs = [Shard(0), Partial(), Partial()]
    return [([None if leaf is None else out for leaf, out in zip(leaves, outs, strict=True)], [Shard(0), Shard(0), R])]


def _pool(operation: Operation, leaves: Sequence[Leaf]) -> list[Row]:
    """Sharded along batch or channels."""
    leading = len(operation.metas[0].shape) - (3 if "3d" in operation.packet else 2)
    return [([Shard(dim)] * len(leaves), [Shard(dim)] * len(operation.metas)) for dim in range(leading)]


def _group_norm(operation: Operation, leaves: Sequence[Leaf]) -> list[Row]:
    """Sharded along the batch; gradients of weight and bias are partial."""
    layout, batch = operation.metas[0].layout, operation.args[_BATCH[operation.packet]]
    if not isinstance(batch, int) or not batch or batch % layout.size:
        return []
    return [_norm_row(operation, leaves, Shard(0))]


def _norm_row(operation: Operation, leaves: Sequence[Leaf], shard: Shard) -> Row:
    """The normalised tensor, its statistics and its gradients are cut; weight and bias are whole."""
    backward = operation.packet.endswith("backward")
    outs: list[Placement] = [shard, Partial(), Partial()] if backward else [shard] * 3
    cut = 4 if backward else 1
    outputs = [None if leaf is None else out for leaf, out in zip(leaves, outs, strict=True)]
    return outputs, [shard if index < cut else R for index in range(len(operation.metas))]


def _of_one_rank(operation: Operation, placements: Placements) -> Operation:
    """Replaces the batch size in the arguments by one rank's."""
    index = _BATCH.get(operation.packet)
    if index is None:
        return operation
    sizes = operation.metas[0].layout.shape
    parts = math.prod(size for size, placement in zip(sizes, placements, strict=True) if placement == Shard(0))
    batch = operation.args[index]
    assert isinstance(batch, int)
    return replace(operation, args=(*operation.args[:index], batch // parts, *operation.args[index + 1 :]))


def _attention(operation: Operation, leaves: Sequence[Leaf]) -> list[Row]:
    """Sharded along the batch or the heads."""
    masks = slots(list(operation.kwargs.values()))
    heads = {operation.metas[index].shape[1] for index in slots(operation.args)}
    return [
        (
            [Shard(dim)] * len(leaves),
            [_along(meta.shape, dim, 4) if i in masks else Shard(dim) for i, meta in enumerate(operation.metas)],
        )
        for dim in ((0, 1) if len(heads) == 1 else (0,))
    ]


def _flash_attention(operation: Operation, leaves: Sequence[Leaf]) -> list[Row]:
    """Does the same as `_attention` for CUDA's kernels, whose counters and seeds every rank has whole."""
    shape = operation.metas[0].shape
    alike = [len(meta.shape) == len(shape) - 1 or meta.shape[:2] == shape[:2] for meta in operation.metas]
    sharded = 2 if operation.packet.endswith("attention") else len(leaves)  # the result and its sums; all gradients
    return [
        (
            [None if leaf is None else Shard(dim) if index < sharded else R for index, leaf in enumerate(leaves)],
            [Shard(dim) if is_alike else R for is_alike in alike],
        )
        for dim in (0, 1)
    ]


def _extreme(operation: Operation, leaves: Sequence[Leaf]) -> list[Row]:
    """Largest or smallest numbers along a dimension, with their positions: sharded along the others."""
    along, rest = _dims(operation)
    keep = operation.argument("keepdim")
    return [([Shard(dim - (not keep and dim > along))] * len(leaves), [Shard(dim)]) for dim in rest]


def _dims(operation: Operation) -> tuple[int, list[int]]:
    """Returns the dimension along which an operation works, and the others."""
    ndim, along = len(operation.metas[0].shape), operation.argument("dim")
    assert isinstance(along, int)
    along %= max(ndim, 1)
    return along, [dim for dim in range(ndim) if dim != along]


def _index_put(operation: Operation, leaves: Sequence[Leaf]) -> list[Row]:
    """Sharded along dimensions after the indexed ones."""
    indices = operation.args[1]
    assert isinstance(indices, list | tuple)
    if not all(isinstance(index, Slot) for index in indices):
        return []
    metas = operation.metas
    shapes = [metas[index.register].shape for index in indices if isinstance(index, Slot)]
    ndim, before = len(metas[0].shape), max(map(len, shapes))
    last = len(metas) - 1  # the values
    shift = before - len(indices)
    return [
        (
            [Shard(dim)] * len(leaves),
            [Shard(dim), *[R] * len(indices), _along(metas[last].shape, dim + shift, ndim + shift)],
        )
        for dim in range(len(indices), ndim)
    ]


def _index_copy(operation: Operation, leaves: Sequence[Leaf]) -> list[Row]:
    """Sharded along any dimension except that of the indices."""
    _, rest = _dims(operation)
    return [([Shard(dim)] * len(leaves), [Shard(dim), R, Shard(dim)]) for dim in rest]


def _layer_norm(operation: Operation, leaves: Sequence[Leaf]) -> list[Row]:
    """Sharded along dimensions that are not normalised; gradients of weight and bias are partial."""
    sizes = operation.argument("normalized_shape")
    assert isinstance(sizes, list | tuple)
    dims = range(len(operation.metas[0].shape) - len(sizes))
    return [_norm_row(operation, leaves, Shard(dim)) for dim in dims]


def _nll_loss(operation: Operation, leaves: Sequence[Leaf]) -> list[Row]:
    """Sharded along any dimension except the classes; losses that are not averaged."""
    backward, reduction = operation.packet.endswith("backward"), operation.argument("reduction")
    shape = operation.metas[1 if backward else 0].shape
    if reduction == MEAN or len(shape) == 1:
        return []
    rows: list[Row] = []
    for dim in (0, *range(2, len(shape))):
        target = Shard(max(dim - 1, 0))
        grad = target if reduction == NONE else R
        inputs = [grad, Shard(dim), target] if backward else [Shard(dim), target]
        sums: list[Placement] = [target, R] if reduction == NONE else [Partial(), Partial()]
        outputs = [Shard(dim)] if backward else sums
        rows.append((outputs, [*inputs, *[R] * (len(operation.metas) - len(inputs))]))
    return rows


def _grouped_mm(operation: Operation, leaves: Sequence[Leaf]) -> list[Row]:
    """Sharded along ungrouped rows or columns of the product, or along the inner dimension."""
    first, second = (len(meta.shape) for meta in operation.metas[:2])
    rows, inner, columns = Shard(first - 2), Shard(first - 1), Shard(second - 1)
    out = 3 if first == second else 2
    rest = [R] * (len(operation.metas) - 2)
    choices: list[Row] = []
    if (first, second) != (2, 3):
        choices.append(([Shard(out - 2)], [rows, R, *rest]))
    if (first, second) != (3, 2):
        choices += [
            ([_along_last(out, cut)], [R, cut, *rest]) for cut in (columns, *_strided(operation.metas[1], second))
        ]
    if (first, second) != (2, 2):
        choices.append(([Partial()], [inner, Shard(second - 2), *rest]))
    if (first, second) == (3, 3):
        choices.append(([Shard(0)], [Shard(0), Shard(0), *rest]))
    return choices


def _strided(meta: Meta, ndim: int) -> list[Placement]:
    """Strided shards of the last dimension."""
    return [p for p in meta.placements if isinstance(p, _StridedShard) and p.dim == ndim - 1]


def _along_last(ndim: int, cut: Placement) -> Placement:
    if isinstance(cut, _StridedShard):
        return _StridedShard(ndim - 1, split_factor=cut.split_factor)
    return Shard(ndim - 1)


# Losses of pairs of elements, which PyTorch adds up or averages.
LOSSES = (
    "mse_loss",
    "smooth_l1_loss",
    "huber_loss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "soft_margin_loss",
)

_ELEMENTS = [
    *LOSSES,
    *(f"{name}_backward" for name in LOSSES),
    "hardtanh",
    "hardtanh_",
    "hardtanh_backward",
    "hardswish",
    "hardswish_",
    "hardswish_backward",
    "hardsigmoid_backward",
    "softshrink",
    "softshrink_backward",
    "hardshrink_backward",
    "elu_backward",
    "leaky_relu_backward",
    "log_sigmoid_backward",
    "softplus_backward",
    "gelu_backward",
    "silu_backward",
    "mish_backward",
    "threshold_backward",
    "addcmul",
    "addcdiv",
]

_UNREAD = ["empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"]

# PyTorch has no rule for these, or a rule that would gather.
_POOLS = (
    *(f"{name}{dims}d_backward" for dims in (2, 3) for name in ("avg_pool", "_adaptive_avg_pool", "adaptive_max_pool")),
    *(f"max_pool{dims}d_with_indices_backward" for dims in (2, 3)),
)

_NLL_LOSSES = ("nll_loss_forward", "nll_loss2d_forward", "nll_loss_backward", "nll_loss2d_backward")
_BATCH = {"native_group_norm": 3, "native_group_norm_backward": 5}  # index of its size among the arguments

_RULES: dict[str, Rule] = {
    **dict.fromkeys(_POOLS, _pool),
    **dict.fromkeys(_BATCH, _group_norm),
    **dict.fromkeys(_UNREAD, _unread),
    **dict.fromkeys(_ELEMENTS, _pointwise),
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "_grouped_mm": _grouped_mm,
    **dict.fromkeys(_NLL_LOSSES, _nll_loss),
    "_scaled_dot_product_flash_attention": _flash_attention,
    "_scaled_dot_product_flash_attention_backward": _flash_attention,
    "_scaled_dot_product_cudnn_attention": _flash_attention,
    "_scaled_dot_product_cudnn_attention_backward": _flash_attention,
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention,
}
# PyTorch's rules for these were wrong in earlier versions.
_BEFORE_2_13: dict[str, Rule] = {
    **dict.fromkeys(("aten.max.dim", "aten.min.dim"), _extreme),
    **dict.fromkeys(("index_put", "index_put_", "_index_put_impl_"), _index_put),
    **dict.fromkeys(("index_copy", "index_copy_"), _index_copy),
    **dict.fromkeys(("native_layer_norm", "native_layer_norm_backward"), _layer_norm),
}
if IS_BEFORE_2_13:
    _RULES |= _BEFORE_2_13
