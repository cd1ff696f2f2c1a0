"""Jobs by name, of `monarch.toml` or a folder; jobs made from a kind and plain arguments; the jobs of meshes.

Jobs of another process are reopened in this one: tunnels to their hosts, and hosts for meshes that came from there.
"""

import difflib
import importlib
import inspect
import logging
import os
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from monarch_nb._package import more, on_exit
from monarch_nb.job.adapter import EngineError, Role, adapter_of, kinds
from monarch_nb.job.adapter_job import AdapterJob, WrittenHosts, jobs_here, running_jobs
from monarch_nb.job.arrival import Progress
from monarch_nb.job.elastic import JobHosts
from monarch_nb.job.kubernetes import ImageSpec, KubeConfig, KubernetesJob
from monarch_nb.job.lightning import LightningJob
from monarch_nb.job.mpi import MPIJob
from monarch_nb.job.process import LocalJob, ProcessJob
from monarch_nb.job.ray import RayJob
from monarch_nb.job.record import JobFileError, TunnelRecord, ago, read, write
from monarch_nb.job.skypilot import SkyPilotJob
from monarch_nb.job.slurm import SlurmJob
from monarch_nb.job.ssh import SSHJob
from monarch_nb.job.trait import DEFAULT_JOB_PATH, JobTrait, job_from, load_file
from monarch_nb.lifecycle.elastic import source_of_mesh
from monarch_nb.mesh import HostMesh
from monarch_nb.mesh.host_record import NoMoreHostsError
from monarch_nb.transport import knock
from monarch_nb.wire import converted, json_decoder, kind_of

logger = logging.getLogger("monarch_nb.job")
FILE = "monarch.toml"
SHORT = 8  # characters of an id that people see
_CURRENT = ".monarch/current_job"  # contains `module.attribute`
_KNOCK_S = 1.0
_COME_S = 5.0  # for hosts without a mesh to be attached
_CLASSES: dict[str, type[AdapterJob]] = {
    "lightning": LightningJob,
    "mpi": MPIJob,
    "process": ProcessJob,
    "ray": RayJob,
    "skypilot": SkyPilotJob,
    "slurm": SlurmJob,
    "ssh": SSHJob,
}
_OF_IMAGES = tuple(inspect.signature(ImageSpec).parameters)
_MORE = more("guides/jobs.md#in-a-notebook")


class JobsFileError(ValueError):
    """A monarch.toml that cannot be read, or that describes no job; the text has the place and the problem."""


def find_file(start: "str | os.PathLike[str] | None" = None) -> Path | None:
    """Returns the monarch.toml of a folder, or of one above it, or None."""
    base = Path(start or ".").absolute()
    return next((folder / FILE for folder in (base, *base.parents) if (folder / FILE).is_file()), None)


def described_jobs(file: Path | None = None) -> dict[str, dict[str, object]]:
    """Returns the description of each job in the file, by name: `[jobs.lab]`, with `kind`, `meshes`, and its arguments.

    The default is the file of this folder. `job_named` and `wrong_jobs` report what is wrong with a table. Raises
    JobsFileError for a file that cannot be read.
    """
    file = file or find_file()
    if file is None:
        return {}
    try:
        jobs = tomllib.loads(file.read_text("utf-8")).get("jobs", {})
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise JobsFileError(f"{file}: {error}") from None
    except OSError as error:
        raise JobsFileError(f"{file} cannot be read: {error.strerror}") from None
    if not isinstance(jobs, dict):
        raise JobsFileError(f"{file}: jobs is no table: write [jobs.NAME] above each of them{_MORE}")
    return jobs


def wrong_jobs(file: Path | None = None) -> dict[str, str]:
    """Returns what is wrong with jobs that the file describes, by name. Raises as `described_jobs` does."""
    problems = {}
    for name, table in described_jobs(file).items():
        try:
            _described_job(name, table, file)
        except JobsFileError as error:
            problems[name] = str(error)
    return problems


