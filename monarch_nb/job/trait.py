"""What all jobs have in common: they are applied, give their state, are found again by a file, and are ended."""

import contextlib
import logging
import os
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NoReturn, Self

from monarch_nb._absent import refuse
from monarch_nb.job import record as files
from monarch_nb.job.options import MeshAdminConfig, TelemetryConfig
from monarch_nb.job.record import JobFileError, Origin, Record
from monarch_nb.job.state import JobState

logger = logging.getLogger("monarch_nb.job")

DEFAULT_JOB_PATH = ".monarch/job_state.json"
BATCH_FILE = "MONARCH_NB_BATCH_JOB"  # names the file of the job that has started this program
_OWN = frozenset({"_apply_id", "_started", "_origin", "_cached", "_cache_path"})


class JobTrait(ABC):
    """Machines wanted for a program, and once applied, the machines there are.

    A subclass says how: `_create` asks for them, `_state` connects to them, `can_run` tells whether a job that runs
    already will do for another's wishes, `_kill` ends it. Its attributes are saved as JSON; those in `_transient` are
    not, and `_restored` is called where it is read again.
    """

    _transient: frozenset[str] = frozenset()
    _cacheable = True

    def __init__(self) -> None:
        self._fresh()

    def _fresh(self) -> None:
        self._apply_id: str | None = None  # of what was applied
        self._started = 0.0
        self._origin: Origin | None = None
        self._cached: JobTrait | None = None
        self._cache_path: str | None = None

    # -- what a subclass says

    @abstractmethod
    def _create(self, client_script: str | None) -> None:
        """Asks for the machines."""

    @abstractmethod
    def _state(self) -> JobState:
        """Connects to them."""

    @abstractmethod
    def can_run(self, spec: "JobTrait") -> bool:
        """Whether this job, which was applied, runs and has what `spec` wants."""

    @abstractmethod
    def _kill(self) -> None:
        """Gives the machines back."""

    def _lost(self) -> str:
        """What of an applied job is gone, in words; empty while it runs."""
        return "" if self.can_run(self) else "it does not run any more"

    def _wishes(self) -> str:
        """What is asked for, in a few words."""
        return ""

    def _restored(self) -> None:  # noqa: B027 - most need nothing
        """Called after the saved attributes are set."""

    # -- what users do

    def apply(self, client_script: str | None = None) -> None:
        """Brings the job into existence, if it is not there; with `client_script`, it gets that for its client."""
        if self._running is None:
            self._apply_id, self._started, self._origin = str(uuid.uuid4()), time.time(), Origin.here()
            try:
                self._create(client_script)
            except BaseException:
                self._apply_id = None
                raise

    @property
    def _running(self) -> "JobTrait | None":
        return self if self._apply_id is not None else self._cached

    @property
    def active(self) -> bool:
        """Whether it was applied, here or where its file was written."""
        return self._running is not None

    @property
    def apply_id(self) -> str | None:
        """Names what was applied: another one each time. None before."""
        return None if self._running is None else self._running._apply_id

    def state(self, cached_path: str | None = DEFAULT_JOB_PATH) -> JobState:
        """The job's host meshes; applies it first if need be.

        A job that another process has applied and saved at `cached_path` is used again if it still runs and will do,
        and it is said which one that is and since when it runs. One that is gone, or will not do, is ended and said,
        and this job takes its place. None: look for none, save none.
        In a client script of a job the job found is that one, whatever is asked for here.
        Raises JobFileError for a file that others could have written, or that holds no job.
        """
        if self._running is None and cached_path is not None:
            self._cached = _started_by()
            if self._cached is None and self._cacheable:
                self._cached = self._look(cached_path)
        if self._running is None:
            self.apply()
            if cached_path is not None and self._cacheable:
                self._save(cached_path)
        assert self._running is not None
        return self._running._state()

    def kill(self) -> None:
        """Ends the job, and forgets the file it was saved in. Nothing happens if it does not run."""
        running = self._running
        if running is None:
            return
        running._kill()
        path = running._cache_path
        if path is not None:
            with contextlib.suppress(OSError, JobFileError):
                if files.decode(files.read(path), path).apply_id == running._apply_id:
                    os.unlink(os.path.realpath(path))
        running._fresh()
        self._fresh()

    def dumps(self) -> bytes:
        """The job as JSON. Raises TypeError, naming the attribute, for a job with attributes that are no plain data."""
        job = self._running or self
        cls = type(job)
        found = Record(
            format=files.FORMAT,
            kind=f"{cls.__module__}:{cls.__qualname__}",
            fields=files.plain(vars(job), _OWN | cls._transient),
            apply_id=job._apply_id,
            started=job._started,
            origin=job._origin,
        )
        return files.encode(found, cls.__name__)

    def dump(self, filename: str) -> None:
        """Saves the job in a file that only this user can read."""
        files.write(filename, self.dumps())
        (self._running or self)._cache_path = os.path.abspath(filename)

    def __repr__(self) -> str:
        wishes = self._wishes()
        return f"<{type(self).__name__}{' ' + wishes if wishes else ''}{', running' if self.active else ''}>"

    def _told(self) -> str:
        """Which job this is, for people."""
        number = (self._apply_id or "")[:8]
        since = f"started {files.ago(self._started)} {files.origin_text(self._origin)}"
        return f"{type(self).__name__} {number} ({self._wishes()}), {since}"

    def _save(self, path: str) -> None:
        try:
            self.dump(path)
        except TypeError as error:  # it runs, and must not be lost for that
            logger.warning("other processes will not find this job: %s", error)

    def _look(self, path: str) -> "JobTrait | None":
        try:
            cached = job_load(path)
        except FileNotFoundError:
            return None
        if cached._apply_id is None:
            return None
        lost = cached._lost()
        if not lost and cached.can_run(self):
            logger.warning("using a job that runs already: %s. It was found in %s; kill() ends it, state(None) makes a "
                           "new one", cached._told(), path)  # fmt: skip
            return cached
        if lost:
            logger.warning("%s names a job that is gone: %s: %s. A new one is started", path, cached._told(), lost)
        else:
            logger.warning("%s names a job that differs from this one: %s. It is ended, and %r takes its place",
                           path, cached._told(), self)  # fmt: skip
        try:
            cached.kill()
        except Exception:
            logger.warning("that job did not end properly", exc_info=True)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.realpath(path))
        return None

    # -- what torchmonarch adds to a job

    def enable_telemetry(self, config: Any = None, *, mesh_admin_config: Any = None, **kwargs: Any) -> Self:
        """Accepted, and gives the job. Says once that nothing is recorded, and what there is instead.

        Raises TypeError for an option that `TelemetryConfig` does not have.
        """
        if config is None:
            TelemetryConfig(**kwargs)
        _say_once(
            "enable_telemetry: accepted; there is no telemetry server here, so telemetry_url and dashboard_url stay "
            "None. Spans and measurements go to OpenTelemetry where the program sets that up; %meshes, %failures and "
            "mesh.logs() tell of the meshes"
        )
        return self

    def enable_admin(self, config: Any = None, **kwargs: Any) -> Self:
        """Accepted, and gives the job. Says once that no server is started, and what there is instead.

        Raises TypeError for an option that `MeshAdminConfig` does not have.
        """
        if config is None:
            MeshAdminConfig(**kwargs)
        _say_once(
            "enable_admin: accepted; there is no admin server here, so admin_url stays None. In a notebook, %meshes "
            "and the side panel show what the server would"
        )
        return self

    def telemetry_query_client(self) -> NoReturn:
        """Raises NotImplementedError: there is no telemetry to query."""
        refuse("telemetry_query_client", "telemetry by SQL")

    def profile(self, *, on_trace_ready: Callable[[Any], object] | None = None) -> NoReturn:
        """Raises NotImplementedError: there is no such profiler."""
        refuse("profile", "the profiler of distributed telemetry")

    def remote_mount(
        self,
        source: str,
        mntpoint: str | None = None,
        meshes: list[str] | None = None,
        python_exe: str | None = ".venv/bin/python",
        **kwargs: Any,
    ) -> NoReturn:
        """Raises NotImplementedError."""
        refuse("remote_mount", "mounts", "HostMesh.sync_workspace copies folders to hosts")

    def gather_mount(
        self, remote_mount_point: str, local_mount_point: str, meshes: list[str] | None = None
    ) -> NoReturn:
        """Raises NotImplementedError."""
        refuse("gather_mount", "mounts")


