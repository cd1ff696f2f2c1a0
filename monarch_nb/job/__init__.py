"""Jobs: host meshes from schedulers, clusters and machines; commands, shells and forwarded ports on their hosts."""

from typing import TYPE_CHECKING

from monarch_nb._package import lazy_names
from monarch_nb.job.adapter import (
    HERE,
    Agent,
    AgentsWanted,
    EngineError,
    JobAdapter,
    Role,
    Running,
    Seen,
    kinds,
    register_job,
    unregister_job,
)
from monarch_nb.job.adapter_job import AdapterJob, running_jobs
from monarch_nb.job.arrival import HostsMissingError, Progress
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
from monarch_nb.job.kubernetes import ImageSpec, KubeConfig, KubernetesJob
from monarch_nb.job.lightning import LightningJob
from monarch_nb.job.mpi import MPIJob
from monarch_nb.job.named import (
    JobsFileError,
    hosts_from_config,
    job_load,
    job_named,
    job_of,
    load_current_job,
    make_job,
    set_current_job,
)
from monarch_nb.job.process import LocalJob, ProcessJob
from monarch_nb.job.ray import RayJob
from monarch_nb.job.record import JobFileError
from monarch_nb.job.skypilot import SkyPilotJob
from monarch_nb.job.slurm import SlurmJob
from monarch_nb.job.ssh import SSHJob
from monarch_nb.job.trait import DEFAULT_JOB_PATH, JobState, JobTrait, MeshAdminConfig, TelemetryConfig, job_loads

if TYPE_CHECKING:
    from monarch_nb.job.tools import PortForwarder, exec_command, shell

__all__ = [
    "DEFAULT_JOB_PATH",
    "HERE",
    "SERVICE_PROC_IDS_ENV",
    "SERVICE_PROC_RANK_ENV",
    "AdapterJob",
    "Agent",
    "AgentsWanted",
    "EngineError",
    "HostsMissingError",
    "ImageSpec",
    "JobAdapter",
    "JobFileError",
    "JobState",
    "JobTrait",
    "JobsFileError",
    "KubeConfig",
    "KubernetesJob",
    "LightningJob",
    "LocalJob",
    "MPIJob",
    "MeshAdminConfig",
    "PortForwarder",
    "ProcessJob",
    "Progress",
    "RayJob",
    "Role",
    "Running",
    "SSHJob",
    "Seen",
    "SkyPilotJob",
    "SlurmJob",
    "TelemetryConfig",
    "deserialize_service_proc_ids",
    "exec_command",
    "hosts_from_config",
    "job_load",
    "job_loads",
    "job_named",
    "job_of",
    "kinds",
    "load_current_job",
    "make_job",
    "new_service_proc_id",
    "ranked_service_proc_id_from_env",
    "register_job",
    "running_jobs",
    "serialize_service_proc_ids",
    "service_proc_addr",
    "service_proc_addrs",
    "set_current_job",
    "shell",
    "unregister_job",
]

__getattr__ = lazy_names(__name__, {"tools": ("PortForwarder", "exec_command", "shell")})