def job_named(name: str, file: Path | None = None) -> JobTrait:
    """Returns the job that monarch.toml describes under a name; nothing is started.

    Raises LookupError for a name that the file does not have, JobsFileError for a wrong description.
    """
    jobs = described_jobs(file)
    if name not in jobs:
        file = file or find_file()
        if file is None:
            raise LookupError(f"there is no job {name!r}: neither this folder nor one above has a {FILE}{_MORE}")
        raise LookupError(
            f"there is no job {name!r}{_suggestion(name, jobs)}: {file} has {', '.join(sorted(jobs)) or 'none'}"
        )
    return _described_job(name, jobs[name], file)


def _described_job(name: str, table: object, file: Path | None) -> JobTrait:
    """Makes the job of a table, of that file or of the one of this folder. Raises JobsFileError."""
    file = file or find_file()
    if not isinstance(table, dict) or not isinstance(table.get("kind"), str) or not table.get("meshes"):
        raise JobsFileError(
            f'{file}: [jobs.{name}] needs a kind and meshes: kind = "slurm", meshes = {{ a = 4 }}{_MORE}'
        )
    arguments = dict(table)
    try:
        return make_job(arguments.pop("kind"), arguments.pop("meshes"), **arguments)
    except (TypeError, ValueError, LookupError, EngineError) as error:
        message = error.args[0] if isinstance(error, LookupError) and error.args else error
        raise JobsFileError(f"{file}: [jobs.{name}]: {message}") from None


def _suggestion(word: str, names: Iterable[str]) -> str:
    """Returns a question for the name that was probably meant, or ""."""
    matches = difflib.get_close_matches(word, list(names), 1, 0.7)
    return f" (did you mean {matches[0]}?)" if matches else ""


def job_file(name: str) -> str:
    """Returns the path at which a job of that name is saved, for other processes: beside monarch.toml, else here."""
    file = find_file()
    return str((file.parent if file is not None else Path()) / ".monarch" / "jobs" / f"{name}.json")


def job_load(filename: str = DEFAULT_JOB_PATH) -> JobTrait:
    """Returns a job from its file, or by its name: in monarch.toml, or of the notebook's mesh it was started for.

    Without arguments it is the job that a program of this folder has saved, else the only one started by name. The
    module of its class is imported. Raises FileNotFoundError, which names the existing ones, and JobFileError for a
    file that others could have written or that holds no job.
    """
    if os.path.exists(filename):
        return load_file(filename)
    named = filename == os.path.basename(filename)
    if named and os.path.exists(job_file(filename)):
        return load_file(job_file(filename))
    names = sorted(path.stem for path in Path(job_file("")).parent.glob("*.json"))
    if filename == DEFAULT_JOB_PATH and len(names) == 1:
        return load_file(job_file(names[0]))
    started = (
        f"by name {', '.join(names)} {'was' if len(names) == 1 else 'were'} started" if names else "none was started"
    )
    if named and filename in described_jobs():
        raise FileNotFoundError(f"{filename} was not started from this folder: monarch-nb job start {filename}")
    hint = f": say which, as job_load({names[0]!r})" if len(names) > 1 else ""
    raise FileNotFoundError(f"there is no job in {filename}, and {started} from this folder{hint}")


class ListedJob(NamedTuple):
    """A job that runs, with its state according to its scheduler."""

    job: AdapterJob
    name: str  # in monarch.toml; "" if it is not in there
    hosts: str  # numbers of running and waiting hosts

    @property
    def kind(self) -> str:
        """The kind of job."""
        return self.job._kind

    @property
    def label(self) -> str:
        """The beginning of its id, and its name."""
        return f"{str(self.job.apply_id)[:SHORT]}{f' ({self.name})' if self.name else ''}"

    @property
    def started(self) -> str:
        """When it was started, for people."""
        return ago(self.job._applied.started)

    @property
    def meshes(self) -> str:
        """Its meshes, with their numbers of hosts."""
        return self.job._wishes()


