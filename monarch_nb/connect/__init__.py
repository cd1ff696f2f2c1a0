"""Hosts that others have started: attached over TCP or a path, behind a gateway, or dialling in."""

from typing import TYPE_CHECKING

from monarch_nb._package import lazy_names

if TYPE_CHECKING:
    from monarch_nb.connect.downtime import DowntimeReport, findings_report, listing
    from monarch_nb.connect.hosts import AttachError, attach_hosts
    from monarch_nb.connect.joining import accept_hosts
    from monarch_nb.connect.key_rotation import rotate_key
    from monarch_nb.connect.local_host import connect_named_hosts
    from monarch_nb.connect.mesh_attach import AttachedMesh, attach_mesh, detached_meshes, end_mesh
    from monarch_nb.connect.mesh_detach import Detacher, DetachError
    from monarch_nb.connect.own_hosts import (
        ensure_host,
        give_up_hosts,
        hosts_answer,
        local_hosts,
        prestart,
        shutdown,
        shutdown_context,
        shutdown_hosts,
        stop_hosts,
    )
    from monarch_nb.connect.stored_results import Result, ResultLostError, Results, results
    from monarch_nb.connect.transports import enable_transport
    from monarch_nb.connect.worker_loop import (
        run_worker_loop_forever,
        run_worker_loop_until_shutdown,
        run_worker_until_killed,
        start_worker_loop_forever,
    )
    from monarch_nb.connect.workers import attach, attach_to_workers

__all__ = [
    "AttachError",
    "AttachedMesh",
    "DetachError",
    "Detacher",
    "DowntimeReport",
    "Result",
    "ResultLostError",
    "Results",
    "accept_hosts",
    "attach",
    "attach_hosts",
    "attach_mesh",
    "attach_to_workers",
    "connect_named_hosts",
    "detached_meshes",
    "enable_transport",
    "end_mesh",
    "ensure_host",
    "findings_report",
    "give_up_hosts",
    "hosts_answer",
    "listing",
    "local_hosts",
    "prestart",
    "results",
    "rotate_key",
    "run_worker_loop_forever",
    "run_worker_loop_until_shutdown",
    "run_worker_until_killed",
    "shutdown",
    "shutdown_context",
    "shutdown_hosts",
    "start_worker_loop_forever",
    "stop_hosts",
]

__getattr__ = lazy_names(
    __name__,
    {
        "local_host": ("connect_named_hosts",),
        "key_rotation": ("rotate_key",),
        "hosts": ("AttachError", "attach_hosts"),
        "joining": ("accept_hosts",),
        "mesh_detach": ("DetachError", "Detacher"),
        "stored_results": ("Result", "ResultLostError", "Results", "results"),
        "mesh_attach": ("AttachedMesh", "attach_mesh", "end_mesh", "detached_meshes"),
        "downtime": ("DowntimeReport", "findings_report", "listing"),
        "own_hosts": (
            "ensure_host",
            "give_up_hosts",
            "hosts_answer",
            "local_hosts",
            "prestart",
            "shutdown",
            "shutdown_context",
            "shutdown_hosts",
            "stop_hosts",
        ),
        "transports": ("enable_transport",),
        "worker_loop": (
            "run_worker_loop_forever",
            "run_worker_loop_until_shutdown",
            "run_worker_until_killed",
            "start_worker_loop_forever",
        ),
        "workers": ("attach", "attach_to_workers"),
    },
)
