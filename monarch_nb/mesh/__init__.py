"""Host, proc, actor and value meshes, with the adverbs that work on them."""

from typing import TYPE_CHECKING, Any

from monarch_nb import logs as _logs
from monarch_nb.mesh.accumulator import Accumulator
from monarch_nb.mesh.actor import ActorMesh
from monarch_nb.mesh.attach import AttachError, attach_hosts
from monarch_nb.mesh.attach_workers import attach, attach_to_workers
from monarch_nb.mesh.console import run_on
from monarch_nb.mesh.controller import (
    become_controller,
    give_up_hosts,
    local_hosts,
    prestart,
    shutdown,
    shutdown_context,
)
from monarch_nb.mesh.controllers import get_or_spawn_controller
from monarch_nb.mesh.endpoint import Endpoint, send
from monarch_nb.mesh.fault import exit_on_fault, notebook_mode
from monarch_nb.mesh.heal import heal_mesh
from monarch_nb.mesh.host import HostMesh, this_host, this_proc
from monarch_nb.mesh.interrupts import interrupt
from monarch_nb.mesh.joining import accept_hosts
from monarch_nb.mesh.proc import ProcMesh
from monarch_nb.mesh.registry import (
    get_active_proc_meshes,
    register_proc_mesh_spawn_callback,
    unregister_proc_mesh_spawn_callback,
)
from monarch_nb.mesh.reload import reload_mesh
from monarch_nb.mesh.transports import enable_transport
from monarch_nb.mesh.undeclared import as_endpoint
from monarch_nb.mesh.value import ValueMesh
from monarch_nb.mesh.workers import (
    run_worker_loop_forever,
    run_worker_loop_until_shutdown,
    run_worker_until_killed,
    start_worker_loop_forever,
)
from monarch_nb.runtime import set_factory

if TYPE_CHECKING:
    from monarch_nb.logs import LogRecord, Logs, Written, follow_logs, listen_to_logs, logs_of

set_factory(become_controller)

__all__ = [
    "Accumulator",
    "ActorMesh",
    "AttachError",
    "Endpoint",
    "HostMesh",
    "LogRecord",
    "Logs",
    "ProcMesh",
    "ValueMesh",
    "Written",
    "accept_hosts",
    "as_endpoint",
    "attach",
    "attach_hosts",
    "attach_to_workers",
    "enable_transport",
    "exit_on_fault",
    "follow_logs",
    "get_active_proc_meshes",
    "get_or_spawn_controller",
    "give_up_hosts",
    "heal_mesh",
    "interrupt",
    "listen_to_logs",
    "local_hosts",
    "logs_of",
    "notebook_mode",
    "prestart",
    "register_proc_mesh_spawn_callback",
    "reload_mesh",
    "run_on",
    "run_worker_loop_forever",
    "run_worker_loop_until_shutdown",
    "run_worker_until_killed",
    "send",
    "shutdown",
    "shutdown_context",
    "start_worker_loop_forever",
    "this_host",
    "this_proc",
    "unregister_proc_mesh_spawn_callback",
]


def __getattr__(name: str) -> Any:
    if name in __all__:  # what concerns logs is loaded when it is first used
        return getattr(_logs, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
