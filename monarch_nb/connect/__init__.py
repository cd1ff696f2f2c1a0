"""Hosts that others have started: attached over TCP or a path, behind a gateway, or dialling in."""

from typing import TYPE_CHECKING

from monarch_nb._package import lazy_names

if TYPE_CHECKING:
    from monarch_nb.connect.downtime import (
        DowntimeReport,
        Result,
        ResultLostError,
        Results,
        findings_report,
        listing,
        results,
    )
    from monarch_nb.connect.hosts import AttachError, accept_hosts, attach_hosts
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
    from monarch_nb.connect.worker_loop import (
        run_worker_loop_forever,
        run_worker_loop_until_shutdown,
        run_worker_until_killed,
        start_worker_loop_forever,
    )
    from monarch_nb.connect.workers import attach, attach_to_workers, enable_transport

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
        "hosts": ("AttachError", "accept_hosts", "attach_hosts"),
        "mesh_detach": ("DetachError", "Detacher"),
        "mesh_attach": ("AttachedMesh", "attach_mesh", "end_mesh", "detached_meshes"),
        "downtime": ("DowntimeReport", "Result", "ResultLostError", "Results", "findings_report", "listing", "results"),
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
        "worker_loop": (
            "run_worker_loop_forever",
            "run_worker_loop_until_shutdown",
            "run_worker_until_killed",
            "start_worker_loop_forever",
        ),
        "workers": ("attach", "attach_to_workers", "enable_transport"),
    },
)
