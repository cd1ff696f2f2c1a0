"""Drafts of operations that run on shards after redistributing the inputs, and their trial on fake tensors.

Meta functions that reject arguments which kernels accept are replaced.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._pytree import tree_map_only

from monarch_nb.tensor.placement.placement import cut

from .draft import Draft
from .execute import flat
from .meta import Meta, Placements
from .operation import Leaf, Operation
from .world import World

# Kernels that end the process if a tensor has no elements.
_FATAL = frozenset(
    {"_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward"}
)
_RESHAPES = frozenset({"view", "_unsafe_view", "_reshape_alias", "reshape"})
_MAX_ELEMENTS = 1 << 22  # elements whose order is compared
Tensor = torch.Tensor
_ALIGNED = 16  # bytes
_ONE_ADDRESS = "single memory location"
REAL = 1 << 24  # elements at most of real tensors on which a kernel is tried
_MEAN, _SUM = 1, 2  # how losses are reduced
# Their meta functions divide by the number of elements, in Python, even if it is 0, unlike kernels.
_DIVIDED = frozenset({"mse_loss_backward", "smooth_l1_loss_backward", "huber_loss_backward"})


def imagined(operation: Operation, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
    """Runs the operation on fake tensors. Raises its errors."""
    if operation.packet in _DIVIDED:
        args = _with_sum_reduction(args)
    call: Callable[..., object] = _OURS.get(operation.packet) or operation.func
    return call(*args, **kwargs)


def on_real_tensors(operation: Operation, tensors: Sequence[Tensor]) -> object:
    """Runs the operation on zeros of these shapes, since kernels reject more than fake tensors. Raises its errors.

    No random numbers of the program are drawn.
    """
    with unset_fake_temporarily(), torch.random.fork_rng(devices=[], enabled=operation.random):
        real = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cpu").zero_() for t in tensors]
        cpu = torch.device("cpu")
        args, kwargs = tree_map_only(torch.device, lambda _: cpu, operation.filled(real.__getitem__))
        return operation.func(*args, **kwargs)


def refuse_one_address(operation: Operation, tensors: Sequence[Tensor]) -> None:
    """Raises the kernels' error for a write to a tensor with several elements at one address.

    A few operations accept such tensors, since they write the same value to each element.
    """
    for register in operation.writes:
        steps = zip(tensors[register].shape, tensors[register].stride(), strict=True)
        if tensors[register].numel() and any(step == 0 and size > 1 for size, step in steps):
            break
    else:
        return
    if sum(tensor.numel() for tensor in tensors) > REAL:
        return  # the ranks will raise it
    try:
        on_real_tensors(operation, tensors)
    except RuntimeError as error:
        if _ONE_ADDRESS in str(error):
            raise


def _with_sum_reduction(args: Sequence[object]) -> Sequence[object]:
    """Returns arguments of a loss gradient with a sum in place of a mean, which has the same shape."""
    _, predictions, _, reduction, *options = args
    if reduction == _MEAN and isinstance(predictions, Tensor) and not predictions.numel():
        return (*args[:3], _SUM, *options)
    return args


def _grouped_mm(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Meta function, since PyTorch's supports bfloat16 only."""
    if a.dtype not in (torch.float32, torch.bfloat16, torch.float16) or a.dtype != b.dtype:
        raise RuntimeError(f"grouped_mm is for float32, bfloat16 or float16, not {a.dtype} and {b.dtype}")
    if a.dim() not in (2, 3) or b.dim() not in (2, 3) or bias is not None:
        raise RuntimeError("grouped_mm is for matrices of two or three dimensions, without a bias")
    flat = a.dim() == 2 or b.dim() == 2
    if flat != (offs is not None):
        raise RuntimeError("grouped_mm takes offsets where one of the matrices has two dimensions, and only then")
    if not (a.dim() == b.dim() == 2) and a.size(-1) != b.size(-2):
        raise RuntimeError(f"grouped_mm: {tuple(a.shape)} and {tuple(b.shape)} have no product")
    groups = {matrix.size(0) for matrix in (a, b) if matrix.dim() == 3} | (
        {offs.size(0)} if offs is not None else set()
    )
    if len(groups) != 1:
        raise RuntimeError("grouped_mm: the numbers of groups differ")
    for matrix in (a, b):
        inner = min(matrix.stride(-1), matrix.stride(-2))
        if inner != 1 or max(matrix.stride(-1), matrix.stride(-2)) * matrix.element_size() % _ALIGNED:
            raise RuntimeError("grouped_mm: strides should be multiples of 16 bytes")
    rows, columns = a.size(-2), b.size(-1)
    row_stride = -(-columns * a.element_size() // _ALIGNED) * _ALIGNED // a.element_size()
    if a.dim() == b.dim():
        return a.new_empty_strided(
            (groups.pop(), rows, columns), (rows * row_stride, row_stride, 1), dtype=out_dtype or a.dtype
        )
    return a.new_empty_strided((rows, columns), (row_stride, 1), dtype=out_dtype or a.dtype)


def _ctc_loss(
    log_probs: Tensor, targets: Tensor, input_lengths: Sequence[int], target_lengths: Sequence[int], *options: object
) -> tuple[Tensor, Tensor]:
    """Meta function, which PyTorch lacks, for lengths given as numbers."""
    longest, batch, _ = log_probs.shape
    if len(input_lengths) != batch or len(target_lengths) != batch:
        raise RuntimeError(
            f"ctc_loss: lengths of {len(input_lengths)} inputs and {len(target_lengths)} targets for {batch}"
        )
    return log_probs.new_empty(batch), log_probs.new_empty(batch, longest, 2 * max(target_lengths, default=0) + 1)


_OURS: dict[str, Callable[..., object]] = {"_grouped_mm": _grouped_mm, "_ctc_loss": _ctc_loss}


class Unfit(Exception):
    """Running the operation on shards would be wrong. The text has the reason."""


@dataclass(frozen=True)
class Lowering:
    """A way to run an operation: placements of inputs and results, and the operation on shards."""

    operation: Operation
    inputs: tuple[Placements, ...]
    outputs: tuple[Placements | None, ...]


def lowered(lowering: Lowering, leaves: Sequence[Leaf], worlds: Sequence[World]) -> tuple[Draft, list[int | None]]:
    """Drafts a way to run an operation; returns the registers of the leaves. Raises Unfit if shards do not fit.

    Each world is the view of another rank, since an operation may fail only on the last rank, whose shard is smaller.
    """
    operation, draft = lowering.operation, Draft(worlds[0], lowering.operation.metas)
    moved = [draft.redistribute(register, placements) for register, placements in enumerate(lowering.inputs)]
    for register in operation.writes:
        if moved[register] != register:
            raise Unfit("a tensor that changes in place would have to be placed otherwise")
    metas = [
        None if leaf is None else _meta(operation, leaf, placements, moved, worlds[0])
        for leaf, placements in zip(leaves, lowering.outputs, strict=True)
    ]
    if operation.packet in _RESHAPES and metas[0] is not None:
        _check_order(draft.metas[moved[0]], metas[0])
    is_uneven = any(meta.is_uneven for meta in (*draft.metas, *filter(None, metas)))
    for world in worlds if is_uneven else worlds[:1]:  # else all shards are of one size
        _check_on_shards(operation, [draft.metas[register] for register in moved], leaves, metas, world)
    return draft, draft.local(operation, moved, metas)


def _meta(
    operation: Operation,
    leaf: tuple[torch.Tensor, tuple[int, ...]],
    placements: Placements | None,
    moved: list[int],
    world: World,
) -> Meta:
    plain, bases = leaf
    if placements is None:
        raise Unfit("it says nothing of the placement of a result")
    return Meta.of(
        world.layout,
        tuple(plain.shape),
        plain.dtype,
        placements,
        stride=plain.stride(),
        copied=any(moved[base] != base or operation.metas[base].copied for base in bases),
    )


def _check_on_shards(
    operation: Operation, inputs: list[Meta], leaves: Sequence[Leaf], metas: Sequence[Meta | None], world: World
) -> None:
    """Checks the operation on fake shards: it must succeed, with results of the expected local shapes."""
    fresh = bool(operation.writes)
    shards = [world.fake(meta, fresh=fresh)._local_tensor for meta in inputs]
    args, kwargs = operation.filled(shards.__getitem__)
    try:
        result = imagined(operation, args, kwargs)
    except Exception as error:
        raise Unfit(reason(error)) from error
    if any(not shard.numel() and math.prod(meta.shape) for shard, meta in zip(shards, inputs, strict=True)):
        _run_empty_shard(operation, shards, result)
    results = flat(result)
    if len(results) != len(leaves):
        raise Unfit("it returns another number of tensors on shards")
    for leaf, shard, meta in zip(leaves, results, metas, strict=True):
        if leaf is None or meta is None:
            continue
        if not isinstance(shard, torch.Tensor) or shard.dtype != meta.dtype:
            raise Unfit("it returns something else on shards")
        if tuple(shard.shape) != world.local_shape(meta):
            raise Unfit(f"a shard of its result would have the shape {tuple(shard.shape)}, which does not fit")
        if leaf[1] and not meta.copied and not any(_share_storage(shard, shards[base]) for base in leaf[1]):
            raise Unfit("it copies on shards what is a view of the whole")


def _check_order(source: Meta, result: Meta) -> None:
    """Raises Unfit if a rank would have other elements, or another order, in another shape of the tensor.

    Rules that cut a dimension into parts, one of each for a rank, are wrong if such a part is no whole row of the new
    shape (torch 2.13, `_ViewShardingPropagator`).
    """
    if not any(getattr(placement, "split_factor", 1) > 1 for placement in (*source.placements, *result.placements)):
        return
    inner = 0  # last dimensions of both shapes that are uncut
    cuts = [{getattr(placement, "dim", None) for placement in meta.placements} for meta in (source, result)]
    while inner < min(len(source.shape), len(result.shape)) and not (
        source.shape[-1 - inner] != result.shape[-1 - inner]
        or len(source.shape) - 1 - inner in cuts[0]
        or len(result.shape) - 1 - inner in cuts[1]
    ):
        inner += 1
    shapes = [meta.shape[: len(meta.shape) - inner] for meta in (source, result)]
    if math.prod(shapes[0]) > _MAX_ELEMENTS:
        raise Unfit("it is too large for a check of its ranks' elements")
    cutting = [
        any(getattr(meta.placements[dim], "dim", None) is not None for meta in (source, result))
        for dim in range(len(source.layout.shape))
    ]
    ranges = [range(size) if is_cut else range(1) for size, is_cut in zip(source.layout.shape, cutting, strict=True)]
    with unset_fake_temporarily():
        for coordinate in itertools.product(*ranges):
            first, second = (
                _elements(meta, shape, coordinate) for meta, shape in zip((source, result), shapes, strict=True)
            )
            if not torch.equal(first, second):
                raise Unfit("a rank would have other elements in that shape")


def _elements(meta: Meta, shape: Sequence[int], coordinate: Sequence[int]) -> torch.Tensor:
    """Returns the numbers of a rank's elements, in order, of a tensor of that shape, cut as in `meta`."""
    numbers = torch.arange(math.prod(shape), device="cpu").view(tuple(shape))
    for pieces, position, placement in zip(meta.layout.shape, coordinate, meta.placements, strict=True):
        dim = getattr(placement, "dim", None)
        if dim is not None:
            spans = cut(((0, numbers.shape[dim]),), pieces, position, getattr(placement, "split_factor", 1))
            indices = [torch.arange(start, stop, device="cpu") for start, stop in spans or ((0, 0),)]
            numbers = numbers.index_select(dim, torch.cat(indices))
    return numbers.flatten()


def _run_empty_shard(operation: Operation, shards: Sequence[torch.Tensor], results: object) -> None:
    """Runs the operation on real tensors for a rank with an empty shard, and compares with `results` on fake ones.

    Kernels may reject it (the minimum of no numbers has no value), or return early, with another shape or dtype.
    """
    if operation.packet in _FATAL or sum(shard.numel() for shard in shards) > REAL:
        raise Unfit("a rank has nothing of it")
    try:
        real = on_real_tensors(operation, shards)
    except Exception as error:
        raise Unfit(f"a rank has nothing of it: {reason(error)}") from error
    kinds = [[(t.shape, t.dtype) for t in flat(tree) if isinstance(t, Tensor)] for tree in (real, results)]
    if kinds[0] != kinds[1]:
        raise Unfit("a rank has nothing of it, and its kernel then returns tensors of another shape or dtype")


def _share_storage(first: torch.Tensor, second: torch.Tensor) -> bool:
    return bool(first.untyped_storage()._cdata == second.untyped_storage()._cdata)


def reason(error: Exception) -> str:
    """Returns an error in one line."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
