"""The move of modules to a mesh, where they are trained as in one process.

Parameters are sharded and sent, hooks place inputs and outputs, and fully sharded parameters are gathered for use.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils.hooks import RemovableHandle

from monarch_nb.tensor.handle import MeshTensor
from monarch_nb.tensor.mesh import Mesh
from monarch_nb.tensor.modules.gathering import Gathering, layers_of, sum_gradients
from monarch_nb.tensor.modules.plan import Plan, Resolved, Style
from monarch_nb.tensor.propagation import Placements, replicated
from monarch_nb.wire import kind_of

Module = TypeVar("Module", bound=nn.Module)
Arguments = tuple[tuple[object, ...], dict[str, object]]

_hooks: "weakref.WeakKeyDictionary[nn.Module, list[RemovableHandle]]" = weakref.WeakKeyDictionary()
_RESETS = ("reset_parameters", "_reset_parameters")


def module_to_mesh(module: Module, mesh: Mesh, plan: object = None) -> Module:
    """Moves a module to a mesh and returns it: its parameters are sharded tensors from then on.

    `plan` is None for data-parallel (parameters replicated, batches sharded), "fully_sharded" (parameters sharded,
    too, and gathered where they are used), `{pattern: style}` for tensor-parallel, or a `Plan` for all of it.
    Gradients are summed over the ranks in the backward pass (see `no_sync`). The module takes local tensors as
    inputs, too, and shards them as batches; others are sent with `monarch.distribute`. Tensors on the meta device
    are created on the mesh, by the `reset_parameters` of their modules.

    Blocks while large parameters are being sent. Raises ValueError for a plan that does not fit; the module is then
    unchanged. Create the optimizer afterwards, with the new parameters.
    """
    resolved = Resolved(Plan.of(plan), mesh.layout, module)
    _move_tensors(module, mesh, resolved)
    hooks = _hooks.setdefault(module, [])
    while hooks:  # hooks of an earlier plan
        hooks.pop().remove()
    for layer in layers_of(module):
        hooks += _gather(layer, resolved, recurse=True)
    for path, owner in module.named_modules():
        style = resolved.styles.get(path)
        if style is not None:
            assert resolved.tensor is not None
            hooks += _place_flow(owner, style, resolved.tensor)
        hooks += _gather(owner, resolved, recurse=False)
    hooks.append(_distribute_inputs(module, mesh, resolved.batch))
    sum_gradients(module)
    return module


def _gather(module: nn.Module, plan: Resolved, *, recurse: bool) -> list[RemovableHandle]:
    """Registers the hooks that gather fully sharded parameters."""
    named = module.named_parameters(recurse=recurse, remove_duplicate=False)
    names = [name for name, parameter in named if plan.is_gathered(parameter)]
    return Gathering(names, plan.data).attach(module) if names else []


def _place_flow(module: nn.Module, style: Style, dim: int) -> list[RemovableHandle]:
    """Registers hooks that place inputs and outputs of a module by its style."""
    hooks = []
    if any(style.inputs) or any(style.keywords.values()):

        def before(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> Arguments:
            placed = {name: _place(value, style.keywords.get(name), dim) for name, value in kwargs.items()}
            return _place_all(args, style.inputs, dim), placed

        hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))
    if any(style.outputs):

        def after(module: nn.Module, args: object, result: object) -> object:
            if isinstance(result, tuple):
                return _place_all(result, style.outputs, dim)
            return _place(result, style.outputs[0], dim)

        hooks.append(module.register_forward_hook(after))
    return hooks


def _distribute_inputs(module: nn.Module, mesh: Mesh, batch: Placements) -> RemovableHandle:
    """Registers a hook that sends local tensors, sharded along the first dimension like batches."""

    def distribute(value: object) -> object:
        if not isinstance(value, torch.Tensor) or isinstance(value, MeshTensor) or not value.dim():
            return value
        return mesh.distribute(value, batch)

    def before(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> Arguments:
        return tuple(map(distribute, args)), {name: distribute(value) for name, value in kwargs.items()}

    return module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)


def _place_all(values: tuple[object, ...], targets: Sequence[Placement | None], dim: int) -> tuple[object, ...]:
    extra = len(values) - len(targets)
    return tuple(_place(value, target, dim) for value, target in zip(values, (*targets, *[None] * extra), strict=False))


def _place(value: object, target: Placement | None, dim: int) -> object:
    """Redistributes a tensor along one mesh dimension."""
    if target is None or not isinstance(value, MeshTensor):
        return value
    if isinstance(target, Shard):
        target = Shard(target.dim % value.dim())
    placements = [*value.placements]
    if placements[dim] == target:
        return value
    placements[dim] = target
    return value.redistribute(placements)


def _move_tensors(module: nn.Module, mesh: Mesh, plan: Resolved) -> None:
    """Replaces the parameters and buffers of a module by sharded ones: all of them, or, on an error, none.

    Shared tensors stay shared. Tensors on the meta device are created on the mesh, with values by `reset_parameters` of
    their module. Raises ValueError if it has none, or if one tensor has two placements.
    """
    resets = _resets(module)
    converted: dict[int, tuple[torch.Tensor, Placements, str]] = {}
    slots: list[tuple[nn.Module, str, torch.Tensor]] = []
    for path, owner, name, tensor in _tensors(module):
        is_parameter = isinstance(tensor, nn.Parameter)
        if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
            raise ValueError(
                f"{path} of {kind_of(owner)} has no shape before the module has run once: call it with a local "
                "input of the size that it is for, and bring it to the mesh then"
            )
        placements = plan.placements(path, tensor.shape) if is_parameter else replicated(mesh.layout)
        entry = converted.get(id(tensor))
        if entry is None:
            sharded = _shard(tensor, mesh, placements)
            converted[id(tensor)] = entry = (sharded, placements, path)
        elif entry[1] != placements:
            raise ValueError(
                f"plan: {entry[2]} and {path} are one parameter, and would lie as {entry[1]} and as {placements}: "
                "give both names the same"
            )
        slots.append((owner, name, entry[0]))
    for owner, name, sharded in slots:
        setattr(owner, name, sharded)  # also seen by modules that keep lists of their own
    with torch.no_grad():
        for reset in resets:
            reset()


def _shard(tensor: torch.Tensor, mesh: Mesh, placements: Placements) -> torch.Tensor:
    with torch.no_grad():
        if tensor.is_meta:
            sharded = mesh.empty(*tensor.shape, sharding_spec=placements, dtype=tensor.dtype)
        else:
            sharded = mesh.distribute(tensor.detach(), placements)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(sharded, requires_grad=tensor.requires_grad)
    return sharded


def _tensors(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, torch.Tensor]]:
    for path, owner in module.named_modules():
        for name, tensor in _own_tensors(owner):
            yield f"{path}.{name}" if path else name, owner, name, tensor


def _own_tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Returns the parameters and buffers of a module without submodules."""
    kinds = (module.named_parameters, module.named_buffers)
    return [item for kind in kinds for item in kind(recurse=False, remove_duplicate=False)]


def _resets(module: nn.Module) -> list[Callable[[], object]]:
    """Returns methods that initialise tensors on the meta device, in module order."""
    resets: list[Callable[[], object]] = []
    for path, owner in module.named_modules():
        empty = [name for name, tensor in _own_tensors(owner) if tensor.is_meta]
        if not empty:
            continue
        reset = next((getattr(owner, name) for name in _RESETS if callable(getattr(owner, name, None))), None)
        if reset is None:
            raise ValueError(
                f"{path or type(module).__name__} has {', '.join(empty)} on the meta device, and nothing gives values "
                f"to it: {type(owner).__name__} needs a method reset_parameters()"
            )
        resets.append(reset)
    return resets
