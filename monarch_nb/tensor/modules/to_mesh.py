"""A module on a mesh, trained as it would be in one process."""

import weakref
from typing import Any, TypeVar

from torch import nn
from torch.utils.hooks import RemovableHandle

from monarch_nb.tensor.mesh import Mesh
from monarch_nb.tensor.modules.flow import place_flow, take_local
from monarch_nb.tensor.modules.gathering import Gathering
from monarch_nb.tensor.modules.gradients import sum_gradients
from monarch_nb.tensor.modules.parameters import to_mesh
from monarch_nb.tensor.modules.plan import Plan, Resolved

Module = TypeVar("Module", bound=nn.Module)

_hooks: "weakref.WeakKeyDictionary[nn.Module, list[RemovableHandle]]" = weakref.WeakKeyDictionary()


def module_to_mesh(module: Module, mesh: Mesh, plan: Any = None) -> Module:
    """Brings a module to a mesh and gives it back: its parameters are sharded tensors from then on.

    `plan` is None for data-parallel (parameters whole on every rank, batches cut), "fully_sharded" (parameters cut,
    too, and gathered where they are used), `{pattern: style}` for tensor-parallel, or a `Plan`, which has it all.
    Gradients are summed up over the ranks in the backward pass (see `no_sync`). The module takes local tensors as
    inputs, too, and cuts them as batches; everything else is sent with `monarch.distribute`. What is on the meta device
    is made on the mesh, by the `reset_parameters` of its modules.

    Blocks while large parameters are on their way. Raises ValueError for a plan that does not fit; the module is then
    as it was. Make the optimizer afterwards: it takes the parameters that are there.
    """
    resolved = Resolved(Plan.of(plan), mesh.layout, module)
    to_mesh(module, mesh, resolved)
    hooks = _hooks.setdefault(module, [])
    while hooks:  # those of an earlier plan
        hooks.pop().remove()
    for path, owner in module.named_modules():
        style = resolved.styles.get(path)
        if style is not None:
            assert resolved.tensor is not None
            hooks += place_flow(owner, style, resolved.tensor)
        cut = [
            name for name, tensor in owner._parameters.items() if tensor is not None and resolved.is_gathered(tensor)
        ]
        if cut:
            hooks += Gathering(cut, resolved.data).attach(owner)
    hooks.append(take_local(module, mesh, resolved.batch))
    sum_gradients(module)
    return module
