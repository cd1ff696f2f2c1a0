"""Jobs on this machine: processes as hosts, a small cluster, or `this_host()` under the names of a larger job."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from monarch_nb.host.folders import base_folder
from monarch_nb.host.launch import untraced
from monarch_nb.host.linux import process_state
from monarch_nb.host.preemption import END
from monarch_nb.job.adapter import (
    ALL_LINES,
    HERE,
    Agent,
    Agents,
    AgentsWanted,
    JobAdapter,
    Role,
    Running,
    Seen,
    living_jobs,
    log_words,
    register_job,
)
from monarch_nb.job.adapter_job import AdapterForm, AdapterJob
from monarch_nb.job.report import read_report
from monarch_nb.job.trait import BATCH_FILE, JobTrait

BATCH = "MONARCH_BATCH_JOB"
_ENDING_S = 2.0  # for a worker to end all its processes, which it does at once; then it is killed itself


class ProcessState(NamedTuple):
    """A worker process that a job has started: its number and its address."""

    pid: int
    channel: str


class ProcessJob(AdapterJob):
    """Hosts that are processes of this machine, like workers that users start by hand: they live on when the client
    ends, for a minute unless `keep_for` sets another time.

    `meshes` gives the number of hosts of each mesh; `env` is laid over the hosts' environment. `kill()` ends them, from
    any process that has the job's file.
    """

    _transient = AdapterJob._transient | {"_host_to_pid", "_adopted"}

    def __init__(self, meshes: "Mapping[str, int | Role]", env: Mapping[str, str] | None = None) -> None:
        super().__init__("process", meshes, env)

    def _restored(self) -> None:
        super()._restored()
        # As in torchmonarch: a subclass with a `_create` of its own puts the workers there that it has started.
        self._host_to_pid: dict[str, ProcessState] = {}
        self._adopted: set[str] = set()  # the workers that are, or were, agents of the job

    def _create(self, client_script: str | None) -> None:
        super()._create(client_script)
        for name, agent in self._agents.items():
            self._host_to_pid[name] = ProcessState(process_of(agent)[0], agent.join)
        self._adopted = {*self._agents}

    def _adopt(self) -> None:
        for name, started in self._host_to_pid.items():
            if name not in self._adopted:  # a returned worker is not used again
                self._agents[name] = agent_of_process(started.pid, started.channel)
        self._adopted |= self._host_to_pid.keys()

    def apply(self, client_script: str | None = None) -> None:
        """Starts the workers, unless the job runs already."""
        with self._one_thread:
            super().apply(client_script)
            self._adopt()  # before the job is saved: its file names the workers

    def _kill(self) -> None:
        self._adopt()
        super()._kill()


class LoginJob(ProcessJob):
    """Hosts that are named one by one, as programs of torchmonarch derive kinds of jobs: a subclass starts a worker for
    each in `_start_host`, and `kill()` ends these.
    """

    def __init__(self) -> None:
        super().__init__({})

    def add_mesh(self, name: str, hosts: Sequence[str]) -> None:
        """Adds a mesh of these hosts, in this order."""
        machines = {**self._options.get("machines", {}), name: list(hosts)}
        self._wish({mesh: len(names) for mesh, names in machines.items()})
        self._options = {**self._options, "machines": machines}

    def _create(self, client_script: str | None) -> None:
        if client_script is not None:
            raise RuntimeError("a LoginJob runs no client scripts")
        try:
            for mesh, machines in self._options.get("machines", {}).items():
                for name, machine in zip(self._names(mesh), machines, strict=True):
                    self._host_to_pid[name] = self._start_host(machine)
        except BaseException:  # an interrupt too: no worker of a half-made job may stay
            self._kill()
            raise

    def _start_host(self, host: str) -> ProcessState:
        """Starts a worker on this host; returns a process of this machine that ends with it, and its address."""
        raise NotImplementedError("_start_host starts a worker and returns its ProcessState(pid, address)")


class ProcessAdapter(JobAdapter):
    """Starts a worker process for each agent. The ids of agents are `process id @ start time`."""

    watch_s = 0.0  # the system reports the end of an agent on this machine

    def __init__(self) -> None:
        self._children: dict[int, subprocess.Popen[bytes]] = {}  # workers that this process has started

    def folder(self) -> Path:
        """Returns a folder whose path is short enough for sockets."""
        return base_folder()

    def start(self, wanted: AgentsWanted) -> Agents:
        """Starts a worker for each name; they write to files in the job's folder."""
        agents: dict[str, Agent] = {}
        try:
            for name in wanted.names:
                join = wanted.join(name)
                agents[name] = self.start_one(
                    [*wanted.command(join), "--report", f"{wanted.folder / name}.json"],
                    name,
                    join,
                    wanted.folder,
                    wanted.environment_of(name),
                )
        except BaseException:  # an interrupt too: nothing of a half-made job may stay
            self.end(agents)
            raise
        return agents

    def add(self, job: Running, wanted: AgentsWanted) -> Agents:
        """Starts workers as `start` does."""
        return self.start(wanted)

    def release(self, going: Running, job: Running) -> None:
        """Ends these workers alone."""
        self.end(going.agents)

    def start_one(
        self, line: list[str], name: str, join: str, folder: Path, env: Mapping[str, str], stdin: bytes = b""
    ) -> Agent:
        """Starts one worker, whose lines go to a file in the folder."""
        with open(folder / f"{name}.log", "wb") as log:
            process = subprocess.Popen(
                untraced(line), env={**os.environ, **env}, stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        self._children[process.pid] = process
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError), process.stdin:
                process.stdin.write(stdin)
        return agent_of_process(process.pid, join)

    def look(self, job: Running) -> Mapping[str, Seen]:
        """Returns the states of the workers, with the last lines of those that have ended."""
        return {name: self._seen(job, name, agent) for name, agent in job.agents.items()}

    def _seen(self, job: Running, name: str, agent: Agent) -> Seen:
        pid = process_of(agent)[0]
        if not self._alive(agent):
            return Seen("ended", f"(process {pid}) has ended{log_words(self.lines(job, name, ALL_LINES))}")
        report = None if not job.folder else read_report(Path(job.folder, f"{name}.json"))
        joins = (agent.join,) if agent.join else report.joins if report is not None else ()
        return Seen("running", f"process {pid}", joins, None if report is None else report.gpus,
                    "" if report is None else report.host)  # fmt: skip

    def kill(self, job: Running) -> None:
        """Ends workers with all that is on their hosts, without SIGTERM, which would be a notice."""
        self.end(job.agents)

    def end(self, agents: Agents, patience: float | None = None, first: Sequence[int] = (END,)) -> None:
        """Ends these workers by the `first` signals, after `patience` seconds by SIGKILL. Blocks until then."""
        deadline = time.monotonic() + (patience or _ENDING_S)
        for signum in (*first, signal.SIGKILL):
            for agent in agents.values():
                if self._alive(agent):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process_of(agent)[0], signum)
            if self._await_end(agents, deadline):
                break
            deadline = time.monotonic() + _ENDING_S
        for agent in agents.values():
            process = self._children.pop(process_of(agent)[0], None)
            if process is not None:
                process.wait(_ENDING_S)

    def running(self) -> Mapping[str, Running]:
        """Returns the jobs with folders here and living processes."""
        return living_jobs(self, "process")

    def shell(self, job: Running, name: str) -> list[str]:
        """Returns a shell on this machine."""
        return [os.environ.get("SHELL") or "/bin/sh", "-i"]

    def lines(self, job: Running, name: str, count: int) -> list[str]:
        """Returns the last lines of the worker's log file."""
        try:
            text = Path(job.folder or os.path.dirname(job.agents[name].join.removeprefix("ipc://")), f"{name}.log")
            return text.read_text(errors="replace").strip().splitlines()[-count:]
        except OSError:
            return []

    def _alive(self, agent: Agent) -> bool:
        pid, birth = process_of(agent)
        process = self._children.get(pid)
        if process is not None:
            return process.poll() is None
        return bool(birth) and start_time(pid) == birth

    def _await_end(self, agents: Agents, deadline: float) -> bool:
        """Blocks until workers and their agents have ended."""
        while True:
            sockets = (agent.join.removeprefix("ipc://") for agent in agents.values())
            ended = not any(map(self._alive, agents.values()))
            if ended and not any(os.path.exists(path) for path in sockets if path):
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.01)


