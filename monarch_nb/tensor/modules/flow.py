"""What goes through a module on a mesh: hooks place its inputs and its outputs."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement
from torch.utils.hooks import RemovableHandle

from monarch_nb.tensor.handle import MeshTensor
from monarch_nb.tensor.mesh import Mesh
from monarch_nb.tensor.modules.styles import Style
from monarch_nb.tensor.propagation import Placements


def place_flow(module: nn.Module, style: Style, dim: int) -> list[RemovableHandle]:
    """Has what goes into the module, and what comes out, placed along a mesh dimension as its style says."""
    hooks = []
    if any(style.inputs) or any(style.keywords.values()):

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            placed = {name: _placed(value, style.keywords.get(name), dim) for name, value in kwargs.items()}
            return _each(args, style.inputs, dim), placed

        hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))
    if any(style.outputs):

        def after(module: nn.Module, args: Any, result: Any) -> Any:
            if isinstance(result, tuple):
                return _each(result, style.outputs, dim)
            return _placed(result, style.outputs[0], dim)

        hooks.append(module.register_forward_hook(after))
    return hooks


def take_local(module: nn.Module, mesh: Mesh, batch: Placements) -> RemovableHandle:
    """Has the module take local tensors: they are cut along their first dimension, as batches are."""

    def sent(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or isinstance(value, MeshTensor) or not value.dim():
            return value
        return mesh.distribute(value, batch)

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return tuple(map(sent, args)), {name: sent(value) for name, value in kwargs.items()}

    return module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)


def _each(values: tuple[Any, ...], wanted: Sequence[Placement | None], dim: int) -> tuple[Any, ...]:
    rest = len(values) - len(wanted)
    return tuple(_placed(value, one, dim) for value, one in zip(values, (*wanted, *[None] * rest), strict=False))


def _placed(value: Any, wanted: Placement | None, dim: int) -> Any:
    """A tensor, placed so along one mesh dimension; its gradient comes back whole, or as it was cut."""
    if wanted is None or not isinstance(value, MeshTensor):
        return value
    if isinstance(wanted, Shard):
        wanted = Shard(wanted.dim % value.dim())
    placements = [*value.placements]
    if placements[dim] == wanted:
        return value
    placements[dim] = wanted
    return value.redistribute(placements)
