"""Kernels for the device of a mesh: factories, and operations that PyTorch would decompose."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch._ops import OpOverload

from monarch_nb.tensor import conversions, device
from monarch_nb.tensor.attention import attend
from monarch_nb.tensor.autocast import register_autocast
from monarch_nb.tensor.factories import make
from monarch_nb.tensor.handle import MeshTensor, issue
from monarch_nb.tensor.propagation import replicated

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
)

# PyTorch decomposes these for devices that have no kernel of their own; CPUs and GPUs have one.
_FUSED = (aten.silu_backward.default, aten.mish_backward.default)

_libraries: list[Any] = []  # keep the registrations alive


def prepare() -> None:
    """Prepares this process for its first mesh."""
    # Autograd creates a thread for each mesh at the first backward pass, and none for later meshes.
    torch.autograd.set_multithreading_enabled(False)
    register_kernels()
    conversions.register()


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
    kernels.impl("aten::tensor_split.tensor_indices_or_sections", conversions.tensor_split, "AutogradPrivateUse1")
    kernels.impl("aten::index_fill.int_Tensor", conversions.index_fill, "AutogradPrivateUse1")
    kernels.impl("aten::index_fill_.int_Tensor", conversions.index_fill_, "AutogradPrivateUse1")
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
