"""The actor API: `from monarch.actor import Actor, endpoint, this_host`.

The names that declare actors are imported at once; those that make this process a controller at their first use.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

from monarch_nb.runtime import (
    Channel,
    Context,
    DeadlockError,
    Future,
    Port,
    PortReceiver,
    RankedPortReceiver,
    WouldBlockRuntime,
    breakpoint_if,
    current_runtime,
    returns_future,
    set_hook_lookup,
    started,
)
from monarch_nb.runtime.ids import ProcId, Uid
from monarch_nb.runtime.output.own_log import config
from monarch_nb.settings import ChannelTransport
from monarch_nb.shape import Extent, NDSlice, Point, Region, Shape, Slice
from monarch_nb.wire import ActorError

if TYPE_CHECKING:
    from monarch_nb.code import reload_mesh
    from monarch_nb.connect import (
        AttachError,
        accept_hosts,
        attach,
        attach_hosts,
        attach_to_workers,
        enable_transport,
        local_hosts,
        run_worker_loop_forever,
        run_worker_loop_until_shutdown,
        shutdown_context,
        start_worker_loop_forever,
    )
    from monarch_nb.debug.actor import DebugController
    from monarch_nb.host.command import BootstrapCommand, default_bootstrap_cmd
    from monarch_nb.lifecycle import exit_on_fault as unhandled_fault_hook
    from monarch_nb.lifecycle import get_or_spawn_controller, heal_mesh
    from monarch_nb.mesh import (
        Accumulator,
        ActorMesh,
        Endpoint,
        HostMesh,
        ProcMesh,
        ValueMesh,
        as_endpoint,
        get_active_proc_meshes,
        register_proc_mesh_spawn_callback,
        run_on,
        send,
        this_proc,
        unregister_proc_mesh_spawn_callback,
    )
    from monarch_nb.mesh.declare import Actor, concurrent_endpoint, endpoint
    from monarch_nb.supervision import MeshFailure, SupervisionError
    from monarch_nb.supervision import UndeliverableMessage as UndeliverableMessageEnvelope
    from monarch_nb.telemetry import get_meter, span, traced
else:
    from monarch_nb.runtime import Actor, concurrent_endpoint, endpoint

    # The other public names, by the package that defines them. Names without an entry are in `monarch_nb.mesh`.
    _HOMES = {
        "monarch_nb.connect": (
            "AttachError",
            "accept_hosts",
            "attach",
            "attach_hosts",
            "attach_to_workers",
            "enable_transport",
            "local_hosts",
            "run_worker_loop_forever",
            "run_worker_loop_until_shutdown",
            "shutdown_context",
            "start_worker_loop_forever",
        ),
        "monarch_nb.code": ("reload_mesh",),
        "monarch_nb.host.command": ("BootstrapCommand", "default_bootstrap_cmd"),
        "monarch_nb.lifecycle": (
            "get_or_spawn_controller",
            "heal_mesh",
            "unhandled_fault_hook",  # called with an unhandled MeshFailure; replaced by assignment
        ),
        "monarch_nb.supervision": ("MeshFailure", "SupervisionError", "UndeliverableMessageEnvelope"),
        "monarch_nb.telemetry": ("get_meter", "span", "traced"),
    }
    _HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
    _NAME_THERE = {"UndeliverableMessageEnvelope": "UndeliverableMessage", "unhandled_fault_hook": "exit_on_fault"}

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        home = importlib.import_module(_HOME_OF.get(name, "monarch_nb.mesh"))
        value = getattr(home, _NAME_THERE.get(name, name))
        if name != "unhandled_fault_hook":  # a value here is one that a program has assigned
            globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


set_hook_lookup(lambda: globals().get("unhandled_fault_hook"))

__path__: list[str] = []  # a package to the import system: torchmonarch has a module inside it


def this_host() -> "HostMesh":
    """Returns the host that this process runs on, without dimensions."""
    if started() is None and "monarch_nb.mesh" not in sys.modules:
        from monarch_nb.host.launch import start_ahead

        start_ahead()  # starts the agent while the rest of the library is imported
    from monarch_nb.mesh import this_host as find

    return find()


def context() -> Context:
    """Returns the running context: the current actor, and the point of this message in the slice it was sent to."""
    return current_runtime().context()


def current_rank() -> Point:
    """Returns the place of this message in the slice that it was sent to."""
    return context().message_rank


def current_size() -> dict[str, int]:
    """Returns the sizes of the slice that this message was sent to."""
    extent = context().message_rank.extent
    return dict(extent)


def current_actor_name() -> str:
    """Returns the display name of the current actor."""
    return str(context().actor_instance.actor_id)


def debug_controller() -> "DebugController":
    """Returns the actor, one for a program, that lists threads stopped in the debugger and takes commands for them.

    `debug_controller().list.call_one().get()`. Works in any process of the program; `monarch.debug` is the same without
    messages, for the client alone. Blocks until the client's process replies.
    """
    from monarch_nb.debug.actor import debug_controller as find

    return find()


__all__ = [
    "Accumulator",
    "Actor",
    "ActorError",
    "ActorMesh",
    "AttachError",
    "BootstrapCommand",
    "Channel",
    "ChannelTransport",
    "Context",
    "DeadlockError",
    "Endpoint",
    "Extent",
    "Future",
    "HostMesh",
    "MeshFailure",
    "NDSlice",
    "Point",
    "Port",
    "PortReceiver",
    "ProcId",
    "ProcMesh",
    "RankedPortReceiver",
    "Region",
    "Shape",
    "Slice",
    "SupervisionError",
    "Uid",
    "UndeliverableMessageEnvelope",
    "ValueMesh",
    "WouldBlockRuntime",
    "accept_hosts",
    "as_endpoint",
    "attach",
    "attach_hosts",
    "attach_to_workers",
    "breakpoint_if",
    "concurrent_endpoint",
    "config",
    "context",
    "current_actor_name",
    "current_rank",
    "current_size",
    "debug_controller",
    "default_bootstrap_cmd",
    "enable_transport",
    "endpoint",
    "get_active_proc_meshes",
    "get_meter",
    "get_or_spawn_controller",
    "heal_mesh",
    "local_hosts",
    "register_proc_mesh_spawn_callback",
    "reload_mesh",
    "returns_future",
    "run_on",
    "run_worker_loop_forever",
    "run_worker_loop_until_shutdown",
    "send",
    "shutdown_context",
    "span",
    "start_worker_loop_forever",
    "this_host",
    "this_proc",
    "traced",
    "unhandled_fault_hook",
    "unregister_proc_mesh_spawn_callback",
]
