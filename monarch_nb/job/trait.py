"""Common behaviour of all jobs: they are applied, have a state, are found again by a file, and are ended."""

import contextlib
import logging
import os
import time
import uuid
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Self

import msgspec

from monarch_nb._package import refuse
from monarch_nb.job import record as files
from monarch_nb.job.mounts import JobMounts, WantedMount
from monarch_nb.job.record import JobFileError, JobOrigin, JobRecord
from monarch_nb.job.state import JobState
from monarch_nb.job.upstream import UpstreamServices
from monarch_nb.wire import converted

logger = logging.getLogger("monarch_nb.job")

DEFAULT_JOB_PATH = ".monarch/job_state.json"
BATCH_FILE = "MONARCH_NB_BATCH_JOB"  # the file of the job that has started this program
_OWN = frozenset({"_applied", "_cached", "_mounts"})


@dataclass
class AppliedRecord:
    """The record of an applied job; empty before it is applied, and after it was ended."""

    apply_id: str | None = None  # a new one each time
    started: float = 0.0  # wall clock, seconds
    origin: JobOrigin | None = None
    path: str | None = None  # the file it was saved in


class JobTrait(UpstreamServices, ABC):
    """Machines requested for a program, and once applied, its actual machines.

    A subclass defines how: `_create` requests them, `_state` connects to them, `can_run` decides whether a running job
    fits another job's request, `_kill` ends it. Its attributes are saved as JSON, except those in `_transient`, and
    `_restored` is called where it is read again. Fields of `_form` are checked against its types when they are read;
    other attributes are plain data.
    """

    _transient: frozenset[str] = frozenset()
    _form: ClassVar[type[msgspec.Struct] | None] = None
    _cacheable = True

    def __init__(self) -> None:
        self._fresh()

    def _fresh(self) -> None:
        self._applied = AppliedRecord()
        self._cached: JobTrait | None = None  # the job that is used instead of this one
        self._mounts = JobMounts()

    # -- for subclasses to define

    @abstractmethod
    def _create(self, client_script: str | None) -> None:
        """Requests the machines."""

    @abstractmethod
    def _state(self) -> JobState:
        """Connects to the machines."""

    @abstractmethod
    def can_run(self, spec: "JobTrait") -> bool:
        """Returns whether this applied job runs and satisfies `spec`."""

    @abstractmethod
    def _kill(self) -> None:
        """Releases the machines."""

    def _lost(self) -> str:
        """Returns which parts of an applied job are gone, for people; empty while it runs."""
        return "" if self.can_run(self) else "it does not run any more"

    def _wishes(self) -> str:
        """Returns the request in a few words."""
        return ""

    def _restored(self) -> None:
        """Called after the saved attributes are set."""

    # -- for users

    def apply(self, client_script: str | None = None) -> None:
        """Creates the job if it does not exist; a job that takes `client_script` runs it as its client."""
        if self._running is None:
            self._applied = AppliedRecord(str(uuid.uuid4()), time.time(), JobOrigin.here())
            try:
                self._create(client_script)
            except BaseException:
                self._applied = AppliedRecord()
                raise

    @property
    def _running(self) -> "JobTrait | None":
        return self if self._applied.apply_id is not None else self._cached

    @property
    def active(self) -> bool:
        """True if the job was applied, here or where its file was written."""
        return self._running is not None

    @property
    def apply_id(self) -> str | None:
        """Id of the applied job, a new one each time; None before."""
        return None if self._running is None else self._running._applied.apply_id

    def state(self, cached_path: str | None = DEFAULT_JOB_PATH) -> JobState:
        """Returns the job's host meshes; applies it first if need be.

        A job that another process has applied and saved at `cached_path` is used again if it still runs and fits; a
        message names it and its start. If it is gone, or does not fit, it is ended with a message, and this job takes
        its place. None: look for no job, save none. In a client script of a job, that job is used, whatever is
        requested here.
        Opens the job's mounts, and copies changes of the open ones; blocks meanwhile.
        Raises JobFileError for a file that others could have written, or that holds no job, and RuntimeError for a
        mount that failed.
        """
        if self._running is None and cached_path is not None:
            self._cached = _parent_job()
            if self._cached is None and self._cacheable:
                self._cached = self._load_cached(cached_path)
        if self._running is None:
            self.apply()
            if cached_path is not None and self._cacheable:
                self._save(cached_path)
        running = self._running
        assert running is not None
        state = running._state()
        mounts = self._wanted_mounts or running._wanted_mounts
        self._mounts.follow(mounts, state._hosts)
        for mount in mounts:
            for mesh in mount.meshes_of(state._hosts) if mount.python else ():
                state._hosts[mesh] = state._hosts[mesh].with_python_executable(mount.python)
        return state

    def kill(self) -> None:
        """Ends the job, and forgets the file it was saved in. Does nothing if the job does not run."""
        running = self._running
        if running is None:
            return
        self._mounts.close()
        running._kill()
        path = running._applied.path
        if path is not None:
            with contextlib.suppress(OSError, JobFileError):
                if files.decode(files.read(path), path).apply_id == running._applied.apply_id:
                    os.unlink(os.path.realpath(path))
        running._fresh()
        self._fresh()

    def dumps(self) -> bytes:
        """Returns the job as JSON. Raises TypeError, naming the attribute, for attributes that are not plain data."""
        job = self._running or self
        cls = type(job)
        record = JobRecord(
            format=files.FORMAT,
            kind=f"{cls.__module__}:{cls.__qualname__}",
            fields=files.plain(vars(job), _OWN | cls._transient),
            apply_id=job._applied.apply_id,
            started=job._applied.started,
            origin=job._applied.origin,
        )
        return files.encode(record, cls.__name__)

    def dump(self, filename: str) -> None:
        """Saves the job in a file that only this user can read."""
        files.write(filename, self.dumps())
        (self._running or self)._applied.path = os.path.abspath(filename)

    def __repr__(self) -> str:
        wishes = self._wishes()
        return f"<{type(self).__name__}{' ' + wishes if wishes else ''}{', running' if self.active else ''}>"

    def _describe(self) -> str:
        """Describes the job for people."""
        number = (self._applied.apply_id or "")[:8]
        origin = f"started {files.ago(self._applied.started)} {files.origin_text(self._applied.origin)}"
        return f"{type(self).__name__} {number} ({self._wishes()}), {origin}"

    def _save(self, path: str) -> None:
        try:
            self.dump(path)
        except TypeError as error:  # it runs, and must not be lost because of this error
            logger.warning("other processes will not find this job: %s", error)

    def _load_cached(self, path: str) -> "JobTrait | None":
        try:
            cached = load_file(path)
        except FileNotFoundError:
            return None
        if cached._applied.apply_id is None:
            return None
        lost = cached._lost()
        if not lost and cached.can_run(self):
            logger.warning("using a job that runs already: %s. It was found in %s; kill() ends it, state(None) makes a "
                           "new one", cached._describe(), path)  # fmt: skip
            return cached
        if lost:
            logger.warning("%s names a job that is gone: %s: %s. A new one is started", path, cached._describe(), lost)
        else:
            logger.warning("%s names a job that differs from this one: %s. It is ended, and %r takes its place",
                           path, cached._describe(), self)  # fmt: skip
        try:
            cached.kill()
        except Exception:
            logger.warning("that job did not end properly", exc_info=True)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.realpath(path))
        return None