def listed_jobs(report: Callable[[str], object]) -> list[ListedJob]:
    """Returns the jobs of this user that run; calls `report` with errors of schedulers. Blocks.

    Raises JobsFileError.
    """
    names = {}
    for name in described_jobs():
        try:
            saved = saved_job(job_file(name))
        except JobFileError as error:
            report(f"{name}: {error}")
            continue
        if saved is not None:
            names[saved.apply_id] = name
    return [ListedJob(job, names.get(job.apply_id, ""), _hosts_text(job, report)) for job in _all_running(report)]


def _hosts_text(job: AdapterJob, report: Callable[[str], object]) -> str:
    try:
        states = [agent.state for agent in job._adapter.look(job._job).values()]
    except EngineError as error:
        report(f"{job._kind}: {error}")
        return "not known"
    counts = {state: states.count(state) for state in ("running", "waiting", "ended")}
    return ", ".join(f"{count} {state}" for state, count in counts.items() if count) or "not known"


def _all_running(report: Callable[[str], object]) -> list[AdapterJob]:
    jobs = []
    for kind in kinds():
        try:
            jobs += running_jobs(kind)
        except EngineError as error:
            if not isinstance(error.__cause__, ModuleNotFoundError):  # no jobs of a kind without its package
                report(f"{kind}: {error}")
    return jobs


def saved_job(path: str) -> JobTrait | None:
    """Returns the job in a file; None if there is no such file. Raises JobFileError."""
    try:
        return load_file(path)
    except FileNotFoundError:
        return None


def find_job(word: str, report: Callable[[str], object] = logger.warning) -> AdapterJob:
    """Returns the job of that name in monarch.toml, or with that start of its id. Raises LookupError, JobFileError."""
    if word in described_jobs() or (word == os.path.basename(word) and os.path.exists(job_file(word))):
        saved = saved_job(job_file(word))
        if not isinstance(saved, AdapterJob):
            raise LookupError(f"{word} was not started from this folder: monarch-nb job start {word}")
        return saved
    jobs = [job for job in _all_running(report) if word and str(job.apply_id).startswith(word)]
    if len(jobs) != 1:
        listed = f"monarch.toml describes {', '.join(described_jobs()) or 'none'}"
        raise LookupError(f"{len(jobs) or 'no'} jobs that run begin with {word!r}, and {listed}: monarch-nb job ls")
    return jobs[0]


def hosts_wanted(job: JobTrait) -> dict[str, int]:
    """Returns how many hosts each mesh of a job has."""
    return dict(job._meshes) if isinstance(job, AdapterJob) else {}


def arguments_of(kind: str) -> frozenset[str]:
    """Returns the names of the arguments that jobs of a kind take, beside their meshes."""
    if kind == "kubernetes":
        names = {
            *inspect.signature(KubernetesJob).parameters,
            *_OF_IMAGES,
            "port",
            "secret",
            "label_selector",
            "spares",
        }
        return frozenset(names)
    cls = _CLASSES.get(kind)
    parameters = frozenset() if cls is None else frozenset(inspect.signature(cls).parameters) - {"meshes"}
    return parameters | {"keep", "spares"} if parameters else parameters


def make_job(kind: str, meshes: Mapping[str, Any], **arguments: Any) -> JobTrait:
    """Makes a job of a kind. `meshes` has for each name a number of hosts, a `Role`, its fields, or the kind's form.

    `keep` is the argument of `keep_for`; `spares` is the number for each mesh that does not have its own.
    Raises LookupError for an unknown kind, TypeError and ValueError for arguments that it does not take.
    """
    if kind == "local":
        return LocalJob(tuple(meshes))
    if "keep" in arguments:
        keep = arguments.pop("keep")
        job = make_job(kind, meshes, **arguments)
        if isinstance(job, AdapterJob):
            job.keep_for(keep)
        return job
    accepted = arguments_of(kind)
    for unknown in (name for name in arguments if accepted and name not in accepted):
        hint = _suggestion(unknown, accepted) or f": it takes {', '.join(sorted(accepted))}"
        raise TypeError(f"a {kind} job takes no {unknown!r}{hint}")
    if kind == "ssh":
        return SSHJob(meshes=meshes, **arguments)
    if kind == "kubernetes":
        return _kubernetes(meshes, arguments)
    spares = arguments.pop("spares", 0)
    roles = {name: _role(name, spec, spares) for name, spec in meshes.items()}
    cls: Callable[..., JobTrait] | None = _CLASSES.get(kind)
    if cls is not None:
        return cls(roles, **arguments)
    if kind not in kinds():
        raise LookupError(
            f"there is no kind of jobs {kind!r} here{_suggestion(kind, kinds())}: there are {', '.join(kinds())}"
        )
    return AdapterJob(kind, roles, arguments.pop("env", None), options=arguments)


