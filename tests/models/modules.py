"""Every kind of module that PyTorch has, by its own samples: equal over a mesh and in one process."""

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.utils._pytree import tree_leaves, tree_map

import monarch_nb
from monarch_nb.distributed import Mesh, MeshTensor

_SAMPLES = 4  # of each module


def samples(name: str | None = None) -> Iterator[tuple[str, Any, Any, bool]]:
    """The name of a module, its class, a sample input, and whether it is trained."""
    from torch.testing._internal.common_modules import module_db

    for info in module_db:
        if (name is not None and info.name != name) or issubclass(info.module_cls, LazyModuleMixin):
            continue  # lazy ones have no parameters that could be cut before they have run once
        for training in (True, False):
            torch.manual_seed(1)
            inputs = info.module_inputs_func(
                info, device="cpu", dtype=torch.float32, requires_grad=True, training=training
            )
            for number, sample in enumerate(inputs):
                leaves = tree_leaves((sample.constructor_input.args, sample.constructor_input.kwargs))
                if any(isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float64 for leaf in leaves):
                    continue  # it does not run locally either: the module has another precision than its input
                if number < _SAMPLES or "N" not in sample.desc:
                    yield info.name, info.module_cls, sample, training
                if number >= 2 * _SAMPLES:
                    break


def compare(mesh: Mesh, kind: type[nn.Module], sample: Any, training: bool, spec: str | None) -> str:
    """The difference, or "". Dimension 0 of inputs is cut over a mesh dimension, if one is given."""
    torch.manual_seed(2)
    init = sample.constructor_input
    local = kind(*init.args, **init.kwargs).train(training)
    torch.manual_seed(3)
    expected, gradients = _run(local, *_inputs(sample))
    module = monarch_nb.module_to_mesh(copy.deepcopy(_fresh(kind, init).train(training)), mesh)

    def send(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        own = [spec, *[None] * (value.dim() - 1)] if value.dim() and value.size(0) > 1 else None
        return monarch_nb.distribute(value, mesh, own)

    inputs = tree_map(send, _inputs(sample))
    torch.manual_seed(3)
    outputs, mesh_gradients = _run(module, *inputs)
    try:
        torch.testing.assert_close(outputs, expected, atol=1e-4, rtol=1e-4, equal_nan=True)
        torch.testing.assert_close(mesh_gradients, gradients, atol=1e-3, rtol=1e-3, equal_nan=True)
    except AssertionError as error:
        return str(error)
    return ""


def _inputs(sample: Any) -> Any:
    """Leaves of their own."""

    def copy_of(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return copy.deepcopy(value)
        return value.detach().clone().requires_grad_(value.requires_grad)

    return tree_map(copy_of, (sample.forward_input.args, sample.forward_input.kwargs))


def _fresh(kind: type[nn.Module], init: Any) -> nn.Module:
    torch.manual_seed(2)
    return kind(*init.args, **init.kwargs)


def _run(module: nn.Module, args: Any, kwargs: Any) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """The outputs, and the gradients of inputs and parameters."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outs = [t for t in tree_leaves(module(*args, **kwargs)) if isinstance(t, torch.Tensor)]
        floating = [t for t in outs if t.requires_grad]
        if floating:
            sum(t.square().sum() for t in floating).backward()  # type: ignore[union-attr]
    inputs = {f"input {n}": t for n, t in enumerate(tree_leaves((args, kwargs))) if isinstance(t, torch.Tensor)}
    own = dict(module.named_parameters())
    return [_full(t) for t in outs], {
        name: _full(t.grad) for name, t in {**own, **inputs}.items() if t.is_leaf and t.grad is not None
    }


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, MeshTensor) else tensor).detach()