def agent_of_process(pid: int, join: str) -> Agent:
    """Returns the agent of a worker process at an address."""
    return Agent(f"{pid}@{start_time(pid)}", join)


def process_of(agent: Agent) -> tuple[int, str]:
    """Returns process id and start time of an agent's worker; (0, "") for an id that would mean several."""
    pid, _, birth = agent.id.partition("@")
    return (int(pid), birth) if pid.isdecimal() and int(pid) > 1 else (0, "")


def start_time(pid: int) -> str:
    """Returns a start time that no later process with the same id has; empty if there is no process."""
    try:
        if os.path.exists("/proc/self/stat"):
            state, ticks = process_state(pid)
            return "" if state in "ZX" else str(ticks)
    except OSError:
        return ""
    import psutil

    try:
        process = psutil.Process(pid)
        return "" if process.status() == psutil.STATUS_ZOMBIE else str(process.create_time())
    except psutil.Error:
        return ""


register_job("process", ProcessAdapter)


class _LocalForm(AdapterForm):
    """The saved attributes of a local job."""

    _log_dir: str | None = None


class LocalJob(AdapterJob):
    """A job that has `this_host()` for each name, so that a program runs here as it does on a cluster."""

    _transient = AdapterJob._transient | {"_process"}
    _form = _LocalForm
    _cacheable = False  # another process cannot use it

    def __init__(self, hosts: Sequence[str] = ("hosts",)) -> None:
        super().__init__("local", dict.fromkeys([hosts] if isinstance(hosts, str) else hosts, 1))
        self._log_dir: str | None = None

    def _restored(self) -> None:
        super()._restored()
        self._process: subprocess.Popen[bytes] | None = None

    def _create(self, client_script: str | None) -> None:
        self._start(Path())
        if client_script is None:
            return
        os.makedirs(".monarch/logs", mode=0o700, exist_ok=True)
        self._log_dir = tempfile.mkdtemp(prefix="job_", dir=os.path.abspath(".monarch/logs"))
        file = os.path.join(self._log_dir, "job.json")
        self.dump(file)
        with (
            open(os.path.join(self._log_dir, "stdout.log"), "wb") as out,
            open(os.path.join(self._log_dir, "stderr.log"), "wb") as err,
        ):
            self._process = subprocess.Popen(
                untraced([sys.executable, client_script]), stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                env={**os.environ, BATCH: "1", BATCH_FILE: file}, start_new_session=True,
            )  # fmt: skip

    @property
    def process(self) -> "subprocess.Popen[bytes]":
        """The client script that `apply` has started here. Raises ValueError if there is none."""
        if self._process is None:
            raise ValueError("this job has started no client script here")
        return self._process

    def _wishes(self) -> str:
        return ", ".join(self._meshes)

    def can_run(self, spec: JobTrait) -> bool:
        """Returns False: a new job costs nothing."""
        return False

    def _kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(5.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


class OwnHost(JobAdapter):
    """The host of this process, whose agent exists already, or is started when it is first needed."""

    keep_s = None  # it ends with this process
    watch_s = 0.0

    def start(self, wanted: AgentsWanted) -> Agents:
        """Starts nothing. Raises ValueError for meshes of several hosts."""
        if any(not name.endswith("_0") for name in wanted.names):
            raise ValueError("a local job has this host alone, one for each mesh; jobs of kind 'process' have several")
        return {name: Agent("", HERE) for name in wanted.names}

    def look(self, job: Running) -> Mapping[str, Seen]:
        """Returns the agents as running, as this process runs."""
        return {name: Seen("running", joins=(HERE,)) for name in job.agents}

    def kill(self, job: Running) -> None:
        """Ends nothing: the agent ends with this process."""

    def running(self) -> Mapping[str, Running]:
        """Returns no jobs: others cannot use them."""
        return {}


register_job("local", OwnHost)