_said: set[str] = set()


def _say_once(text: str) -> None:
    if text not in _said:
        _said.add(text)
        logger.warning("%s", text)


def _started_by() -> JobTrait | None:
    """The job of which this program is a client script."""
    path = os.environ.get(BATCH_FILE)
    if not path:
        return None
    try:
        found = job_load(path)
    except FileNotFoundError:
        return None  # it was ended
    logger.info("the hosts are those of the job that has started this program: %s", found._told())
    return found


def _job(data: bytes, where: str, *, load: bool) -> JobTrait:
    found = files.decode(data, where)
    cls = files.find_class(found.kind, load=load)
    if not isinstance(cls, type) or not issubclass(cls, JobTrait):
        raise JobFileError(f"{where} names {found.kind}, which is not a job")
    job: JobTrait = cls.__new__(cls)
    job._fresh()
    vars(job).update({name: value for name, value in found.fields.items() if name not in _OWN | cls._transient})
    job._apply_id, job._started, job._origin = found.apply_id, found.started, found.origin
    try:
        job._restored()
    except Exception as error:
        raise JobFileError(f"{where} holds no {cls.__name__}: {type(error).__name__}: {error}. Remove it") from None
    return job


def job_loads(data: bytes) -> JobTrait:
    """A job from what `dumps` gave. Its class must have been imported. Raises JobFileError."""
    return _job(data, "the given text", load=False)


def job_load(filename: str = DEFAULT_JOB_PATH) -> JobTrait:
    """A job from its file; the module of its class is imported.

    Raises FileNotFoundError, and JobFileError for a file that others could have written or that holds no job.
    """
    job = _job(files.read(filename), filename, load=True)
    job._cache_path = os.path.abspath(filename)
    return job
