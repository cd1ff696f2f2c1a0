"""Results of operations on fake tensors, with fixes where meta functions reject what kernels accept."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._pytree import tree_map_only

from .operation import Operation

__all__ = ["REAL", "imagined", "on_real_tensors", "refuse_one_address"]

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
    one: Tensor, other: Tensor, offs: Tensor | None = None, bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
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
