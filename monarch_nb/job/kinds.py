"""The kinds of jobs."""

from collections.abc import Callable

from monarch_nb.job.adapter import EngineError, JobAdapter

_LOADERS: dict[str, Callable[[], JobAdapter]] = {}  # each kind's module adds its own
_adapters: dict[str, JobAdapter] = {}


def register_job(kind: str, load: Callable[[], JobAdapter]) -> None:
    """Adds a kind of jobs; `load` makes its adapter when it is first needed. Raises ValueError for a known kind."""
    if kind in _LOADERS:
        raise ValueError(f"there is a kind of jobs {kind!r} already")
    _LOADERS[kind] = load


def unregister_job(kind: str) -> None:
    """Removes a kind; running jobs of it are not ended. Raises LookupError for an unknown kind."""
    if _LOADERS.pop(kind, None) is None:
        raise LookupError(f"there is no kind of jobs {kind!r}")
    _adapters.pop(kind, None)


def kinds() -> list[str]:
    """Returns the names of all kinds of jobs."""
    return sorted(_LOADERS)


def adapter_of(kind: str) -> JobAdapter:
    """Returns the adapter of a kind, one for this process. Raises LookupError, or EngineError without its package."""
    if kind not in _LOADERS:
        raise LookupError(f"there is no kind of jobs {kind!r} here: there are {', '.join(kinds())}")
    if kind not in _adapters:
        try:
            _adapters[kind] = _LOADERS[kind]()
        except ModuleNotFoundError as error:
            raise EngineError(f"{kind} jobs need the package {error.name}: install monarch-nb[{kind}]") from error
    return _adapters[kind]
