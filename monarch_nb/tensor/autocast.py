"""`with torch.autocast("mesh", torch.bfloat16)`: the operations that run in lower precision or never do."""

from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_map

aten = torch.ops.aten
_KEY = "AutocastPrivateUse1"

# As for PyTorch's own accelerators (ATen/autocast_mode.h): products in the lower precision …
LOWER = [
    "_convolution",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_tbc",
    "conv_transpose1d",
    "conv_transpose2d.input",
    "conv_transpose3d.input",
    "convolution",
    "prelu",
    "addmm",
    "addmv",
    "addr",
    "matmul",
    "mm",
    "mv",
    "linalg_vecdot",
    "linear",
    "addbmm",
    "baddbmm",
    "bmm",
    "chain_matmul",
    "linalg_multi_dot",
    "scaled_dot_product_attention",
]
# … sums and functions that grow fast in float32 …
FLOAT32 = [
    "acos",
    "asin",
    "cosh",
    "erfinv",
    "exp",
    "expm1",
    "log",
    "log10",
    "log2",
    "log1p",
    "reciprocal",
    "rsqrt",
    "sinh",
    "tan",
    "pow.Tensor_Scalar",
    "pow.Tensor_Tensor",
    "pow.Scalar",
    "softplus",
    "layer_norm",
    "native_layer_norm",
    "rms_norm",
    "group_norm",
    "cosine_similarity",
    "poisson_nll_loss",
    "cosine_embedding_loss",
    "nll_loss",
    "nll_loss2d",
    "hinge_embedding_loss",
    "kl_div",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "mse_loss",
    "margin_ranking_loss",
    "multilabel_margin_loss",
    "soft_margin_loss",
    "triplet_margin_loss",
    "multi_margin_loss",
    "binary_cross_entropy_with_logits",
    "dist",
    "pdist",
    "cdist",
    "renorm",
    "logsumexp",
    "prod",
    "prod.dim_int",
    "softmax.int",
    "log_softmax.int",
    "cumprod",
    "cumsum",
    "linalg_vector_norm",
    "linalg_matrix_norm",
    "linalg_matrix_norm.str_ord",
    "sum",
    "sum.dim_IntList",
    "norm.Scalar",
    "norm.ScalarOpt_dim",
    "cross_entropy_loss",
]
# … and operations on several types in the widest of them.
WIDEST = [
    "addcdiv",
    "addcmul",
    "atan2",
    "bilinear",
    "cross",
    "dot",
    "vdot",
    "grid_sampler",
    "index_put",
    "tensordot",
    "scatter_add",
    "cat",
    "stack",
]


def register_autocast(wildcard: Any, kernels: Any) -> None:
    """Registers the casts for the device."""
    wildcard.fallback(torch.library.fallthrough_kernel, _KEY)
    for names, kind in ((LOWER, _lower), (FLOAT32, _float32), (WIDEST, _widest)):
        for name in names:
            base, _, overload = name.partition(".")
            operation = getattr(getattr(aten, base), overload or "default")
            kernels.impl(operation.name(), _casting(operation, kind), _KEY)


def _lower(args: object) -> torch.dtype:
    return torch.get_autocast_dtype(torch._C._get_privateuse1_backend_name())


def _float32(args: object) -> torch.dtype:
    return torch.float32


def _widest(args: object) -> torch.dtype:
    widest = _lower(args)
    dtypes: list[torch.dtype] = []
    tree_map(lambda value: dtypes.append(value.dtype) if _casts(value) else None, args)
    for dtype in dtypes:
        widest = torch.promote_types(widest, dtype)
    return widest


def _casts(value: object) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype is not torch.float64


def _casting(operation: OpOverload, kind: Callable[[object], torch.dtype]) -> Callable[..., object]:
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _KEY))

    def run(*args: object, **kwargs: object) -> object:
        with torch._C._ExcludeDispatchKeyGuard(keys):
            dtype = kind((args, kwargs))

            def cast(value: object) -> object:
                return value.to(dtype) if _casts(value) and value.device.type != "cpu" else value

            args, kwargs = tree_map(cast, (args, kwargs))
            return operation(*args, **kwargs)

    return run