def _role(name: str, spec: object, spares: int) -> Role:
    try:
        role = spec if isinstance(spec, Role) else Role(hosts=spec) if isinstance(spec, int) else converted(spec, Role)
    except msgspec.ValidationError as error:
        raise ValueError(f"{name}: {error}") from None
    return msgspec.structs.replace(role, spares=role.spares or spares)


def _kubernetes(meshes: Mapping[str, Any], arguments: dict[str, Any]) -> KubernetesJob:
    config = arguments.pop("kubeconfig", None)
    common = {name: arguments.pop(name) for name in (*_OF_IMAGES, "port", "secret", "label_selector", "spares")
              if name in arguments}  # fmt: skip
    job = KubernetesJob(kubeconfig=None if config is None else KubeConfig.from_path(config), **arguments)
    for name, entry in meshes.items():
        if isinstance(entry, Role):
            resources = {"resources": {"nvidia.com/gpu": entry.gpus}} if entry.gpus else {}
            entry = {"hosts": entry.hosts, **({"spares": entry.spares} if entry.spares else {}), **resources}
        options = {**common, **({"hosts": entry} if isinstance(entry, int) else entry)}
        image = {key: options.pop(key) for key in _OF_IMAGES if key in options}
        spec = ImageSpec(**image) if "image" in image else None
        job.add_mesh(name, options.pop("hosts", 1), image_spec=spec, **options)
    return job


def hosts_of(job: JobTrait, name: str, path: str, report: Callable[[Progress], object]) -> HostMesh:
    """Returns the hosts of a job's mesh; starts the job if it does not run, and saves it at `path`; its only mesh may
    have any name.

    Blocks until the hosts have joined; calls `report` with the progress. Ctrl-C ends the job while some are missing.
    Raises LookupError for an unknown mesh, EngineError and HostsMissingError.
    """
    running = job._running
    if running is not None and running._lost():
        logger.warning("a job is gone: %s: %s. A new one is started", running._describe(), running._lost())
        job.kill()
    meshes = job.state(path)._hosts
    if name not in meshes and len(meshes) != 1:
        raise LookupError(f"the job has no mesh {name!r}: it has {', '.join(meshes)}")
    running = job._running
    if isinstance(running, AdapterJob) and not isinstance(running, LocalJob):
        running.wait(tell=report)
    return meshes[name] if name in meshes else next(iter(meshes.values()))


def hosts_from_config(name: str) -> HostMesh:
    """Returns the host mesh of that name; in this version always two worker processes on this machine.

    They end with this process.
    """
    job = ProcessJob({name: 2})
    job.apply()
    on_exit(job.kill)
    return job._state()._hosts[name]


def set_current_job(module_path: str) -> None:
    """Makes the job at `module.attribute` the current one of this folder. Nothing is imported yet.

    Raises ValueError for an invalid path.
    """
    parts = module_path.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise ValueError(f"{module_path!r} does not name a job: it should look like module.attribute")
    write(_CURRENT, module_path.encode() + b"\n")


