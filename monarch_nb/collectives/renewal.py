"""Renewal of a process group after an error: the same object, with new connections; and the modules that use it.

Holders of a group (a DDP module, the device mesh of FSDP2, a variable of the program) stay valid. PyTorch cannot
replace a backend of a group, but accepts one of another type in its place; types are numbers.
"""

import contextlib
import functools
import sys
import weakref
from collections.abc import Collection, Iterator
from datetime import timedelta
from types import ModuleType
from typing import TYPE_CHECKING, Any

from monarch_nb.collectives.connections import Connections
from monarch_nb.collectives.threads import address

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.nn import Module
    from torch.nn.parallel import DistributedDataParallel

_FIRST_TYPE = 100  # of backends; PyTorch's own types are lower
MOST = 64  # renewals of one group: PyTorch keeps the threads of each backend until the group is destroyed
_JOINS_S = 4.0  # for all members to join
DDP = "torch.nn.parallel.distributed"
DEVICE_MESH = "torch.distributed.device_mesh"
_FSDP = "torch.distributed.fsdp._fully_shard._fsdp_state"
_GROUPS = ("shard_process_group", "replicate_process_group", "reduce_scatter_process_group")  # of a mesh of FSDP2
_STATES = "torch.distributed._composable_state"


def can_renew(module: ModuleType | None, group: "ProcessGroup", times: int) -> bool:
    """Returns whether a group can be renewed once more, as gloo groups can. `module` is `distributed_c10d`."""
    gloo = getattr(module, "ProcessGroupGloo", None)
    try:
        backends = [group._get_backend(device) for device in group._device_types]
        return (
            times < MOST
            and bool(backends)
            and all(type(backend) is gloo for backend in backends)
            and hasattr(group, "_register_backend")
            and all(hasattr(root, "reset_iter_state") for root in _sharded(()))
        )
    except Exception:  # another version of PyTorch
        return False


def renew(module: ModuleType, group: "ProcessGroup", number: int, times: int) -> Connections:
    """Reconnects the members of a group; all of them call this, with the same number. Blocks until all have done
    so, or raises after some seconds."""
    name, store = module._world.pg_names[group], module._world.pg_map[group][1]
    before = group._get_backend(next(iter(group._device_types)))
    host, port = address(store)
    if port:  # another thread may wait in the group's own store
        torch = sys.modules["torch.distributed"]
        store = torch.TCPStore(host, port, None, False, timedelta(seconds=_JOINS_S), wait_for_workers=False)
    connections = Connections()
    with connections.noted():
        backend = module.ProcessGroupGloo(
            module.PrefixStore(f"renewed/{number}/{name}", store),
            group.rank(),
            group.size(),
            timeout=timedelta(seconds=_JOINS_S),
        )
    backend._set_default_timeout(before.options._timeout)
    backend.options.global_ranks_in_group = before.options.global_ranks_in_group
    backend.options.group_name = before.options.group_name
    kind = module.ProcessGroup.BackendType(_FIRST_TYPE + times)
    for device in group._device_types:
        group._register_backend(device, kind, backend)
    group._set_group_name(name)
    group._set_group_desc(group.group_desc)
    with contextlib.suppress(Exception):
        backend._set_sequence_number_for_group()
    return connections


def reset_modules(groups: "Collection[ProcessGroup]") -> None:
    """Resets unfinished work of modules on these groups, equally on all members."""
    for replicated in _replicated(groups):
        _reset_replicated(replicated)
    for root in _sharded(groups):
        state = root._get_fsdp_state()
        for part in state._state_ctx.all_states:
            for params in part._fsdp_param_groups:
                params._all_gather_result = None  # it will never complete
                for param in params.fsdp_params:
                    param.unsharded_accumulated_grad = None
                    if hasattr(param, "_unsharded_param"):
                        param._unsharded_param.grad = None
        root.reset_iter_state()


# DDP modules, with their built-in communication hooks, which DDP passes to its reducer and does not store
_ddp_modules: "weakref.WeakKeyDictionary[DistributedDataParallel, object]" = weakref.WeakKeyDictionary()
_meshes: "dict[int, weakref.ref[Any]]" = {}  # device meshes by identity: equal ones are different meshes here


