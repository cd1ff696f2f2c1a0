"""Kernels for the device of a mesh: factories, conversions between a mesh and local tensors, attention, and operations
that PyTorch would decompose.

`scaled_dot_product_attention` chooses a kernel by the device of its tensors. The device of a mesh has none, so that
PyTorch would decompose attention into plain operations, with a matrix of all words by all words.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeGuard

import torch
from torch._ops import OpOverload
from torch.nn.attention import SDPBackend, sdpa_kernel

from monarch_nb.tensor import device
from monarch_nb.tensor.autocast import register_autocast
from monarch_nb.tensor.commands import RunFunction
from monarch_nb.tensor.errors import RankTensorError
from monarch_nb.tensor.factories import make, refill
from monarch_nb.tensor.handle import OWN, Args, Kwargs, MeshTensor, Own, current, is_leaf, issue, upload
from monarch_nb.tensor.propagation import PropagationError, replicated, user_line
from monarch_nb.tensor.propagation.rules import IS_BEFORE_2_13
from monarch_nb.tensor.ranks.tensor import RankTensor

aten = torch.ops.aten

# Factories that PyTorch would otherwise decompose into `empty` and a write.
_FACTORIES = (
    aten.arange.default,
    aten.arange.start,
    aten.arange.start_step,
    aten.eye.default,
    aten.eye.m,
    aten.full.default,
    aten.linspace.default,
    aten.logspace.default,
    aten.ones.default,
    aten.rand.default,
    aten.randint.default,
    aten.randint.low,
    aten.randn.default,
    aten.randperm.default,
    aten.scalar_tensor.default,
    aten.tril_indices.default,
    aten.triu_indices.default,
    aten.zeros.default,
    *(
        getattr(getattr(aten, f"{kind}_window"), form)
        for kind in ("bartlett", "blackman", "hamming", "hann", "kaiser")
        for form in ("default", "periodic")
    ),
)

# PyTorch decomposes these for devices that have no kernel of their own; CPUs and GPUs have one.
_FUSED = (aten.silu_backward.default, aten.mish_backward.default)

# Data types that have a fused kernel of attention.
_ON_CPU = frozenset({torch.float32, torch.bfloat16, torch.float16, *(() if IS_BEFORE_2_13 else (torch.float64,))})
_ON_CUDA = frozenset({torch.bfloat16, torch.float16})
_DIMENSIONS = len(("batch", "heads", "words", "width"))
_LARGEST_HEAD, _MULTIPLE = 256, 8  # of flash attention on CUDA; aten/native/transformers/cuda/sdp_utils.cpp

_libraries: list[Any] = []  # keep the registrations alive


def prepare() -> None:
    """Prepares this process for its first mesh."""
    # Autograd creates a thread for each mesh at the first backward pass, and none for later meshes.
    torch.autograd.set_multithreading_enabled(False)
    register_kernels()
    register_conversions()


def register_kernels() -> None:
    """Makes factories with `device="mesh"` return replicated tensors on that mesh."""
    if _libraries or not device.claim():
        return
    library: Any = torch.library.Library
    wildcard = library("_", "IMPL")
    wildcard.fallback(_create, "PrivateUse1")
    kernels = library("aten", "IMPL")
    _libraries.extend((wildcard, kernels))
    operation: Any  # its methods have no types
    for operation in _FACTORIES:
        kernels.impl(operation.name(), _kernel(operation), "PrivateUse1")
    for operation in _FUSED:
        kernels.impl(operation.name(), partial(issue, operation), "PrivateUse1")
    kernels.impl("aten::copy_", _copy, "PrivateUse1")
    kernels.impl("aten::scaled_dot_product_attention", attend, "AutogradPrivateUse1")
    kernels.impl("aten::tensor_split.tensor_indices_or_sections", tensor_split, "AutogradPrivateUse1")
    kernels.impl("aten::index_fill.int_Tensor", index_fill, "AutogradPrivateUse1")
    kernels.impl("aten::index_fill_.int_Tensor", index_fill_, "AutogradPrivateUse1")
    register_autocast(wildcard, kernels)


def _kernel(operation: OpOverload) -> Callable[..., MeshTensor]:
    return lambda *args, **kwargs: _create(operation, *args, **kwargs)


def _create(operation: OpOverload, *args: object, **kwargs: Any) -> MeshTensor:
    if operation is aten._efficientzerotensor.default:  # has no memory
        operation = aten.zeros.default
    target = kwargs.get("device")
    stream = device.stream_at(target.index if target is not None else None)
    return make(stream, operation, args, kwargs, replicated(stream.layout))


def _copy(target: MeshTensor, source: torch.Tensor, non_blocking: bool = False) -> MeshTensor:
    """Implements the copy at the end of `torch.tensor(..., device="mesh")`."""
    MeshTensor.__torch_dispatch__(aten.copy_.default, (), (target, source), {})
    return target


def _fetch(tensor: MeshTensor, operation: str) -> torch.Tensor:
    return tensor.reference.stream.fetch(current(tensor), operation)


def _share(func: OpOverload, args: Args, kwargs: Kwargs) -> object:
    """Returns another handle of the same tensor."""
    tensor = args[0]
    if tensor.requires_grad and is_leaf(tensor):
        tensor.reference.stream.held.register_leaf(tensor.reference.number, tensor)
    tensor.reference.stream.handed_out(tensor.reference, func)
    return MeshTensor(tensor.meta, tensor.reference)


def _number(func: OpOverload, args: Args, kwargs: Kwargs) -> object:
    if isinstance(args[0], RankTensor):
        return args[0].full_tensor().item()
    return args[0].reference.stream.number_in(current(args[0]), "item")


def _truth(func: OpOverload, args: Args, kwargs: Kwargs) -> bool:
    if args[0].numel() != 1:
        raise RuntimeError(f"the truth of a tensor of shape {tuple(args[0].shape)} is ambiguous: use .any() or .all()")
    if isinstance(args[0], RankTensor):
        return bool(args[0].full_tensor())
    return bool(args[0].reference.stream.number_in(current(args[0]), "bool"))


def _equal(func: OpOverload, args: Args, kwargs: Kwargs) -> bool:
    first, second = args
    return first.shape == second.shape and bool((first == second).all())


def _close(func: OpOverload, args: Args, kwargs: Kwargs) -> bool:
    return bool(torch.isclose(*args, **kwargs).all())


def _move(func: OpOverload, args: Args, kwargs: Kwargs) -> object:
    """Implements `to`: an operation on the mesh; to another device it fetches the tensor."""
    device = kwargs.get("device")
    tensor = args[0]
    stays = isinstance(tensor, RankTensor) or not isinstance(tensor, MeshTensor)
    if device is None or stays or device.type == tensor.device.type:
        kwargs = {name: value for name, value in kwargs.items() if name not in ("device", "pin_memory")}
        return issue(func, args, kwargs)
    local = _fetch(tensor, "to")
    return func(local, *args[1:], **kwargs)


def _copy_into(func: OpOverload, args: Args, kwargs: Kwargs) -> object:
    """Implements `copy_`, the only operation that accepts local tensors, since it copies explicitly."""
    target, source = args[0], args[1]
    if not isinstance(target, MeshTensor):
        if isinstance(source, RankTensor):
            raise RankTensorError(
                "LOCAL_TENSOR",
                "copy_: the values of the ranks do not go into a local tensor by themselves: target.copy_("
                "monarch.inspect(t, …)) takes those of one rank",
            )
        return target.copy_(_fetch(source, "copy_"))
    stream = target.reference.stream
    if not isinstance(source, MeshTensor):
        source = upload(stream, source, replicated(stream.layout))
    elif _shows_same_elements(target, source):
        return target  # as in PyTorch: nothing is written, so an expanded tensor may be copied onto itself
    elif (
        source.meta.shape
        and not any(source.meta.stride)
        and source.reference.memory is target.reference.memory is not None
    ):
        source = source.clone()  # `t[:] = t[0]`: PyTorch reads one element on a CPU before it writes to all
    stream.held.require_contents((source.reference.number,))
    refill(target)
    return issue(func, (target, source), kwargs)


def _shows_same_elements(first: MeshTensor, second: MeshTensor) -> bool:
    """Returns whether two tensors are the same elements of the same memory, in the same order."""
    a, b = first.reference, second.reference
    shares = a is b or (a.memory is not None and a.memory is b.memory and a.offset == b.offset)
    facts = [
        (tensor.meta.shape, tensor.meta.stride, tensor.meta.dtype, tensor.is_conj(), tensor.is_neg())
        for tensor in (first, second)
    ]
    return shares and facts[0] == facts[1]


def _strided(func: OpOverload, args: Args, kwargs: Kwargs) -> object:
    """Implements `as_strided`, refused where memory on the workers differs from that of the program."""
    tensor = args[0]
    if tensor.reference.is_view and (tensor.meta.copied or not tensor.meta.is_replicated):
        raise PropagationError(
            str(func),
            "it looks at the memory under a view, which is in parts on several processes",
            "Use it on the tensor itself, or on a copy: view.clone()",
            user_line(),
        )
    return issue(func, args, kwargs)


def _with_lengths(func: OpOverload, args: Args, kwargs: Kwargs) -> object:
    """Fetches lengths on which the sizes of results depend."""
    named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    for name in ("input_lengths", "target_lengths"):
        lengths = named[name]
        named[name] = (_fetch(lengths, "ctc_loss") if isinstance(lengths, MeshTensor) else lengths).tolist()
    overload = getattr(torch.ops.aten, func._schema.name.partition("::")[2]).default
    return issue(
        overload,
        tuple(named.pop(argument.name) for argument in overload._schema.arguments if argument.name in named),
        {},
    )


def index_fill(tensor: torch.Tensor, dim: int, index: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Implements `index_fill` of a value that is a tensor by a mask.

    PyTorch's own gradient of the value counts the different indices, which only the workers have.
    """
    return tensor.masked_fill(_index_mask(tensor, dim, index), value)


