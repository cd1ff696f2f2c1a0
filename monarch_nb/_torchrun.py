"""Command lines of torchrun: in a terminal, in a cell, and as jobs with machines."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from monarch_nb.actor import ActorError, ProcMesh, local_hosts, shutdown_context, this_host
from monarch_nb.job import JobState, JobTrait, job_loads, make_job
from monarch_nb.spmd import SPMDActor, SPMDProgram, begin, machine_size

__all__ = ["SPMDJob", "TorchrunCommand", "main", "serve"]

_WORKERS = "workers"  # the mesh of such a job
_KINDS = {"local": "process", "local_cwd": "process", "": "process"}  # torchx's names of schedulers
_FLAGS = ("standalone", "module", "no-python", "run-path", "use-agent-store")
_TAKEN = ("nproc-per-node", "nnodes")
_THIS_MACHINE = ("auto", "cpu", "gpu")  # allowed instead of the number of processes
_VALUED = (
    "rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf", "max-restarts", "monitor-interval", "start-method", "role",
    "log-dir", "redirects", "tee", "node-rank", "master-addr", "master-port", "local-addr", "logs-specs",
)  # fmt: skip


class SPMDJob(JobTrait):
    """The job that `serve` returns: its hosts are `state().workers`, and `run_spmd` runs the script on them."""

    _transient = frozenset({"_inner", "_failed"})

    def __init__(self, job: JobTrait, script: Sequence[str], processes: int) -> None:
        super().__init__()
        self._inner = job
        self._failed: ProcMesh | None = None  # of the last run, whose frames can still be opened
        self._saved = ""
        self._script = list(script)
        self._processes = processes  # on each host

    def _restored(self) -> None:
        self._failed = None
        self._inner = job_loads(self._saved.encode())

    def _wishes(self) -> str:
        return " ".join(self._script)

    def _create(self, client_script: str | None) -> None:
        self._inner.apply(client_script)
        self._saved = self._inner.dumps().decode()

    def _state(self) -> JobState:
        return self._inner.state(None)

    def can_run(self, spec: JobTrait) -> bool:
        """Returns whether this job has the same script and processes, and its hosts run and match those of `spec`."""
        if not isinstance(spec, SPMDJob) or (self._script, self._processes) != (spec._script, spec._processes):
            return False
        return self._inner.can_run(spec._inner)

    def _kill(self) -> None:
        self._end_failed()
        self._inner.kill()

    def _end_failed(self) -> None:
        failed, self._failed = self._failed, None
        if failed is not None:
            failed.stop().get()

    def run_spmd(self) -> bool:
        """Runs the script on all processes, as torchrun would, and blocks until it has ended everywhere.

        Returns True; raises what the script raises on a rank. Further calls run it again, in new processes. Those of a
        failed run live until then, so that `%mpm` can open their frames.
        """
        running = self._running
        job = running if isinstance(running, SPMDJob) else self
        self._end_failed()
        procs = job.state().workers.spawn_procs(per_host={"gpus": job._processes}, name="spmd")
        try:
            ranks = procs.spawn("spmd", SPMDActor)
            address, port = ranks.slice(**dict.fromkeys(ranks.extent, 0)).get_host_port.call_one().get()
            ended = all(ranks.main.call(address, port, job._script).get().values())
        except ActorError:
            self._failed = procs
            raise
        except BaseException:
            procs.stop().get()
            raise
        procs.stop().get()
        return ended


def serve(app: object, scheduler: str = "local", scheduler_cfg: Mapping[str, object] | None = None) -> SPMDJob:
    """Returns the job of a torchrun line: `serve(["torchrun", "--nnodes=2", "--nproc-per-node=4", "train.py"])`.

    The job is applied: its hosts are requested. `scheduler` is a kind of jobs (`"slurm"`, `"ray"`, `"process"`…;
    `"local"` is processes of this machine), `scheduler_cfg` its arguments. Instead of the list, an AppDef of torchx
    with one role is accepted, and read by its entrypoint, arguments and number of replicas. Options for finding other
    nodes (`--rdzv-…`, `--master-…`) are ignored: the job knows the nodes. Raises ValueError for any other command line,
    LookupError for an unknown scheduler, EngineError.
    """
    words, hosts = _words(app)
    command = TorchrunCommand.read(words)
    hosts = command.hosts or hosts
    kind = _KINDS.get(scheduler, scheduler)
    job = SPMDJob(make_job(kind, {_WORKERS: hosts}, **dict(scheduler_cfg or {})), command.script, command.procs or 1)
    job.apply()
    return job


def _words(app: object) -> tuple[list[str], int]:
    """Returns the command line, and the number of hosts that it is wanted on."""
    if isinstance(app, Sequence) and not isinstance(app, str):
        return list(app), 1
    roles: Any = getattr(app, "roles", ())
    if len(roles) != 1:
        raise ValueError("serve takes a command line such as ['torchrun', '--nproc-per-node=4', 'train.py'], or an "
                         f"AppDef with one role; this has {len(roles)}")  # fmt: skip
    return [roles[0].entrypoint, *roles[0].args], int(getattr(roles[0], "num_replicas", 1))


class TorchrunCommand(Struct, frozen=True):
    """A parsed command line of torchrun."""

    script: tuple[str, ...]  # as `SPMDProgram.read` takes it
    hosts: int = 0  # 0: not given
    procs: int = 0  # on each host; 0: not given
    left_out: tuple[str, ...] = ()  # options without a meaning on a mesh

    @classmethod
    def read(cls, words: Sequence[str], *, local: bool = False) -> "TorchrunCommand":
        """Reads a line that begins with torchrun; `local` for a line of this machine, whose size is known.

        Raises ValueError.
        """
        if not words or words[0].rpartition("/")[2] != "torchrun":
            raise ValueError(f"{' '.join(words) or 'nothing'}: a job of this kind begins with torchrun")
        options, unknown = _parsed(words[1:])
        if unknown or not options.script:
            problem = f"torchrun takes no {unknown[0]}" if unknown else "no script is named, as in torchrun train.py"
            raise ValueError(f"{' '.join(words)}: {problem}")
        if options.no_python:
            raise ValueError("--no-python: only Python programs run in processes of a mesh")
        if local and options.nproc_per_node in _THIS_MACHINE:
            options.nproc_per_node = str(machine_size())
        left_out = [name for name in _VALUED if getattr(options, name.replace("-", "_"))]
        script = ["-m", *options.script] if options.module else options.script
        hosts, procs = _count("nnodes", options.nnodes), _count("nproc-per-node", options.nproc_per_node)
        return cls(tuple(script), hosts, procs, tuple(f"--{name}" for name in left_out))


def _parser(prog: str = "torchrun") -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Runs a script on processes of this machine as torchrun does; what names other nodes is left out.",
        add_help=False,
        exit_on_error=False,
        allow_abbrev=False,
    )
    for name in (*_TAKEN, *_VALUED):
        parser.add_argument(f"--{name}", f"--{name.replace('-', '_')}", default="")
    for name in _FLAGS:
        parser.add_argument(f"--{name}", f"--{name.replace('-', '_')}", action="store_true")
    parser.add_argument("-m", dest="module", action="store_true")
    parser.add_argument("script", nargs=argparse.REMAINDER)
    return parser


def _parsed(words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    try:
        return _parser().parse_known_args(list(words))
    except argparse.ArgumentError as error:
        raise ValueError(f"torchrun: {error}") from None


def _count(name: str, value: str) -> int:
    if value and (not value.isdecimal() or int(value) < 1):
        elastic = ": a mesh has as many hosts as it was made with" if ":" in value else ""
        raise ValueError(f"--{name}={value}: say how many, as a number{elastic}")
    return int(value or 0)


def main(words: Sequence[str]) -> int:
    """Runs a command line on this machine, as `monarch-nb torchrun` does; returns the exit status."""
    if list(words) in ([], ["-h"], ["--help"]):
        _parser("monarch-nb torchrun").print_help()
        raise SystemExit(0 if words else 2)
    try:
        command = TorchrunCommand.read(["torchrun", *words], local=True)
        program = SPMDProgram.read(command.script)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"monarch-nb torchrun: {error}\n")
        return 2
    hosts = local_hosts(command.hosts) if command.hosts > 1 else this_host()
    try:
        begin(program, hosts.spawn_procs(per_host={"gpus": command.procs or 1}, name="torchrun")).get()
    except ActorError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    finally:
        shutdown_context().get()
    return 0
