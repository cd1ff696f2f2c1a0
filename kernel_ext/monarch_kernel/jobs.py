"""Hosts for %mesh from jobs: kept by name, found again after a restart of the kernel, shown while they join."""

import re
import shutil
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from IPython.core.error import UsageError

from monarch_nb.job import EngineError, JobFileError, JobsFileError, JobTrait, Role, job_named, kinds, make_job
from monarch_nb.job.adapter import adapter_of
from monarch_nb.job.adapter_job import jobs_here
from monarch_nb.job.arrival import Progress
from monarch_nb.job.named import described_jobs, find_job, hosts_of, hosts_wanted, job_file, listed_jobs
from monarch_nb.mesh import HostMesh
from monarch_nb.wire import text_of

_COMMANDS = {"slurm": "sbatch", "mpi": "mpirun", "ssh": "ssh"}
_ID = re.compile(r"[0-9a-f]{8}[0-9a-f-]*")  # the beginning of a job's id
_ITS_OWN = ("local", "process")  # kinds whose hosts are always this machine


class Jobs:
    """The jobs that cells of this kernel have requested."""

    def __init__(self) -> None:
        self._used: dict[tuple[str, str, str], JobTrait] = {}

    def hosts(self, name: str, kind: str, dims: Mapping[str, int], arguments: Mapping[str, Any]) -> HostMesh:
        """Returns the hosts for a mesh: of that name in a job of monarch.toml, in a running job, or of a new job.

        Blocks until they have joined, and shows how many have; Ctrl-C ends a job whose hosts are missing.
        Raises UsageError for what is not known, EngineError and HostsMissingError.
        """
        try:
            described = kind in described_jobs()
            runs = not described and kind not in kinds() and _ID.fullmatch(kind) is not None
            exists = described or runs
            job = self._existing(kind) if exists else self._create(name, kind, dims, arguments)
        except (LookupError, JobFileError, JobsFileError, TypeError, ValueError) as error:
            raise UsageError(f"%mesh --job {kind}: {error.args[0] if error.args else error}") from None
        saved = kind if exists else name
        key = (kind, saved, "" if exists else repr((dims.get("hosts"), arguments)))
        job = self._used.setdefault(key, job)
        try:
            hosts = hosts_of(job, name, job_file(saved), _Bar())
        except LookupError as error:
            raise UsageError(f"%mesh --job {kind}: {error.args[0]}") from None
        if exists and "hosts" in dims and dims["hosts"] != len(hosts):
            source = ", as monarch.toml says" if described else ""
            raise UsageError(f"%mesh: {kind} has {len(hosts)} hosts for {name}{source}: leave hosts= out")
        return hosts

    @staticmethod
    def _existing(name: str) -> JobTrait:
        return job_named(name) if name in described_jobs() else find_job(name)

    def _create(self, name: str, kind: str, dims: Mapping[str, int], arguments: Mapping[str, object]) -> JobTrait:
        gpus = None if kind in _ITS_OWN else dims.get("gpus")
        return make_job(kind, {name: Role(hosts=dims.get("hosts", 1), gpus=gpus)}, **arguments)


class JobPlace(NamedTuple):
    """A job that hosts can come from."""

    name: str  # what `--job` takes
    text: str
    why: str  # it cannot be used here; "" if it can
    hosts: dict[str, int]  # of each of its meshes; empty where a mesh has as many as are asked for


def job_places() -> list[JobPlace]:
    """Returns the jobs of monarch.toml, and the kinds of jobs."""
    try:
        described = described_jobs()
    except JobsFileError:
        described = {}
    named = [
        _named_place(name, f"{name} of monarch.toml ({spec.get('kind', '?')})") for name, spec in described.items()
    ]
    return named + [JobPlace(kind, f"{kind} job", _missing(kind), {}) for kind in kinds() if kind not in _ITS_OWN]


def _named_place(name: str, text: str) -> JobPlace:
    try:
        return JobPlace(name, text, "", hosts_wanted(job_named(name)))
    except (LookupError, JobsFileError, OSError) as error:
        return JobPlace(name, text, text_of(error), {})


def running_job_rows() -> tuple[list[dict[str, Any]], str]:
    """Returns the running jobs of this user, and the failed queries, as texts. Blocks: schedulers are asked."""
    problems: list[str] = []
    try:
        listed = listed_jobs(problems.append)
    except JobsFileError as error:
        return [], str(error)
    rows = [
        {
            "id": entry.job.apply_id,
            "label": entry.label,
            "text": f"{entry.kind} job {entry.label}: {entry.meshes}, {entry.hosts}, started {entry.started}",
            "hosts": hosts_wanted(entry.job),
            "here": bool(jobs_here(entry.job.apply_id)),
        }
        for entry in listed
    ]
    return rows, "\n".join(problems)


def end_job(number: str) -> str:
    """Ends a running job, with all that runs on its hosts. Blocks. Raises LookupError, EngineError."""
    for entry in listed_jobs(lambda text: None):
        if entry.job.apply_id == number:
            find_job(entry.name or number).kill()
            return f"ended the {entry.kind} job {entry.label}"
    raise LookupError("that job does not run any more")


def _missing(kind: str) -> str:
    try:
        adapter_of(kind)
    except EngineError as error:
        return text_of(error)
    command = _COMMANDS.get(kind, "")
    return f"there is no {command} here" if command and shutil.which(command) is None else ""


class _Bar:
    """A line of a cell's output, rewritten as hosts join."""

    def __init__(self) -> None:
        self._width = 0

    def __call__(self, progress: Progress) -> None:
        text = progress.bar()
        sys.stdout.write(f"\r{text.ljust(self._width)}" + ("" if progress.missing else "\n"))
        sys.stdout.flush()
        self._width = len(text)
