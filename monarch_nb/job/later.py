"""Jobs that this version does not have: their names exist, so that programs import."""

from typing import Any, ClassVar, NamedTuple, NoReturn, Self

from monarch_nb._package import refuse
from monarch_nb.job.state import JobState
from monarch_nb.job.trait import JobTrait

_WORKERS = "Start run_worker_loop_forever on each machine yourself, and attach_to_workers to them"


class _Later:
    """Can be imported, and raises when it is used. `_part` is the part of torchmonarch it belongs to."""

    _part: ClassVar[str]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        cls._refuse()

    @classmethod
    def _refuse(cls) -> NoReturn:
        refuse(cls.__name__, cls._part, _WORKERS)


class _LaterJob(_Later, JobTrait):
    def _create(self, client_script: str | None) -> NoReturn:
        self._refuse()

    def _state(self) -> JobState:
        self._refuse()

    def can_run(self, spec: JobTrait) -> bool:
        """Never: there is no such job yet."""
        return False

    def _kill(self) -> None:
        pass


class ProcessState(NamedTuple):
    """A worker process that a job has started: its number and its address."""

    pid: int
    channel: str


class BatchJob(_LaterJob):
    """A job whose client script runs inside it. Raises NotImplementedError: it is not part of Monarch-NB yet."""

    _part = "batch jobs"