def index_fill_(tensor: torch.Tensor, dim: int, index: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Implements `index_fill_` in the same way."""
    return tensor.masked_fill_(_index_mask(tensor, dim, index), value)


def _index_mask(tensor: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    """Returns a mask of the indices along a dimension, which broadcasts with the tensor."""
    sizes = list(tensor.shape)
    mask = tensor.new_zeros((sizes[dim] if sizes else 1,), dtype=torch.bool).index_fill(0, index, True)
    return mask.view([-1 if axis == dim % len(sizes) else 1 for axis in range(len(sizes))])


def tensor_split(tensor: torch.Tensor, indices_or_sections: torch.Tensor, dim: int = 0) -> Sequence[torch.Tensor]:
    """Implements `tensor_split` at a tensor of indices; fetches them."""
    indices = indices_or_sections
    return tensor.tensor_split(
        (_fetch(indices, "tensor_split") if isinstance(indices, MeshTensor) else indices).tolist(), dim
    )


def register_conversions() -> None:
    """Registers these implementations with `MeshTensor`."""
    own: dict[OpOverload, Own] = {
        aten.detach.default: _share,
        aten.alias.default: _share,
        aten.lift_fresh.default: _share,
        aten._local_scalar_dense.default: _number,
        aten.is_nonzero.default: _truth,
        aten.equal.default: _equal,
        aten.allclose.default: _close,
        aten._to_copy.default: _move,
        aten.copy_.default: _copy_into,
        aten.as_strided.default: _strided,
        aten._ctc_loss.Tensor: _with_lengths,
        aten._ctc_loss_backward.Tensor: _with_lengths,
    }
    OWN.update(own)


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
