"""Drafts operations that run on shards after redistributing the inputs, and tries them on fake tensors.

Where meta functions reject what kernels accept, there are own ones.
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
from .meta import Meta, Placements
from .operation import Leaf, Operation
from .world import World

# Kernels that end the process where a tensor has no elements.
_FATAL = frozenset(
    {"_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward"}
)
_RESHAPES = frozenset({"view", "_unsafe_view", "_reshape_alias", "reshape"})
_MOST = 1 << 22  # elements whose order is compared
Tensor = torch.Tensor
_ALIGNED = 16  # bytes
_ONE_ADDRESS = "single memory location"
REAL = 1 << 24  # limit of elements of real tensors on which a kernel is tried
_MEAN, _SUM = 1, 2  # how losses are reduced
# Their meta functions divide by the number of elements, in Python, where kernels divide no element by it.
_DIVIDED = frozenset({"mse_loss_backward", "smooth_l1_loss_backward", "huber_loss_backward"})


def imagined(operation: Operation, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
    """Runs the operation on fake tensors. Raises what it raises."""
    if operation.packet in _DIVIDED:
        args = _as_of_a_sum(args)
    call: Callable[..., object] = _OURS.get(operation.packet) or operation.func
    return call(*args, **kwargs)


def on_real_tensors(operation: Operation, tensors: Sequence[Tensor]) -> None:
    """Runs the operation on zeros in tensors like these: imagined ones let more pass than kernels. Raises what it does.

    No random numbers of the program are drawn for it.
    """
    with unset_fake_temporarily(), torch.random.fork_rng(devices=[], enabled=operation.random):
        real = [torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device="cpu").zero_() for one in tensors]
        cpu = torch.device("cpu")
        args, kwargs = tree_map_only(torch.device, lambda _: cpu, operation.filled(real.__getitem__))
        operation.func(*args, **kwargs)


def refuse_one_address(operation: Operation, tensors: Sequence[Tensor]) -> None:
    """Raises what kernels raise for a write to a tensor of which several elements lie at one address.

    A few operations take such tensors, by each element of which they write the same.
    """
    for at in operation.writes:
        steps = zip(tensors[at].shape, tensors[at].stride(), strict=True)
        if tensors[at].numel() and any(step == 0 and size > 1 for size, step in steps):
            break
    else:
        return
    if sum(one.numel() for one in tensors) > REAL:
        return  # ranks raise it, then
    try:
        on_real_tensors(operation, tensors)
    except RuntimeError as error:
        if _ONE_ADDRESS in str(error):
            raise


def _as_of_a_sum(args: Sequence[object]) -> Sequence[object]:
    """Arguments of a loss gradient with a sum in place of a mean, which has the same shape."""
    _, given, _, reduction, *others = args
    if reduction == _MEAN and isinstance(given, Tensor) and not given.numel():
        return (*args[:3], _SUM, *others)
    return args


def _grouped_mm(
    one: Tensor,
    other: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Meta function, since PyTorch's supports bfloat16 only."""
    if one.dtype not in (torch.float32, torch.bfloat16, torch.float16) or one.dtype != other.dtype:
        raise RuntimeError(f"grouped_mm is for float32, bfloat16 or float16, not {one.dtype} and {other.dtype}")
    if one.dim() not in (2, 3) or other.dim() not in (2, 3) or bias is not None:
        raise RuntimeError("grouped_mm is for matrices of two or three dimensions, without a bias")
    flat = one.dim() == 2 or other.dim() == 2
    if flat != (offs is not None):
        raise RuntimeError("grouped_mm takes offsets where one of the matrices has two dimensions, and only then")
    if not (one.dim() == other.dim() == 2) and one.size(-1) != other.size(-2):
        raise RuntimeError(f"grouped_mm: {tuple(one.shape)} and {tuple(other.shape)} have no product")
    groups = {each.size(0) for each in (one, other) if each.dim() == 3} | (
        {offs.size(0)} if offs is not None else set()
    )
    if len(groups) != 1:
        raise RuntimeError("grouped_mm: the numbers of groups differ")
    for each in (one, other):
        inner = min(each.stride(-1), each.stride(-2))
        if inner != 1 or max(each.stride(-1), each.stride(-2)) * each.element_size() % _ALIGNED:
            raise RuntimeError("grouped_mm: strides should be multiples of 16 bytes")
    rows, columns = one.size(-2), other.size(-1)
    each_row = -(-columns * one.element_size() // _ALIGNED) * _ALIGNED // one.element_size()
    if one.dim() == other.dim():
        return one.new_empty_strided(
            (groups.pop(), rows, columns), (rows * each_row, each_row, 1), dtype=out_dtype or one.dtype
        )
    return one.new_empty_strided((rows, columns), (each_row, 1), dtype=out_dtype or one.dtype)


def _ctc_loss(
    log_probs: Tensor, targets: Tensor, input_lengths: Sequence[int], target_lengths: Sequence[int], *others: object
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
    """Running the operation on shards would be wrong. The text says why."""


@dataclass(frozen=True)
class Lowering:
    """A way to run an operation: placements of inputs and results, and the operation on shards."""

    operation: Operation
    inputs: tuple[Placements, ...]
    outputs: tuple[Placements | None, ...]


def lowered(way: Lowering, leaves: Sequence[Leaf], worlds: Sequence[World]) -> tuple[Draft, list[int | None]]:
    """Drafts a way to run an operation; returns the registers of the leaves. Raises Unfit if shards do not fit.

    Each world is the view of another rank, since an operation may fail only on the last rank, whose shard is smaller.
    """
    operation, draft = way.operation, Draft(worlds[0], way.operation.metas)
    moved = [draft.redistribute(at, placements) for at, placements in enumerate(way.inputs)]
    for register in operation.writes:
        if moved[register] != register:
            raise Unfit("a tensor that changes in place would have to be placed otherwise")
    metas = [
        None if leaf is None else _meta(operation, leaf, placements, moved, worlds[0])
        for leaf, placements in zip(leaves, way.outputs, strict=True)
    ]
    if operation.packet in _RESHAPES and metas[0] is not None:
        _check_order(draft.metas[moved[0]], metas[0])
    differ = any(meta.is_uneven for meta in (*draft.metas, *filter(None, metas)))
    for world in worlds if differ else worlds[:1]:  # else all ranks have shards of one size
        _tried(operation, [draft.metas[at] for at in moved], leaves, metas, world)
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


def _tried(
    operation: Operation, given: list[Meta], leaves: Sequence[Leaf], metas: Sequence[Meta | None], world: World
) -> None:
    """Checks the operation on fake shards: it must succeed, with results of the expected local shapes."""
    fresh = bool(operation.writes)
    shards = [world.fake(meta, fresh=fresh)._local_tensor for meta in given]
    args, kwargs = operation.filled(shards.__getitem__)
    try:
        result = imagined(operation, args, kwargs)
    except Exception as error:
        raise Unfit(reason(error)) from error
    if any(not shard.numel() and math.prod(meta.shape) for shard, meta in zip(shards, given, strict=True)):
        _run_without(operation, shards)
    found = flat(result)
    if len(found) != len(leaves):
        raise Unfit("it returns another number of tensors on shards")
    for leaf, shard, meta in zip(leaves, found, metas, strict=True):
        if leaf is None or meta is None:
            continue
        if not isinstance(shard, torch.Tensor) or shard.dtype != meta.dtype:
            raise Unfit("it returns something else on shards")
        if tuple(shard.shape) != world.local_shape(meta):
            raise Unfit(f"a shard of its result would have the shape {tuple(shard.shape)}, which does not fit")
        if leaf[1] and not meta.copied and not any(_share(shard, shards[base]) for base in leaf[1]):
            raise Unfit("it copies on shards what is a view of the whole")


def _check_order(given: Meta, result: Meta) -> None:
    """Raises Unfit if a rank's elements, in their order, would be others in another shape of the tensor.

    Rules that cut a dimension in parts, one of each for a rank, are wrong where such a part is no whole row of the new
    shape (torch 2.13, `_ViewShardingPropagator`).
    """
    if not any(getattr(placement, "split_factor", 1) > 1 for placement in (*given.placements, *result.placements)):
        return
    inner = 0  # dimensions that are last in both shapes, and uncut
    cuts = [{getattr(placement, "dim", None) for placement in meta.placements} for meta in (given, result)]
    while inner < min(len(given.shape), len(result.shape)) and not (
        given.shape[-1 - inner] != result.shape[-1 - inner]
        or len(given.shape) - 1 - inner in cuts[0]
        or len(result.shape) - 1 - inner in cuts[1]
    ):
        inner += 1
    shapes = [meta.shape[: len(meta.shape) - inner] for meta in (given, result)]
    if math.prod(shapes[0]) > _MOST:
        raise Unfit("it is too large for a look at which elements its ranks would have")
    cutting = [
        any(getattr(meta.placements[at], "dim", None) is not None for meta in (given, result))
        for at in range(len(given.layout.shape))
    ]
    ranges = [range(size) if cuts_it else range(1) for size, cuts_it in zip(given.layout.shape, cutting, strict=True)]
    with unset_fake_temporarily():
        for coordinate in itertools.product(*ranges):
            first, second = (
                _elements(meta, shape, coordinate) for meta, shape in zip((given, result), shapes, strict=True)
            )
            if not torch.equal(first, second):
                raise Unfit("a rank would have other elements in that shape")


def _elements(meta: Meta, shape: Sequence[int], coordinate: Sequence[int]) -> torch.Tensor:
    """The numbers of the elements that a rank has, in order, of a tensor of that shape, cut as `meta` says."""
    numbers = torch.arange(math.prod(shape), device="cpu").view(tuple(shape))
    for pieces, at, placement in zip(meta.layout.shape, coordinate, meta.placements, strict=True):
        dim = getattr(placement, "dim", None)
        if dim is not None:
            spans = cut(((0, numbers.shape[dim]),), pieces, at, getattr(placement, "split_factor", 1))
            taken = [torch.arange(start, stop, device="cpu") for start, stop in spans or ((0, 0),)]
            numbers = numbers.index_select(dim, torch.cat(taken))
    return numbers.flatten()


def _run_without(operation: Operation, shards: Sequence[torch.Tensor]) -> None:
    """Runs the operation on real tensors for a rank with an empty shard, which kernels reject more often than fakes.

    The minimum of no numbers, for example, has a shape but no value.
    """
    if operation.packet in _FATAL or sum(shard.numel() for shard in shards) > REAL:
        raise Unfit("a rank has nothing of it")
    try:
        on_real_tensors(operation, shards)
    except Exception as error:
        raise Unfit(f"a rank has nothing of it: {reason(error)}") from error


def _share(first: torch.Tensor, second: torch.Tensor) -> bool:
    return bool(first.untyped_storage()._cdata == second.untyped_storage()._cdata)


def flat(result: object) -> list[object]:
    """The leaves of what an operation returns."""
    if isinstance(result, list | tuple):
        return [leaf for item in result for leaf in flat(item)]
    return [result]


def reason(error: Exception) -> str:
    """An error in one line."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
