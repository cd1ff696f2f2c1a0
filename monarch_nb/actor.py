"""The actor API: `from monarch.actor import Actor, endpoint, this_host`."""

import sys

from monarch_nb.host.command import BootstrapCommand, default_bootstrap_cmd
from monarch_nb.mesh import (
    ActorMesh,
    AttachError,
    Endpoint,
    HostMesh,
    ProcMesh,
    ValueMesh,
    attach_hosts,
    attach_to_workers,
    exit_on_fault,
    get_active_proc_meshes,
    get_or_spawn_controller,
    heal_mesh,
    local_hosts,
    register_proc_mesh_spawn_callback,
    reload_mesh,
    run_on,
    run_worker_loop_forever,
    run_worker_loop_until_shutdown,
    send,
    set_hook_lookup,
    shutdown_context,
    start_worker_loop_forever,
    this_host,
    this_proc,
    unregister_proc_mesh_spawn_callback,
)
from monarch_nb.runtime import (
    Actor,
    Channel,
    Context,
    DeadlockError,
    Future,
    Port,
    PortReceiver,
    RankedPortReceiver,
    concurrent_endpoint,
    endpoint,
    runtime,
)
from monarch_nb.shape import Extent, Point
from monarch_nb.supervision import MeshFailure, SupervisionError
from monarch_nb.wire import ActorError

unhandled_fault_hook = exit_on_fault
"""Called with a MeshFailure that nobody has handled; assign another function to replace it."""

set_hook_lookup(lambda: sys.modules[__name__].unhandled_fault_hook)


def context() -> Context:
    """What is running: the current actor, and this message's place in the slice it was sent to."""
    return runtime().context()


def current_rank() -> Point:
    """This message's place in the slice it was sent to."""
    return context().message_rank


def current_size() -> dict[str, int]:
    """The sizes of the slice this message was sent to."""
    extent = context().message_rank.extent
    return dict(extent)


def current_actor_name() -> str:
    """The name of the current actor, for people."""
    return str(context().actor_instance.actor_id)


__all__ = [
    "Actor",
    "ActorError",
    "ActorMesh",
    "AttachError",
    "BootstrapCommand",
    "Channel",
    "Context",
    "DeadlockError",
    "Endpoint",
    "Extent",
    "Future",
    "HostMesh",
    "MeshFailure",
    "Point",
    "Port",
    "PortReceiver",
    "ProcMesh",
    "RankedPortReceiver",
    "SupervisionError",
    "ValueMesh",
    "attach_hosts",
    "attach_to_workers",
    "concurrent_endpoint",
    "context",
    "current_actor_name",
    "current_rank",
    "current_size",
    "default_bootstrap_cmd",
    "endpoint",
    "get_active_proc_meshes",
    "get_or_spawn_controller",
    "heal_mesh",
    "local_hosts",
    "register_proc_mesh_spawn_callback",
    "reload_mesh",
    "run_on",
    "run_worker_loop_forever",
    "run_worker_loop_until_shutdown",
    "send",
    "shutdown_context",
    "start_worker_loop_forever",
    "this_host",
    "this_proc",
    "unhandled_fault_hook",
    "unregister_proc_mesh_spawn_callback",
]
