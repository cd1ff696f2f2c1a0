"""MPI jobs: agents on the hosts that an MPI launcher starts them on."""

import shlex
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from monarch_nb.host.preemption import END
from monarch_nb.job.adapter import (
    Agent,
    Agents,
    AgentsWanted,
    EngineError,
    JobAdapter,
    Role,
    Running,
    Seen,
    living_jobs,
    register_job,
)
from monarch_nb.job.adapter_job import AdapterJob
from monarch_nb.job.process import ProcessAdapter
from monarch_nb.job.report import last_lines, prepare, refresh_folder, seen_of, worker_line

_FILE = "wanted.json"
_RANKS = {"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID"}
_LOG = "mpirun"
_PATIENCE_S = 3  # for a rank to end all processes on its host, before Open MPI kills it


class MPIJob(AdapterJob):
    """A host agent for each rank of `mpirun`, as in `MPIJob({"trainers": 4}, mpi_args="--map-by ppr:1:node")`.

    `launcher` is the command (`mpirun`, `mpiexec`, `srun --mpi=pmix`), which stays a process of this machine: the job
    ends with it. Ranks must share `$XDG_STATE_HOME/monarch-nb/jobs` with this machine, where the key is a file of mode
    0600. `python_exe` is the interpreter there. MPI itself is not used between processes. Raises EngineError.
    """

    def __init__(
        self, meshes: "Mapping[str, int | Role]", python_exe: str = "python3", mpi_args: Sequence[str] | str = (),
        launcher: str = "mpirun", monarch_port: int = 0, env: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        words = shlex.split(mpi_args) if isinstance(mpi_args, str) else list(mpi_args)
        options = {"python": python_exe, "mpi_args": words, "launcher": launcher, "port": monarch_port}
        super().__init__("mpi", meshes, env, options=options)


class MPI(JobAdapter):
    """`mpirun` is a process of this machine, and remains one: all agents end with it."""

    watch_s = 2.0

    def __init__(self) -> None:
        self._processes = ProcessAdapter()

    def start(self, wanted: AgentsWanted) -> Agents:
        """Starts mpirun, with one rank for each agent. Raises EngineError if it cannot be run."""
        prepare(wanted, wanted.names, _FILE)
        line = [
            *shlex.split(str(wanted.options.get("launcher", "mpirun"))), "-n", str(len(wanted.names)),
            *wanted.options.get("mpi_args", ()), *shlex.split(worker_line(wanted, _FILE, ",".join(sorted(_RANKS)))),
        ]  # fmt: skip
        launcher = self._processes.start_one(
            line, _LOG, "", wanted.folder, {"OMPI_MCA_odls_base_sigkill_timeout": str(_PATIENCE_S)}
        )
        return {name: Agent(launcher.id) for name in wanted.names}

    def add(self, job: Running, wanted: AgentsWanted) -> Agents:
        """Raises EngineError: mpirun takes no more ranks."""
        raise EngineError(
            "an mpirun that was started takes no more ranks. Start another one beside it, on other hosts, and name its "
            'hosts: mesh.grow(hosts=MPIJob({"more": 2}, …).state(None).more)'
        )

    def look(self, job: Running) -> Mapping[str, Seen]:
        """Returns mpirun's state for all agents, with the addresses that they have reported."""
        refresh_folder(job.folder)
        launcher = Running(job.job, job.folder, {_LOG: next(iter(job.agents.values()))})
        state = self._processes.look(launcher)[_LOG]
        if state.state == "ended":
            return {name: Seen("ended", f"is gone: its mpirun {state.description}") for name in job.agents}
        return {name: seen_of(job, name, f", mpirun {state.description}") for name in job.agents}

    def kill(self, job: Running) -> None:
        """Ends the ranks, by a signal that mpirun passes on to them; else mpirun, which ends them."""
        launcher = dict(list(job.agents.items())[:1])
        self._processes.end(launcher, 2 * _PATIENCE_S, (END, signal.SIGTERM))

    def running(self) -> Mapping[str, Running]:
        """Returns the jobs whose folders are on this machine."""
        return living_jobs(self, "mpi")

    def lines(self, job: Running, name: str, count: int) -> list[str]:
        """Returns the output that mpirun has passed on, of all ranks."""
        return last_lines([Path(job.folder, f"{_LOG}.log")], count)


register_job("mpi", MPI)
