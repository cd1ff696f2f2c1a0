"""Every kind of module that PyTorch has, by its own samples: over a mesh what it is in one process."""

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
                held = tree_leaves((sample.constructor_input.args, sample.constructor_input.kwargs))
                if any(isinstance(one, torch.Tensor) and one.dtype == torch.float64 for one in held):
                    continue  # it does not run locally either: the module has another precision than its input
                if number < _SAMPLES or "N" not in sample.desc:
                    yield info.name, info.module_cls, sample, training
                if number >= 2 * _SAMPLES:
                    break


def compared(mesh: Mesh, kind: type[nn.Module], sample: Any, training: bool, spec: str | None) -> str:
    """What differs, or "". Dimension 0 of what goes in is cut over a mesh dimension, where one is given."""
    torch.manual_seed(2)
    made = sample.constructor_input
    local = kind(*made.args, **made.kwargs).train(training)
    torch.manual_seed(3)
    wanted, gradients = _ran(local, *_inputs(sample))
    module = monarch_nb.module_to_mesh(copy.deepcopy(_fresh(kind, made).train(training)), mesh)

    def sent(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        own = [spec, *[None] * (value.dim() - 1)] if value.dim() and value.size(0) > 1 else None
        return monarch_nb.distribute(value, mesh, own)

    inputs = tree_map(sent, _inputs(sample))
    torch.manual_seed(3)
    found, others = _ran(module, *inputs)
    try:
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4, equal_nan=True)
        torch.testing.assert_close(others, gradients, atol=1e-3, rtol=1e-3, equal_nan=True)
    except AssertionError as error:
        return str(error)
    return ""


def _inputs(sample: Any) -> Any:
    """Leaves of their own."""

    def copied(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return copy.deepcopy(value)
        return value.detach().clone().requires_grad_(value.requires_grad)

    return tree_map(copied, (sample.forward_input.args, sample.forward_input.kwargs))


def _fresh(kind: type[nn.Module], made: Any) -> nn.Module:
    torch.manual_seed(2)
    return kind(*made.args, **made.kwargs)


def _ran(module: nn.Module, args: Any, kwargs: Any) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """What comes out, and the gradients of what goes in."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outs = [one for one in tree_leaves(module(*args, **kwargs)) if isinstance(one, torch.Tensor)]
        floating = [one for one in outs if one.requires_grad]
        if floating:
            sum(one.square().sum() for one in floating).backward()  # type: ignore[union-attr]
    given = {f"input {at}": one for at, one in enumerate(tree_leaves((args, kwargs))) if isinstance(one, torch.Tensor)}
    own = dict(module.named_parameters())
    return [_whole(one) for one in outs], {
        name: _whole(one.grad) for name, one in {**own, **given}.items() if one.is_leaf and one.grad is not None
    }


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, MeshTensor) else tensor).detach()
