"""The kinds of jobs there are."""

from collections.abc import Callable

from monarch_nb.job.adapter import EngineError, JobAdapter

_LOADERS: dict[str, Callable[[], JobAdapter]] = {}  # each kind's module adds its own
_adapters: dict[str, JobAdapter] = {}


def register_job(kind: str, load: Callable[[], JobAdapter]) -> None:
    """Adds a kind of jobs; `load` gives its adapter when such a job is first made. Raises ValueError for one known."""
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
