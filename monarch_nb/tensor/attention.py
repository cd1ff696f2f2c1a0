"""Attention of sharded tensors by a fused kernel, as PyTorch chooses one for tensors of its own devices.

`scaled_dot_product_attention` chooses a kernel by the device of its tensors. The device of a mesh has none, so that
PyTorch would decompose attention into plain operations, with a matrix of all words by all words.
"""

from typing import Any, TypeGuard

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from monarch_nb.tensor.commands import RunFunction
from monarch_nb.tensor.handle import MeshTensor
from monarch_nb.tensor.propagation.rules import IS_BEFORE_2_13

aten = torch.ops.aten
_ON_CPU = frozenset({torch.float32, torch.bfloat16, torch.float16, *(() if IS_BEFORE_2_13 else (torch.float64,))})
_ON_CUDA = frozenset({torch.bfloat16, torch.float16})
_DIMENSIONS = len(("batch", "heads", "words", "width"))
_LARGEST_HEAD, _MULTIPLE = 256, 8  # of flash attention on CUDA; aten/native/transformers/cuda/sdp_utils.cpp


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Implements `scaled_dot_product_attention`: fused where a kernel takes these tensors, else by plain operations."""
    out: torch.Tensor
    if enable_gqa and query.dim() == key.dim() == value.dim() == _DIMENSIONS and _divides(query, key, value):
        key, value = (tensor.repeat_interleave(query.shape[1] // tensor.shape[1], 1) for tensor in (key, value))
        enable_gqa = False
    tensors = (query, key, value)
    if not dropout_p and not enable_gqa and _are_alike(tensors):
        device = tensors[0].meta.layout.device
        if device == "cpu" and query.dtype in _ON_CPU and _fits(attn_mask, query, is_causal):
            flash = aten._scaled_dot_product_flash_attention_for_cpu.default
            out = flash(*tensors, 0.0, is_causal, attn_mask=attn_mask, scale=scale)[0]
            return out
        if device == "cuda" and query.dtype in _ON_CUDA and attn_mask is None and _has_flash_width(query.shape[-1]):
            kernel = _kernel_of_ranks(*tensors[:2], is_causal, scale)
            if kernel == SDPBackend.CUDNN_ATTENTION.value:
                cudnn = aten._scaled_dot_product_cudnn_attention.default
                out = cudnn(*tensors, None, True, 0.0, is_causal, False, scale=scale)[0]
                return out
            if kernel == SDPBackend.FLASH_ATTENTION.value:
                out = aten._scaled_dot_product_flash_attention.default(*tensors, 0.0, is_causal, False, scale=scale)[0]
                return out
    return _decompose(*tensors, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def _kernel_of_ranks(query: MeshTensor, key: MeshTensor, is_causal: bool, scale: float | None) -> int:
    """Returns the SDPBackend number of the kernel that PyTorch chooses on the ranks. Blocks, once for each kind."""
    stream = query.reference.stream
    flags: Any = torch.backends.cuda  # without types
    enabled = {
        SDPBackend.CUDNN_ATTENTION: flags.cudnn_sdp_enabled(),
        SDPBackend.FLASH_ATTENTION: flags.flash_sdp_enabled(),
        SDPBackend.MATH: True,
    }
    shape = (query.dtype, query.shape[2], key.shape[2], query.shape[3])
    arguments = (*shape, is_causal, scale, tuple(kernel.value for kernel, is_enabled in enabled.items() if is_enabled))
    if arguments not in stream.kernels:
        choices = set(stream.run_everywhere(RunFunction(_kernel_of_process, arguments, {})).values())
        stream.kernels[arguments] = choices.pop() if len(choices) == 1 else SDPBackend.MATH.value
    return int(stream.kernels[arguments])


def _kernel_of_process(
    dtype: torch.dtype,
    queries: int,
    keys: int,
    width: int,
    is_causal: bool,
    scale: float | None,
    enabled: tuple[int, ...],
) -> int:
    """Returns which of these kernels PyTorch chooses on the GPU of this process."""
    query = torch.empty(1, 1, queries, width, dtype=dtype, device="cuda", requires_grad=True)
    key = torch.empty(1, 1, keys, width, dtype=dtype, device="cuda", requires_grad=True)
    kernels = [kernel for kernel in SDPBackend.__members__.values() if kernel.value in enabled]
    with torch.enable_grad(), sdpa_kernel(kernels):
        return int(torch._fused_sdp_choice(query, key, key, None, 0.0, is_causal, scale=scale, enable_gqa=False))


def _divides(query: torch.Tensor, *tensors: torch.Tensor) -> bool:
    """Returns whether each head of these tensors serves as many heads of the query."""
    return all(tensor.shape[1] and query.shape[1] % tensor.shape[1] == 0 for tensor in tensors)


def _has_flash_width(width: int) -> bool:
    return width <= _LARGEST_HEAD and not width % _MULTIPLE


def _decompose(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    is_causal: bool,
    scale: float | None,
    grouped: bool,
) -> torch.Tensor:
    operation = aten.scaled_dot_product_attention.default
    result: torch.Tensor = operation.decompose(
        query, key, value, mask, dropout, is_causal, scale=scale, enable_gqa=grouped
    )
    return result


def _are_alike(tensors: tuple[torch.Tensor, ...]) -> TypeGuard[tuple[MeshTensor, MeshTensor, MeshTensor]]:
    """Returns whether these are non-empty 4D handles of one dtype, with equal numbers and widths of heads.

    The last dimension is contiguous; aten/native/transformers/sdp_utils_cpp.h.
    """
    first = tensors[0]
    return (
        all(
            isinstance(tensor, MeshTensor)
            and tensor.dim() == first.dim() == _DIMENSIONS
            and tensor.dtype == first.dtype
            and tensor.shape[:2] == first.shape[:2]
            and tensor.shape[3] == first.shape[3]
            and 0 not in tensor.shape
            and tensor.stride(3) == 1
            for tensor in tensors
        )
        and tensors[1].shape == tensors[2].shape
    )


def _fits(mask: torch.Tensor | None, query: torch.Tensor, is_causal: bool) -> bool:
    """Returns whether a kernel takes this mask: of the dtype of the tensors, without a gradient, and the only one."""
    if mask is None:
        return True
    kind = isinstance(mask, MeshTensor) and mask.dtype == query.dtype and not mask.requires_grad
    return kind and mask.dim() in (2, 4) and not is_causal
