"""Hosts for %mesh from jobs: kept by name, found again after a restart of the kernel, shown while they join."""

import shutil
import sys
from collections.abc import Mapping
from typing import Any

from IPython.core.error import UsageError

from monarch_nb.job import EngineError, JobsFileError, JobTrait, Role, job_named, kinds, make_job
from monarch_nb.job.kinds import adapter_of
from monarch_nb.job.named import described_jobs, hosts_of, job_file
from monarch_nb.job.progress import Progress
from monarch_nb.mesh import HostMesh
from monarch_nb.wire import text_of

_COMMANDS = {"slurm": "sbatch", "mpi": "mpirun", "ssh": "ssh"}
_ITS_OWN = ("local", "process")  # kinds whose hosts are this machine, whatever they are asked for


class Jobs:
    """The jobs that cells of this kernel have asked for."""

    def __init__(self) -> None:
        self._used: dict[tuple[str, str, str], JobTrait] = {}

    def hosts(self, name: str, kind: str, dims: Mapping[str, int], arguments: Mapping[str, Any]) -> HostMesh:
        """The hosts for a mesh: those of that name in the job of monarch.toml, or of a new job of the kind.

        Blocks until they have joined, and shows how many have; Ctrl-C ends a job whose hosts are missing.
        Raises UsageError for what is not known, EngineError and HostsMissingError.
        """
        try:
            described = described_jobs()
            job = job_named(kind) if kind in described else self._made(name, kind, dims, arguments)
        except (LookupError, JobsFileError, TypeError, ValueError) as error:
            raise UsageError(f"%mesh --job {kind}: {error.args[0] if error.args else error}") from None
        saved = kind if kind in described else name
        key = (kind, saved, repr((dims.get("hosts"), arguments)) if kind not in described else "")
        job = self._used.setdefault(key, job)
        try:
            hosts = hosts_of(job, name, job_file(saved), _Bar())
        except LookupError as error:
            raise UsageError(f"%mesh --job {kind}: {error.args[0]}") from None
        if kind in described and "hosts" in dims and dims["hosts"] != len(hosts):
            raise UsageError(f"%mesh: {kind} has {len(hosts)} hosts for {name}, as monarch.toml says: leave hosts= out")
        return hosts

    def _made(self, name: str, kind: str, dims: Mapping[str, int], arguments: Mapping[str, object]) -> JobTrait:
        gpus = None if kind in _ITS_OWN else dims.get("gpus")
        return make_job(kind, {name: Role(hosts=dims.get("hosts", 1), gpus=gpus)}, **arguments)


def job_places() -> list[tuple[str, str, str]]:
    """The jobs that hosts can come from: what `--job` takes, a text, and why it cannot be used here; "" if it can."""
    try:
        described = described_jobs()
    except JobsFileError:
        described = {}
    named = [(name, f"{name} of monarch.toml ({said.get('kind', '?')})", "") for name, said in described.items()]
    return named + [(kind, f"{kind} job", _missing(kind)) for kind in kinds() if kind not in _ITS_OWN]


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
