"""The actor API: `from monarch.actor import Actor, endpoint, this_host`."""

import sys

from monarch_nb.mesh import (
    ActorMesh,
    Endpoint,
    HostMesh,
    ProcMesh,
    ValueMesh,
    exit_on_fault,
    heal_mesh,
    local_hosts,
    reload_mesh,
    run_on,
    send,
    set_hook_lookup,
    shutdown_context,
    this_host,
    this_proc,
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
    "concurrent_endpoint",
    "context",
    "current_actor_name",
    "current_rank",
    "current_size",
    "endpoint",
    "heal_mesh",
    "local_hosts",
    "reload_mesh",
    "run_on",
    "send",
    "shutdown_context",
    "this_host",
    "this_proc",
    "unhandled_fault_hook",
]