def watch_replicated(module: ModuleType) -> None:
    """Records DDP modules that are created from now on. `module` is torch's."""
    kind = module.DistributedDataParallel
    begin, register = kind._ddp_init_helper, kind._register_builtin_comm_hook

    def helper(ddp: "DistributedDataParallel", *args: object, **kwargs: object) -> object:
        _ddp_modules.setdefault(ddp, None)
        return begin(ddp, *args, **kwargs)

    def register_builtin(ddp: "DistributedDataParallel", comm_hook_type: object) -> None:
        register(ddp, comm_hook_type)
        _ddp_modules[ddp] = comm_hook_type

    kind._ddp_init_helper, kind._register_builtin_comm_hook = helper, register_builtin


def watch_meshes(module: ModuleType) -> None:
    """Records device meshes that are created from now on. `module` is torch's."""
    kind = module.DeviceMesh
    begin = kind.__init__

    @functools.wraps(begin)
    def init(mesh: "DeviceMesh", *args: object, **kwargs: object) -> None:
        key = id(mesh)
        _meshes[key] = weakref.ref(mesh, lambda _: _meshes.pop(key, None))
        begin(mesh, *args, **kwargs)

    kind.__init__ = init


def retire_meshes(living: Collection[str]) -> None:
    """Makes device meshes with a group that is not among the living ones, by name, unequal to all other meshes.

    DTensor's caches, one for each thread, compare meshes by shape and ranks: for the mesh that replaces such a mesh,
    they would return the entries of the old one, and the old mesh with them.
    """
    for reference in tuple(_meshes.values()):
        mesh = reference()
        if mesh is not None and not set(living).issuperset(_names_of_groups(mesh)):
            mesh._thread_id = f"given up {id(mesh)}"  # takes part in comparisons of meshes; otherwise unused


def _names_of_groups(mesh: "DeviceMesh") -> list[str]:
    """Returns the names of the groups of a mesh, one for each dimension."""
    names = getattr(mesh, "_dim_group_names", None)
    if names is None:  # before PyTorch 2.8
        names = [info[-1] for info in getattr(mesh, "_dim_group_infos", ())]
    return [name for name in names if isinstance(name, str)]


def outlived(groups: "Collection[ProcessGroup]") -> None:
    """Makes modules on these groups, which are given up, raise an error that says so when they are called."""
    if groups:
        with contextlib.suppress(Exception):  # another version of PyTorch
            for module in (*_replicated(groups), *_sharded(groups)):
                module.register_forward_pre_hook(_say_outlived, prepend=True)


def _say_outlived(module: "Module", *_: object) -> None:
    inner = getattr(module, "module", None)
    name, suffix = type(module).__name__, "" if inner is None else f"({type(inner).__name__})"
    raise RuntimeError(
        f"{name}{suffix} was made on a process group that was given up, as a rank of it was lost or left it: make the "
        "module again, once init_process_group has made a new group"
    )


def _replicated(groups: "Collection[ProcessGroup]") -> "list[DistributedDataParallel]":
    """Returns the DDP modules on these groups."""
    return [ddp for ddp in tuple(_ddp_modules) if any(ddp.process_group is group for group in groups)]


def _reset_replicated(ddp: Any) -> None:
    """Creates the buckets again: at the error, some ranks may have reordered theirs, and others not."""
    if ddp.mixed_precision is not None or ddp._use_python_reducer:
        raise NotImplementedError("a DDP module with mixed_precision, or a reducer in Python")
    ddp._remove_autograd_hooks()
    ddp._has_rebuilt_buckets = False
    parameters, sparse = ddp._build_params_for_reducer()
    ddp._ddp_init_helper(parameters, sparse, ddp._build_debug_param_to_name_mapping(parameters), ddp.static_graph)
    if ddp.static_graph:
        ddp.reducer._set_static_graph()
        ddp.logger._set_static_graph()
    hooks, ddp._comm_hooks = ddp._comm_hooks, []
    for hook, state in hooks:
        ddp.register_comm_hook(state, hook)
    if (builtin := _ddp_modules.get(ddp)) is not None:
        ddp._register_builtin_comm_hook(builtin)


def _sharded(groups: "Collection[ProcessGroup]") -> Iterator[Any]:
    """Yields the FSDP2 roots on these groups that have run; without groups all of them."""
    module, states = sys.modules.get(_FSDP), sys.modules.get(_STATES)
    if module is None or states is None:
        return
    for holder, entry in tuple(states._module_state_mapping.items()):
        state = entry() if callable(entry) else entry
        if not isinstance(state, module.FSDPState) or not state._is_root:
            continue
        meshes = [params.mesh_info for part in state._state_ctx.all_states for params in part._fsdp_param_groups]
        used = [getattr(mesh, name, None) for mesh in meshes for name in _GROUPS]
        if not groups or any(pg is group for pg in used for group in groups):
            yield holder
