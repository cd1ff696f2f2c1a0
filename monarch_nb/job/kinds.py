"""The kinds of jobs there are."""

from collections.abc import Callable
from importlib import import_module

from monarch_nb.job.adapter import EngineError, JobAdapter

# One line each: what gives the adapter of a kind of jobs, called when such a job is first made.
_LOADERS: dict[str, Callable[[], JobAdapter]] = {
    "kubernetes": lambda: import_module("monarch_nb.job.kubernetes.adapter").Kubernetes(),
    "lightning": lambda: import_module("monarch_nb.job.lightning").Lightning(),
    "mpi": lambda: import_module("monarch_nb.job.mpi").MPI(),
    "ray": lambda: import_module("monarch_nb.job.ray").Ray(),
    "skypilot": lambda: import_module("monarch_nb.job.skypilot").SkyPilot(),
    "slurm": lambda: import_module("monarch_nb.job.slurm").Slurm(),
    "local": lambda: import_module("monarch_nb.job.local").OwnHost(),
    "process": lambda: import_module("monarch_nb.job.process").ProcessAdapter(),
    "ssh": lambda: import_module("monarch_nb.job.ssh.adapter").SSH(),
}
_adapters: dict[str, JobAdapter] = {}


def register_job(kind: str, load: Callable[[], JobAdapter]) -> None:
    """Adds a kind of jobs. Raises ValueError for a name that is taken."""
    if kind in _LOADERS:
        raise ValueError(f"there is a kind of jobs {kind!r} already")
    _LOADERS[kind] = load


def unregister_job(kind: str) -> None:
    """Takes a kind away again; jobs of it that run are not ended. Raises LookupError for one that is not there."""
    if _LOADERS.pop(kind, None) is None:
        raise LookupError(f"there is no kind of jobs {kind!r}")
    _adapters.pop(kind, None)


def kinds() -> list[str]:
    """The names of all kinds of jobs."""
    return sorted(_LOADERS)


def adapter_of(kind: str) -> JobAdapter:
    """The adapter of a kind of jobs, one for this process. Raises LookupError, and EngineError without its package."""
    if kind not in _LOADERS:
        raise LookupError(f"there is no kind of jobs {kind!r} here: there are {', '.join(kinds())}")
    if kind not in _adapters:
        try:
            _adapters[kind] = _LOADERS[kind]()
        except ModuleNotFoundError as error:
            raise EngineError(f"{kind} jobs need the package {error.name}: install monarch-nb[{kind}]") from error
    return _adapters[kind]