class BatchJob(JobTrait):
    """A job whose client script runs inside it: in name only."""

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        """Raises NotImplementedError, with an alternative."""
        refuse(
            cls.__name__,
            "batch jobs",
            "Start run_worker_loop_forever on each machine yourself, and attach_to_workers to them",
        )


def _parent_job() -> JobTrait | None:
    """Returns the job of which this program is a client script."""
    path = os.environ.get(BATCH_FILE)
    if not path:
        return None
    try:
        job = load_file(path)
    except FileNotFoundError:
        return None  # ended
    logger.info("the hosts are those of the job that has started this program: %s", job._describe())
    return job


def job_from(data: bytes, source: str, *, load: bool) -> JobTrait:
    """Returns a job from the output of `dumps`; with `load` the module of its class is imported."""
    record = files.decode(data, source)
    cls = files.find_class(record.kind, load=load)
    if not isinstance(cls, type) or not issubclass(cls, JobTrait):
        raise JobFileError(f"{source} names {record.kind}, which is not a job")
    job: JobTrait = cls.__new__(cls)
    job._fresh()
    job._applied = AppliedRecord(record.apply_id, record.started, record.origin)
    fields = files.plain(record.fields, _OWN | cls._transient)
    try:
        if cls._form is not None:
            fields.update(msgspec.structs.asdict(converted(fields, cls._form)))
        vars(job).update(fields)
        job._wanted_mounts = tuple(map(WantedMount.saved, job._wanted_mounts))
        job._restored()
    except Exception as error:
        raise JobFileError(f"{source} holds no {cls.__name__}: {type(error).__name__}: {error}. Remove it") from None
    return job


def job_loads(data: bytes) -> JobTrait:
    """Returns a job from the output of `dumps`. Its class must have been imported. Raises JobFileError."""
    return job_from(data, "the given text", load=False)


def load_file(filename: str) -> JobTrait:
    """Returns a job from its file; the module of its class is imported.

    Raises FileNotFoundError, and JobFileError for a file that others could have written or that holds no job.
    """
    job = job_from(files.read(filename), filename, load=True)
    job._applied.path = os.path.abspath(filename)
    return job
