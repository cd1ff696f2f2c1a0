"""Jobs: host meshes from whatever runs the machines, and what to do with hosts: commands, shells, forwarded ports."""

from typing import NoReturn

from monarch_nb._about import page
from monarch_nb.job.current import load_current_job, set_current_job
from monarch_nb.job.execute import exec_command
from monarch_nb.job.forwarding import PortForwarder
from monarch_nb.job.hosts import hosts_from_config
from monarch_nb.job.identity import (
    SERVICE_PROC_IDS_ENV,
    SERVICE_PROC_RANK_ENV,
    deserialize_service_proc_ids,
    new_service_proc_id,
    ranked_service_proc_id_from_env,
    serialize_service_proc_ids,
    service_proc_addr,
    service_proc_addrs,
)
from monarch_nb.job.later import MeshAdminConfig, TelemetryConfig
from monarch_nb.job.local import LocalJob
from monarch_nb.job.process import ProcessJob
from monarch_nb.job.record import JobFileError
from monarch_nb.job.shell import shell
from monarch_nb.job.state import JobState
from monarch_nb.job.trait import DEFAULT_JOB_PATH, JobTrait, job_load, job_loads

__all__ = [
    "DEFAULT_JOB_PATH",
    "SERVICE_PROC_IDS_ENV",
    "SERVICE_PROC_RANK_ENV",
    "JobFileError",
    "JobState",
    "JobTrait",
    "LocalJob",
    "MeshAdminConfig",
    "PortForwarder",
    "ProcessJob",
    "TelemetryConfig",
    "deserialize_service_proc_ids",
    "exec_command",
    "hosts_from_config",
    "job_load",
    "job_loads",
    "load_current_job",
    "new_service_proc_id",
    "ranked_service_proc_id_from_env",
    "serialize_service_proc_ids",
    "service_proc_addr",
    "service_proc_addrs",
    "set_current_job",
    "shell",
]

_LATER = {
    "ImageSpec": "Kubernetes jobs",
    "KubeConfig": "Kubernetes jobs",
    "KubernetesJob": "Kubernetes jobs",
    "SlurmJob": "Slurm jobs",
}


def __getattr__(name: str) -> NoReturn:
    if name in _LATER:
        raise ImportError(
            f"monarch.job.{name} is not there yet: it belongs to {_LATER[name]}, see {page('compatibility.md')}"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
