"""Parameters and buffers on their way to a mesh: cut and sent, or made there when they are on no device yet."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from monarch_nb.tensor.handle import MeshTensor
from monarch_nb.tensor.mesh import Mesh
from monarch_nb.tensor.modules.plan import Resolved
from monarch_nb.tensor.propagation import Placements, replicated
from monarch_nb.wire import kind_of

_RESETS = ("reset_parameters", "_reset_parameters")


def to_mesh(module: nn.Module, mesh: Mesh, plan: Resolved) -> None:
    """Replaces the parameters and buffers of a module by sharded ones: all of them, or, on an error, none.

    What is shared stays shared. What is on the meta device is made on the mesh, and `reset_parameters` of the module
    that has it gives it its values. Raises ValueError where there is none, or where one tensor has two placements.
    """
    resets = _resets(module)
    made: dict[int, tuple[MeshTensor, Placements, str]] = {}
    found: list[tuple[nn.Module, str, MeshTensor]] = []
    for path, owner, name, tensor in _tensors(module):
        is_parameter = isinstance(tensor, nn.Parameter)
        if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
            raise ValueError(
                f"{path} of {kind_of(owner)} has no shape before the module has run once: call it with a local "
                "input of the size that it is for, and bring it to the mesh then"
            )
        placements = plan.placements(path, tensor.shape) if is_parameter else replicated(mesh.layout)
        known = made.get(id(tensor))
        if known is None:
            sharded = _sharded(tensor, mesh, placements)
            made[id(tensor)] = known = (sharded, placements, path)
        elif known[1] != placements:
            raise ValueError(
                f"plan: {known[2]} and {path} are one parameter, and would lie as {known[1]} and as {placements}: "
                "give both names the same"
            )
        found.append((owner, name, known[0]))
    for owner, name, sharded in found:
        setattr(owner, name, sharded)  # modules that keep lists of their own see it so, too
    with torch.no_grad():
        for reset in resets:
            reset()


def _sharded(tensor: torch.Tensor, mesh: Mesh, placements: Placements) -> MeshTensor:
    with torch.no_grad():
        if tensor.is_meta:
            sharded = mesh.empty(*tensor.shape, sharding_spec=placements, dtype=tensor.dtype)
        else:
            sharded = mesh.distribute(tensor.detach(), placements)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(sharded, requires_grad=tensor.requires_grad)  # type: ignore[return-value]
    return sharded


def _tensors(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, torch.Tensor]]:
    for path, owner in module.named_modules():
        for name, tensor in own(owner):
            yield f"{path}.{name}" if path else name, owner, name, tensor


def own(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """The parameters and buffers that a module has itself."""
    kinds = (module.named_parameters, module.named_buffers)
    return [each for kind in kinds for each in kind(recurse=False, remove_duplicate=False)]


def _resets(module: nn.Module) -> list[Callable[[], Any]]:
    """What gives values to what has none, in the order of the modules."""
    found: list[Callable[[], Any]] = []
    for path, owner in module.named_modules():
        empty = [name for name, tensor in own(owner) if tensor.is_meta]
        if not empty:
            continue
        reset = next((getattr(owner, name) for name in _RESETS if callable(getattr(owner, name, None))), None)
        if reset is None:
            raise ValueError(
                f"{path or type(module).__name__} has {', '.join(empty)} on the meta device, and nothing gives values "
                f"to it: {type(owner).__name__} needs a method reset_parameters()"
            )
        found.append(reset)
    return found