def load_current_job() -> JobTrait:
    """Returns the current job of this folder, as its module defines it; its `state()` finds it where it runs.

    Raises FileNotFoundError if none was set, AttributeError or TypeError if there is no job of that name.
    """
    try:
        module_path = read(_CURRENT).decode().strip()
    except FileNotFoundError:
        raise FileNotFoundError(
            f"no current job in {Path.cwd()}: set_current_job('module.attribute') names one"
        ) from None
    name, _, attribute = module_path.rpartition(".")
    module = importlib.import_module(name)
    job = getattr(module, attribute, None)
    if job is None:
        raise AttributeError(f"module {name!r} has no {attribute!r}")
    if not isinstance(job, JobTrait):
        raise TypeError(f"{module_path} is {kind_of(job)}, not a job")
    return job


def opened(written: str) -> str:
    """Opens a recorded tunnel, and returns its endpoint on this machine; blocks. It lives as long as this process.

    Raises EngineError with the scheduler's message.
    """
    try:
        tunnel = json_decoder(TunnelRecord).decode(written)
        adapter = adapter_of(tunnel.job.kind)
    except (msgspec.MsgspecError, LookupError) as error:
        raise EngineError(f"there is no way to it that this version knows: {error}") from None
    adapter.hold(tunnel.job, True)
    joins = adapter.join(tunnel.job, tunnel.name, tunnel.joins)
    address = next((join for join in joins if knock(join, _KNOCK_S)), "")
    if not address:
        raise EngineError(f"{tunnel.name} of the {tunnel.job.kind} job {tunnel.job.job[:8]} does not answer")
    return address


def hosts_again(written: str) -> JobHosts:
    """Returns the source of a mesh's hosts from another process's record. Blocks while its hosts are looked for.

    Raises NoMoreHostsError if the job cannot be loaded here.
    """
    try:
        record = json_decoder(WrittenHosts).decode(written)
        job = job_from(record.job.encode(), "the record of the mesh", load=True)
        if not isinstance(job, AdapterJob):
            raise JobFileError(f"{kind_of(job)} gives no hosts")
        for local in jobs_here(job.apply_id):
            return local.source(record.mesh)
        job.taken_up()
    except (msgspec.MsgspecError, EngineError, JobFileError, LookupError) as error:
        raise NoMoreHostsError(f"the job that gave the mesh its hosts cannot be asked: {error}") from None
    job._applied.path = record.path if record.path is not None and _is_at(record.path, job) else None
    hosts = job.source(record.mesh)
    for arrival in job.arrivals:
        arrival.wait(_COME_S)
    return hosts


def job_of(mesh: object) -> AdapterJob:
    """Returns the job of a mesh's hosts, also of an attached mesh. Blocks for some seconds at first.

    Raises LookupError for a mesh whose hosts belong to no job, NoMoreHostsError if the job cannot be loaded here.
    """
    source = source_of_mesh(mesh)
    if not isinstance(source, JobHosts) or not isinstance(source.job, AdapterJob):
        raise LookupError(f"the hosts of {mesh!r} are of no job")
    return source.job


def _is_at(path: str, job: AdapterJob) -> bool:
    """Returns whether a file still holds this job."""
    try:
        return os.path.exists(path) and load_file(path).apply_id == job.apply_id
    except (OSError, JobFileError):
        return False


class HostOfJob(Struct, frozen=True):
    """One host according to its scheduler."""

    name: str
    runs: bool
    description: str  # of the scheduler
    addresses: tuple[str, ...]  # where this process would reach it; empty while unknown
    key: Path | None  # of the job
    wrong: str = ""  # with the tunnel to it


def hosts_of_job(job: AdapterJob) -> list[HostOfJob]:
    """Returns all hosts of a job. Blocks; opens its tunnels. Raises EngineError if the scheduler cannot be asked."""
    running, hosts = job._job, []
    key = Path(running.folder, "key")
    job._adapter.hold(running, True)
    for name, state in job._adapter.look(running).items():
        joins: tuple[str, ...] = ()
        problem = ""
        if state.state == "running" and state.joins:
            try:
                joins = tuple(job._adapter.join(running, name, state.joins))
            except EngineError as error:
                problem = str(error)
        hosts.append(
            HostOfJob(name, state.state == "running", state.description, joins, key if key.exists() else None, problem)
        )
    return hosts
