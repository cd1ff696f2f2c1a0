"""Other operations that compute the same: rewrites that gather less, and substitutes where ranks have no kernel.

PyTorch and libraries choose operations by the device of tensors. Handles are on a device that is neither CPU nor CUDA,
so that the chosen operation may have no kernel on the ranks.
"""

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from functools import cache, reduce

import torch
from torch._decomp import decomposition_table
from torch.distributed.tensor import Replicate, Shard
from torch.utils._pytree import tree_leaves, tree_map

from monarch_nb.tensor.propagation.draft import Writer
from monarch_nb.tensor.propagation.execute import DispatchMode
from monarch_nb.tensor.propagation.meta import Meta
from monarch_nb.tensor.propagation.operation import Operation
from monarch_nb.tensor.propagation.plan import PropagationError, Slot, user_line
from monarch_nb.tensor.propagation.rules import LOSSES, MEAN, NONE, SUM

aten = torch.ops.aten
_KEYS = {"cpu": "CPU", "cuda": "CUDA", "xpu": "XPU", "mps": "MPS"}
_ANY_DEVICE = ("CompositeImplicitAutograd", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")

# Writes equivalent operations and returns the slots of the results; None if the operation needs no rewrite.
Rewrite = Callable[[Operation, Writer], list[Slot | None] | None]

Tensor = torch.Tensor
Body = Callable[..., object]


def _sharded_along(meta: Meta, dim: int) -> bool:
    return any(getattr(p, "dim", None) == dim % max(len(meta.shape), 1) for p in meta.placements)


def _tensor(operation: Operation, name: str) -> Slot | None:
    value = operation.argument(name)
    return value if isinstance(value, Slot) else None


def _meta(operation: Operation, slot: Slot) -> Meta:
    return operation.metas[slot.register]


def _arguments(operation: Operation, **changed: object) -> list[object]:
    """Returns all arguments of the schema in order, with some replaced."""
    return [
        changed.get(argument.name, operation.argument(argument.name)) for argument in operation.func._schema.arguments
    ]


def _loss(operation: Operation, write: Writer) -> list[Slot | None] | None:
    """Computes a mean as a sum divided by the total count, which is correct for uneven shards."""
    reduction = operation.argument("reduction")
    if reduction == NONE:
        return None
    losses = write(operation.func, *_arguments(operation, reduction=NONE))
    total = write(aten.sum.default, losses)
    if reduction == MEAN:
        total = write(aten.div.Scalar, total, math.prod(write.shape(losses)))  # NaN if there are none
    return [total]


def _loss_backward(operation: Operation, write: Writer) -> list[Slot | None] | None:
    values, grad = _tensor(operation, "self"), _tensor(operation, "grad_output")
    if operation.argument("reduction") != MEAN or values is None or grad is None:
        return None
    target = _tensor(operation, "target")
    assert target is not None
    shape = torch.broadcast_shapes(_meta(operation, values).shape, _meta(operation, target).shape)  # type: ignore[no-untyped-call]
    count = max(math.prod(shape), 1)
    scaled = write(aten.div.Scalar, write.whole(grad), count)
    return [write(operation.func, *_arguments(operation, grad_output=scaled, reduction=SUM))]


def _log_softmax(operation: Operation, write: Writer) -> list[Slot | None] | None:
    logits, dim = operation.args[0], operation.args[1]
    assert isinstance(logits, Slot)
    assert isinstance(dim, int)
    meta = _meta(operation, logits)
    if not _sharded_along(meta, dim) or operation.args[2] or not meta.shape or 0 in meta.shape:
        return None
    logits = write.summed(logits)
    shifted = write(aten.sub.Tensor, logits, write.whole(write(aten.amax.default, logits, [dim], True)))
    total = write.whole(write(aten.sum.dim_IntList, write(aten.exp.default, shifted), [dim], True))
    if operation.packet == "_softmax":
        return [write(aten.div.Tensor, write(aten.exp.default, shifted), total)]
    return [write(aten.sub.Tensor, shifted, write(aten.log.default, total))]


def _log_softmax_backward(operation: Operation, write: Writer) -> list[Slot | None] | None:
    grad, output, dim, dtype = operation.args[:4]
    assert isinstance(grad, Slot)
    assert isinstance(output, Slot)
    assert isinstance(dim, int)
    meta = _meta(operation, output)
    if not _sharded_along(meta, dim) or dtype != meta.dtype or not meta.shape:
        return None
    grad = write.like(grad, output)
    if operation.packet == "_softmax_backward_data":
        weighed = write(aten.mul.Tensor, grad, output)
        total = write.whole(write(aten.sum.dim_IntList, weighed, [dim], True))
        return [write(aten.sub.Tensor, weighed, write(aten.mul.Tensor, output, total))]
    total = write.whole(write(aten.sum.dim_IntList, grad, [dim], True))
    return [write(aten.sub.Tensor, grad, write(aten.mul.Tensor, write(aten.exp.default, output), total))]


def _class_dim(shape: Sequence[int]) -> int:
    return 0 if len(shape) == 1 else 1


def _has_whole_classes(meta: Meta) -> bool:
    return not _sharded_along(meta, _class_dim(meta.shape))


def _chosen(operation: Operation, write: Writer, scores: Slot, target: Slot) -> tuple[Slot, Slot, int]:
    """Returns masks of the target class, sharded like the classes, and of targets that count; the class dimension."""
    shape, placements = write.shape(scores), write.placements(scores)
    dim = _class_dim(shape)
    classes = write(aten.arange.default, shape[dim], dtype=torch.int64, device=torch.device(operation.device))
    classes = _by_class(write, classes, scores, dim)
    target = write.summed(target)
    if dim == 1:
        target = write.cut(target, [p if p == Shard(0) else Replicate() for p in placements])
    counts = write(aten.ne.Scalar, target, operation.argument("ignore_index"))
    column = write(aten.unsqueeze.default, target, 1) if dim == 1 else target
    return write(aten.eq.Tensor, column, classes), counts, dim


def _by_class(write: Writer, values: Slot, scores: Slot, dim: int) -> Slot:
    """Returns values by class, shaped to broadcast against the input and sharded like its classes."""
    sizes = [-1 if index == dim else 1 for index in range(len(write.shape(scores)))]
    values = write(aten.view.default, write.whole(values), sizes)
    return write.cut(values, [p if p == Shard(dim) else Replicate() for p in write.placements(scores)])


def _nll_loss(operation: Operation, write: Writer) -> list[Slot | None] | None:
    """Adds up the sums of ranks; if classes are sharded, selects targets among the classes of each rank.

    PyTorch's rule averages the means of ranks, which is wrong with class weights or ignored targets.
    """
    scores, target, weight = (_tensor(operation, name) for name in ("self", "target", "weight"))
    reduction = operation.argument("reduction")
    if scores is None or target is None or reduction == NONE:
        return None
    if _has_whole_classes(_meta(operation, scores)):
        if reduction == SUM:
            return None
        total, count = write.all(operation.func, *_arguments(operation, reduction=SUM))
        if weight is None and _meta(operation, scores).dtype.itemsize >= 4:
            # The same number, which needs no loss: a compiled step adds it up beside the forward pass.
            is_counted = write(aten.ne.Scalar, target, operation.argument("ignore_index"))
            count = write(aten.sum.default, is_counted, dtype=_meta(operation, scores).dtype)
        total, count = write.whole(total), write.whole(count)
        return [write(aten.div.Tensor, total, count), count]
    scores, dtype = write.summed(scores), _meta(operation, scores).dtype
    chosen, counts, dim = _chosen(operation, write, scores, target)

    def of_target(values: Slot) -> Slot:
        zero = write(aten.zeros_like.default, values)
        selected = write.summed(write(aten.sum.dim_IntList, write(aten.where.self, chosen, values, zero), [dim]))
        return write(aten.where.self, counts, selected, write(aten.zeros_like.default, selected))

    losses = of_target(scores)
    if weight is None:
        weights = write(aten._to_copy.default, counts, dtype=dtype)
    else:
        weights = of_target(_by_class(write, weight, scores, dim))
        losses = write(aten.mul.Tensor, losses, weights)
    total = write.whole(write(aten.neg.default, write(aten.sum.default, losses)))
    count = write.whole(write(aten.sum.default, weights))
    return [write(aten.div.Tensor, total, count) if reduction == MEAN else total, count]


def _nll_loss_backward(operation: Operation, write: Writer) -> list[Slot | None] | None:
    grad, scores, target, weight = (_tensor(operation, name) for name in ("grad_output", "self", "target", "weight"))
    total, reduction = _tensor(operation, "total_weight"), operation.argument("reduction")
    if grad is None or scores is None or target is None or total is None or reduction == NONE:
        return None
    if _has_whole_classes(_meta(operation, scores)):
        if reduction == SUM:
            return None
        scaled = write(aten.div.Tensor, write.whole(grad), write.whole(total))
        return [write(operation.func, *_arguments(operation, grad_output=scaled, reduction=SUM))]
    scores = write.summed(scores)
    chosen, counts, dim = _chosen(operation, write, scores, target)
    scaled = write(aten.neg.default, write.whole(grad))
    if reduction == MEAN:
        scaled = write(aten.div.Tensor, scaled, write.whole(total))
    if weight is not None:
        scaled = write(aten.mul.Tensor, _by_class(write, weight, scores, dim), scaled)
    counts = write(aten.unsqueeze.default, counts, 1) if dim == 1 else counts
    mask = write.like(write(aten.logical_and.default, chosen, counts), scores)
    return [write(aten.where.self, mask, scaled, write(aten.zeros_like.default, scores))]


def _cat(operation: Operation, write: Writer) -> list[Slot | None] | None:
    """Drops tensors of shape (0,), which fit any shape but not the rules."""
    slots, dim = operation.argument("tensors"), operation.argument("dim")
    assert isinstance(slots, list | tuple)
    filled = [slot for slot in slots if write.shape(slot) != (0,)]
    if len(filled) in (0, len(slots)):
        return None
    result = write(aten.cat.default, filled, dim) if len(filled) > 1 else write(aten.clone.default, filled[0])
    dtypes = [reduce(torch.promote_types, (_meta(operation, slot).dtype for slot in part)) for part in (slots, filled)]
    return [result if dtypes[0] == dtypes[1] else write(aten._to_copy.default, result, dtype=dtypes[0])]


def _view(operation: Operation, write: Writer) -> list[Slot | None] | None:
    """Splits a view that divides a sharded dimension and merges it with the previous one into two views of shards.

    Attention merges batch and heads in this way.
    """
    source, sizes = operation.args[0], operation.args[1]
    assert isinstance(source, Slot)
    if not isinstance(sizes, list | tuple):  # a view as another dtype
        return None
    shape, numel = write.shape(source), math.prod(write.shape(source))
    if not numel:
        return None
    product = math.prod(size for size in sizes if size != -1)
    old, new = _ends(shape), _ends([numel // product if size == -1 else size for size in sizes])
    cut = [dim for dim in range(len(shape)) if _sharded_along(_meta(operation, source), dim) and shape[dim] > 1]
    if not any(old[dim] not in new and any(old[dim + 1] < end < old[dim] for end in new) for dim in cut):
        return None
    ends = sorted({*old, *new}, reverse=True)
    if any(outer % inner for outer, inner in itertools.pairwise(ends)):
        return None
    split = write(aten.view.default, source, [outer // inner for outer, inner in itertools.pairwise(ends)])
    return [write(aten.view.default, split, sizes)]


def _ends(shape: Sequence[int]) -> list[int]:
    """Returns the products of the sizes from each dimension to the last, and 1."""
    return [*itertools.accumulate(reversed(shape), operator.mul, initial=1)][::-1]


def _physical(func: torch._ops.OpOverload) -> Rewrite:
    """Returns a rewrite that conjugates or negates at once, since handles have no bits for it."""
    return lambda operation, write: [write(func, operation.args[0])]


def _index_put(operation: Operation, write: Writer) -> list[Slot | None] | None:
    """Rewrites the assignment of one value under a mask as `masked_fill`."""
    tensor, indices, values = operation.args[:3]
    mask = indices[0] if isinstance(indices, list | tuple) and len(indices) == 1 else None
    if not (isinstance(tensor, Slot) and isinstance(mask, Slot) and isinstance(values, Slot)):
        return None
    if (
        _meta(operation, mask).dtype != torch.bool
        or operation.argument("accumulate")
        or write.shape(values) not in ((), (1,))
    ):
        return None
    for _ in range(len(write.shape(tensor)) - len(write.shape(mask))):
        mask = write(aten.unsqueeze.default, mask, -1)
    value = write(aten.view.default, values, [])
    if operation.writes:
        write.all(aten.masked_fill_.Tensor, tensor, mask, value)
        return [None]
    return [write(aten.masked_fill.Tensor, tensor, mask, value)]


REWRITES: dict[str, Rewrite] = {
    **dict.fromkeys(LOSSES, _loss),
    **{f"{name}_backward": _loss_backward for name in LOSSES},
    "_softmax": _log_softmax,
    "_log_softmax": _log_softmax,
    "_softmax_backward_data": _log_softmax_backward,
    "_log_softmax_backward_data": _log_softmax_backward,
    "nll_loss_forward": _nll_loss,
    "nll_loss2d_forward": _nll_loss,
    "nll_loss_backward": _nll_loss_backward,
    "nll_loss2d_backward": _nll_loss_backward,
    "cat": _cat,
    "view": _view,
    "_unsafe_view": _view,
    **dict.fromkeys(("index_put", "index_put_", "_index_put_impl_"), _index_put),
    "_conj": _physical(aten._conj_physical.default),
    "_neg_view": _physical(aten.neg.default),
}
# Rewritten on whole tensors too.
ALWAYS = frozenset({"_conj", "_neg_view"})


def substitute(operation: Operation, device: str) -> Body | None:
    """Returns a function of the operation's arguments for a kind of device; None if the device has a kernel.

    Raises PropagationError if there is no substitute.
    """
    func = operation.func
    of_integers = _OF_INTEGERS.get(operation.packet) if device == "cpu" else None
    if of_integers is not None and not operation.writes and not operation.metas[0].dtype.is_floating_point:
        return of_integers
    if has_kernel(func, device):
        return None
    body = _OURS.get(operation.packet) or decomposition_table.get(func)
    if body is None or operation.writes:
        raise PropagationError(
            operation.name,
            f"PyTorch has no kernel for it on {device}, which the processes of the mesh compute on",
            "Write it with other operations, or register how it is: torch._decomp.register_decomposition",
            user_line(),
        )
    return body


@cache
def has_kernel(func: torch._ops.OpOverload, device: str) -> bool:
    """Returns whether a kind of device has a kernel; True if PyTorch here is built without that device."""
    key = _KEYS.get(device)
    if key is None or not _is_registered("aten::mm", key):
        return True
    name = _name(func)
    if func.namespace == "prim":
        return True
    return _is_registered(name, key) or any(_is_registered(name, other_key) for other_key in _ANY_DEVICE)


def _name(func: torch._ops.OpOverload) -> str:
    return ".".join(filter(None, (func._schema.name, func._schema.overload_name)))


def _is_registered(name: str, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, key)


class SubstituteTrace(DispatchMode):
    """Records the operations on tensors with known slots in a `with` block."""

    def __init__(self, write: Writer, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._write = write
        self._slots: dict[int, tuple[Tensor, Slot]] = {id(t): (t, Slot(i)) for i, t in enumerate(tensors)}

    def slot(self, tensor: Tensor) -> Slot:
        """Returns the slot of a tensor."""
        return self._slots[id(tensor)][1]

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: tuple[type, ...],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Runs an operation and records it."""
        kwargs = kwargs or {}
        if func.namespace == "prim":  # queries of a tensor's device, and the like
            return func(*args, **kwargs)
        with self:  # this runs below autograd, where such operations would otherwise be decomposed
            parts = func.decompose(*args, **kwargs) if _is_registered(_name(func), _ANY_DEVICE[0]) else NotImplemented
        if parts is not NotImplemented:
            return parts
        result = func(*args, **kwargs)

        def located(value: object) -> object:
            return self.slot(value) if isinstance(value, Tensor) else value

        slots = self._write.all(func, *tree_map(located, args), **tree_map(located, kwargs))
        new = [tensor for tensor in tree_leaves(result) if isinstance(tensor, Tensor) and id(tensor) not in self._slots]
        self._slots |= {id(tensor): (tensor, slot) for tensor, slot in zip(new, slots, strict=True)}
        return result


# -- operations of devices other than CPUs, as PyTorch computes them on a CPU -----------------------------------------


def _lstm_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    cx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    gates = _with_biases(input_gates, input_bias) + _with_biases(hidden_gates, hidden_bias)
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * cx + i * g
    return o * cy.tanh(), cy, torch.cat([i, f, g, o], 1)


def _lstm_cell_backward(
    grad_hy: Tensor | None, grad_cy: Tensor | None, cx: Tensor, cy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    i, f, g, o = workspace.chunk(4, 1)
    c = cy.tanh()
    to_o = torch.zeros_like(c) if grad_hy is None else grad_hy * c
    to_c = torch.zeros_like(c) if grad_hy is None else grad_hy * o * (1 - c * c)
    if grad_cy is not None:
        to_c = to_c + grad_cy
    gates = torch.cat([to_c * g * i * (1 - i), to_c * cx * f * (1 - f), to_c * i * (1 - g * g), to_o * o * (1 - o)], 1)
    return gates, to_c * f, gates.sum(0) if has_bias else None


def _gru_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    hx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    input_r, input_z, input_n = _with_biases(input_gates, input_bias).chunk(3, 1)
    hidden_r, hidden_z, hidden_n = _with_biases(hidden_gates, hidden_bias).chunk(3, 1)
    r, z = (input_r + hidden_r).sigmoid(), (input_z + hidden_z).sigmoid()
    n = (input_n + r * hidden_n).tanh()
    return n + z * (hx - n), torch.cat([r, z, n, hx, hidden_n], 1)


def _gru_cell_backward(
    grad_hy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    r, z, n, hx, hidden_n = workspace.chunk(5, 1)
    to_n = grad_hy * (1 - z) * (1 - n * n)
    to_z = grad_hy * (hx - n) * z * (1 - z)
    to_r = to_n * hidden_n * r * (1 - r)
    inputs, hidden = torch.cat([to_r, to_z, to_n], 1), torch.cat([to_r, to_z, to_n * r], 1)
    return inputs, hidden, grad_hy * z, inputs.sum(0) if has_bias else None, hidden.sum(0) if has_bias else None


def _with_biases(gates: Tensor, bias: Tensor | None) -> Tensor:
    return gates if bias is None else gates + bias


def _wider_product(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    return a.to(out_dtype) @ b.to(out_dtype)


def _wider_sum_and_product(
    addend: Tensor, a: Tensor, b: Tensor, out_dtype: torch.dtype, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    product = _wider_product(a, b, out_dtype) * alpha
    return product if beta == 0 else addend.to(out_dtype) * beta + product


def _masked_scale(tensor: Tensor, mask: Tensor, scale: float) -> Tensor:
    return tensor * mask.to(tensor.dtype) * scale


def _whole_numbers_in_bins(values: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    """Returns a histogram of integers in integer arithmetic, as on CUDA."""
    values = values.reshape(-1)
    low, high = torch.full((), int(min), dtype=torch.int64), torch.full((), int(max), dtype=torch.int64)
    numbers = values.to(torch.int64)
    if min == max and values.numel():
        low, high = numbers.amin(), numbers.amax()
    is_point = low == high  # a separate range around one number
    low, high = torch.where(is_point, low - 1, low), torch.where(is_point, high + 1, high)
    inside = (numbers >= low) & (numbers <= high)
    positions = torch.div((numbers - low) * bins, high - low, rounding_mode="floor").clamp(0, bins - 1)
    counts = torch.zeros(bins, dtype=torch.int64).index_add(0, positions, inside.to(torch.int64))
    return counts.to(values.dtype)


_OURS: dict[str, Body] = {
    "_thnn_fused_lstm_cell": _lstm_cell,
    "_thnn_fused_lstm_cell_backward_impl": _lstm_cell_backward,
    "_thnn_fused_gru_cell": _gru_cell,
    "_thnn_fused_gru_cell_backward": _gru_cell_backward,
    "_masked_scale": _masked_scale,
    "mm": _wider_product,
    "bmm": _wider_product,
    "addmm": _wider_sum_and_product,
    "baddbmm": _wider_sum_and_product,
}

# A CPU has a kernel for floating-point numbers only.
_OF_INTEGERS: dict[str, Body] = {"histc": _whole_numbers_in_bins}
