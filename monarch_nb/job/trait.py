"""Common behaviour of all jobs: they are applied, have a state, are found again by a file, and are ended.

Methods of torchmonarch's jobs that do not concern machines exist too, as programs call them: mounts are copies,
telemetry and an admin server are accepted with one notice, the others raise.
"""

import contextlib
import logging
import os
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn, Self

import msgspec

from monarch_nb._package import refuse
from monarch_nb.job import record as files
from monarch_nb.job.mounts import JobMounts, WantedMount, say_once
from monarch_nb.job.record import JobFileError, JobOrigin, JobRecord
from monarch_nb.mesh import HostMesh
from monarch_nb.wire import converted, counted

logger = logging.getLogger("monarch_nb.job")
DEFAULT_JOB_PATH = ".monarch/job_state.json"
BATCH_FILE = "MONARCH_NB_BATCH_JOB"  # the file of the job that has started this program
_OWN = frozenset({"_applied", "_cached", "_mounts", "_applying"})


@dataclass
class TelemetryConfig:
    """Options of `enable_telemetry`."""

    retention_secs: int = 3600
    include_dashboard: bool = False
    dashboard_port: int = 8265
    snapshot_interval_secs: float = 30.0


@dataclass
class MeshAdminConfig:
    """Options of `enable_admin`."""

    admin_addr: str | None = None


class UpstreamServices:
    """Methods for all jobs that do not concern machines."""

    _wanted_mounts: tuple[WantedMount, ...] = ()

    def enable_telemetry(self, config: Any = None, *, mesh_admin_config: Any = None, **kwargs: Any) -> Self:
        """Accepted; returns the job. Logs once that nothing is recorded, and what exists instead.

        Raises TypeError for an option that `TelemetryConfig` does not have.
        """
        if config is None:
            TelemetryConfig(**kwargs)
        say_once(
            logger,
            "enable_telemetry: accepted; there is no telemetry server here, so telemetry_url and dashboard_url stay "
            "None. Spans and measurements go to OpenTelemetry where the program sets that up; %meshes, %failures and "
            "mesh.logs() describe the meshes",
        )
        return self

    def enable_admin(self, config: Any = None, **kwargs: Any) -> Self:
        """Accepted; returns the job. Logs once that no server is started, and what exists instead.

        Raises TypeError for an option that `MeshAdminConfig` does not have.
        """
        if config is None:
            MeshAdminConfig(**kwargs)
        say_once(
            logger,
            "enable_admin: accepted; there is no admin server here, so admin_url stays None. In a notebook, %meshes "
            "and the side panel show what the server would",
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
        **_tuning: object,
    ) -> None:
        """Makes `state()` copy a folder of this machine to the hosts of `meshes`, None for all; again, its changes.

        It is copied to `mntpoint`, by default the same path. Their processes run `python_exe`, a path in the folder;
        None: the default interpreter. Further arguments, which tune torchmonarch's file system, have no effect. Raises
        ValueError if the Python does not exist.
        """
        self._wanted_mounts = (*self._wanted_mounts, WantedMount.to_hosts(source, mntpoint, meshes, python_exe))

    def gather_mount(self, remote_mount_point: str, local_mount_point: str, meshes: list[str] | None = None) -> None:
        """Makes `state()` gather a folder of the hosts of `meshes`, None for all, below `local_mount_point` here.

        Each of several meshes gets a folder with its name. `kill()` removes the copies.
        """
        mount = WantedMount.to_here(remote_mount_point, local_mount_point, meshes)
        self._wanted_mounts = (*self._wanted_mounts, mount)


class JobState:
    """The host meshes of a job, as attributes. Attributes of telemetry and admin servers, which do not exist here, are
    None: a program's own job class may set them.
    """

    def __init__(
        self,
        hosts: Mapping[str, HostMesh],
        query_engine: Any = None,
        query_engine_client: Any = None,
        telemetry_url: str | None = None,
        dashboard_url: str | None = None,
        admin_url: str | None = None,
    ) -> None:
        self._hosts = dict(hosts)
        self.query_engine = query_engine
        self.query_engine_client = query_engine_client
        self.telemetry_url = telemetry_url
        self.dashboard_url = dashboard_url
        self.admin_url = admin_url

    def __getattr__(self, name: str) -> HostMesh:
        hosts: dict[str, HostMesh] = self.__dict__.get("_hosts", {})
        if name in hosts:
            return hosts[name]
        raise AttributeError(f"{name!r} is not a host mesh of this job. It has: {', '.join(sorted(hosts)) or 'none'}")

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._hosts})

    def __repr__(self) -> str:
        return f"JobState({', '.join(_mesh_text(name, mesh) for name, mesh in self._hosts.items())})"


def _mesh_text(name: str, mesh: HostMesh) -> str:
    spares = len(mesh.spares)
    return f"{name}={counted(len(mesh), 'host')}" + (f" and {counted(spares, 'spare')}" if spares else "")


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
        with self._one_thread:
            if self._running is None:
                self._applied = AppliedRecord(str(uuid.uuid4()), time.time(), JobOrigin.here())
                try:
                    self._create(client_script)
                except BaseException:
                    self._applied = AppliedRecord()
                    raise

    @property
    def _one_thread(self) -> "threading.RLock":
        """The lock of the thread that applies this job; made here, since subclasses may be made by `__new__` alone."""
        lock: threading.RLock = vars(self).setdefault("_applying", threading.RLock())
        return lock

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name != "_applying"}

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
        its place. While that process starts it, this one waits, with a message. None: look for no job, save none. In a
        client script of a job, that job is used, whatever is requested here.
        Opens the job's mounts, and copies changes of the open ones; blocks meanwhile.
        Raises JobFileError for a file that others could have written, or that holds no job, and RuntimeError for a
        mount that failed.
        """
        with self._one_thread:
            if self._running is None and cached_path is not None:
                self._cached = _parent_job()
            if self._running is None and cached_path is not None and self._cacheable:
                with files.lock_of(cached_path):
                    self._cached = self._load_cached(cached_path)
                    if self._cached is None:
                        self.apply()
                        self._save(cached_path)
            self.apply()
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
        path, apply_id = running._applied.path, running._applied.apply_id
        self._end(running)
        if path is None or not os.path.lexists(path):
            return
        with files.lock_of(path), contextlib.suppress(OSError, JobFileError):  # another process may save its job there
            if files.decode(files.read(path), path).apply_id == apply_id:
                os.unlink(os.path.realpath(path))

    def _end(self, running: "JobTrait") -> None:
        """Ends the job, and leaves its file."""
        self._mounts.close()
        running._kill()
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
            cached._end(cached)
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
