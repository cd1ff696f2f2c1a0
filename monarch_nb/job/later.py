"""Jobs that this version does not have: their names are there, so that programs import."""

from typing import Any, NamedTuple, NoReturn, Self

from monarch_nb._absent import refuse
from monarch_nb.job.state import JobState
from monarch_nb.job.trait import JobTrait

_WORKERS = "Start run_worker_loop_forever on each machine yourself, and attach_to_workers to them"


class _Later(JobTrait):
    """A job that cannot be made yet. Raises NotImplementedError."""

    _part = ""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        refuse(cls.__name__, cls._part, _WORKERS)

    def _create(self, client_script: str | None) -> NoReturn:
        refuse(type(self).__name__, self._part, _WORKERS)

    def _state(self) -> JobState:
        refuse(type(self).__name__, self._part, _WORKERS)

    def can_run(self, spec: JobTrait) -> bool:
        """Never: there is no such job yet."""
        return False

    def _kill(self) -> None:
        pass


class ProcessState(NamedTuple):
    """A worker process that a job has started: its number and its address."""

    pid: int
    channel: str


class LoginJob(_Later):
    """Machines that one logs in to. Raises NotImplementedError: it is not part of Monarch-NB yet."""

    _part = "jobs over SSH"


class SSHJob(LoginJob):
    """Machines reached by SSH. Raises NotImplementedError: it is not part of Monarch-NB yet."""


class BatchJob(_Later):
    """A job whose client script runs inside it. Raises NotImplementedError: it is not part of Monarch-NB yet."""

    _part = "batch jobs"


class SlurmJob(_Later):
    """Machines of a Slurm cluster. Raises NotImplementedError: it is not part of Monarch-NB yet."""

    _part = "Slurm jobs"


class KubernetesJob(_Later):
    """Pods of a Kubernetes cluster. Raises NotImplementedError: it is not part of Monarch-NB yet."""

    _part = "Kubernetes jobs"


class SPMDJob(_Later):
    """What `serve` gives. Raises NotImplementedError: it is not part of Monarch-NB yet."""

    _part = "torchrun's arguments as a job"


class StoreJob(_Later):
    """Workers that find each other by a torch.distributed store. Raises NotImplementedError: it is not there yet."""

    _part = "torchrun's arguments as a job"

    @classmethod
    def from_store(cls, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises NotImplementedError."""
        refuse("StoreJob", cls._part, _WORKERS)


def serve(*args: Any, **kwargs: Any) -> SPMDJob:
    """Launches what torchrun would. Raises NotImplementedError: it is not part of Monarch-NB yet."""
    refuse("monarch.job.spmd.serve", SPMDJob._part, "monarch.spmd.SPMDActor runs such a script on a mesh of processes")


class ImageSpec:
    """The image of a KubernetesJob's pods. Raises NotImplementedError: it is not part of Monarch-NB yet."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        refuse("ImageSpec", KubernetesJob._part, _WORKERS)


class KubeConfig:
    """How a KubernetesJob reaches its cluster. Raises NotImplementedError: it is not part of Monarch-NB yet."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        refuse("KubeConfig", KubernetesJob._part, _WORKERS)

    @classmethod
    def from_path(cls, path: str) -> NoReturn:
        """Raises NotImplementedError."""
        refuse("KubeConfig", KubernetesJob._part, _WORKERS)

    @classmethod
    def from_config(cls, config: Any) -> NoReturn:
        """Raises NotImplementedError."""
        refuse("KubeConfig", KubernetesJob._part, _WORKERS)
