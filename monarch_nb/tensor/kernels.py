"""PyTorch's functions that name the device "mesh", or are called with nothing but numbers there."""

from collections.abc import Callable
from typing import Any

import torch

from monarch_nb.tensor import device
from monarch_nb.tensor.autocast import register_autocast
from monarch_nb.tensor.factories import make
from monarch_nb.tensor.handle import MeshTensor
from monarch_nb.tensor.propagation import replicated

aten = torch.ops.aten

# Those that PyTorch would otherwise take apart into `empty` and a write.
_WHOLE = (
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

_libraries: list[Any] = []  # what is registered with them lasts as long as they do


def register() -> None:
    """Has these functions make sharded tensors: replicated ones, on the mesh that the device means."""
    if _libraries or not device.claim():
        return
    library: Any = torch.library.Library
    every = library("_", "IMPL")
    every.fallback(_made, "PrivateUse1")
    ours = library("aten", "IMPL")
    _libraries.extend((every, ours))
    operation: Any
    for operation in _WHOLE:
        ours.impl(operation.name(), _kernel(operation), "PrivateUse1")
    ours.impl("aten::copy_", _copy, "PrivateUse1")
    register_autocast(every, ours)


def _kernel(operation: Any) -> Callable[..., MeshTensor]:
    return lambda *args, **kwargs: _made(operation, *args, **kwargs)


def _made(operation: Any, *args: Any, **kwargs: Any) -> Any:
    if operation is aten._efficientzerotensor.default:  # one without memory, which nothing else knows
        operation = aten.zeros.default
    wanted = kwargs.get("device")
    stream = device.stream_at(wanted.index if wanted is not None else None)
    return make(stream, operation, args, kwargs, replicated(stream.layout))


def _copy(target: MeshTensor, source: torch.Tensor, non_blocking: bool = False) -> MeshTensor:
    """What `torch.tensor(..., device="mesh")` ends with."""
    MeshTensor.__torch_dispatch__(aten.copy_.default, (), (target, source), {})
    return target
