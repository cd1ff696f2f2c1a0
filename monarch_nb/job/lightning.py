"""Lightning jobs: agents on the machines of a teamspace, by Lightning's SDK."""

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import structs

from monarch_nb.job.adapter import (
    ALL_LINES,
    Agent,
    Agents,
    AgentsWanted,
    EngineError,
    JobAdapter,
    Role,
    Running,
    Seen,
    living_jobs,
    log_words,
    register_job,
    state_folder,
)
from monarch_nb.job.adapter_job import AdapterJob

_STUDIO = Path("/teamspace/studios/this_studio")  # copied to the machines of its jobs
_INSTALL = "pip install 'monarch-nb[lightning]'"
_WAITING = {"NotCreated", "Pending"}
_ENDED = {"Stopping": "is being stopped", "Stopped": "was stopped", "Completed": "has ended", "Failed": "has failed"}


class LightningJob(AdapterJob):
    """A host agent on each machine of a Lightning job: `LightningJob({"trainers": 4}, machine="L4_X_4")`.

    To be used in a Studio: its files, the job's key among them, are copied to the machines as Lightning's own snapshot
    of it, with its environment. The agents are reached at their private addresses, at `monarch_port`. Meshes with equal
    hosts share one Lightning job. `teamspace` and `studio` are those of this Studio unless they are named; Lightning
    ends the job `max_runtime` seconds after its start.
    Needs `pip install 'monarch-nb[lightning]'`. Raises EngineError, with Lightning's message.
    """

    def __init__(
        self, meshes: "Mapping[str, int | Role]", machine: str = "CPU", teamspace: str | None = None,
        studio: str | None = None, interruptible: bool = False, max_runtime: int | None = None,
        python_exe: str = "python", monarch_port: int = 26600, env: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        options = {
            "machine": machine, "teamspace": teamspace, "studio": studio, "interruptible": interruptible,
            "max_runtime": max_runtime, "python": python_exe, "port": monarch_port,
        }  # fmt: skip
        options = {name: value for name, value in options.items() if value is not None}
        super().__init__("lightning", meshes, env, options=options)


class Lightning(JobAdapter):
    """The ids of agents are `Lightning's name of the job/rank`."""

    keep_s = 3600.0  # users may have waited for these machines

    def folder(self) -> Path:
        """Returns a folder in the Studio, which the machines of its jobs have at the same path."""
        if not _STUDIO.is_dir():
            return state_folder()
        folder = _STUDIO / ".monarch" / "jobs"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder

    def start(self, wanted: AgentsWanted) -> Agents:
        """Requests a Lightning job for each group of equal hosts. Raises EngineError."""
        agents: dict[str, Agent] = {}
        job = Running(wanted.job, str(wanted.folder), agents, dict(wanted.options))
        groups: dict[str, list[str]] = {}
        for name in wanted.names:
            role = wanted.role(name)
            if role.image:
                raise EngineError(f"{name}: a LightningJob runs in the Studio's own environment, and takes no image")
            groups.setdefault(repr(sorted(wanted.environment_of(name).items())), []).append(name)
        try:
            for number, names in enumerate(groups.values()):
                self._run(wanted, f"monarch-{wanted.job[:8]}-{number}", names, agents)
        except BaseException as error:  # an interrupt too
            self.kill(job)
            if isinstance(error, Exception):
                raise EngineError(f"Lightning has started no job: {error}") from error
            raise
        return agents

    def add(self, job: Running, wanted: AgentsWanted) -> Agents:
        """Requests another Lightning job, with machines of the same kind."""
        agents: dict[str, Agent] = {}
        job_name = f"monarch-{wanted.job[:8]}-{wanted.names[-1].replace('_', '-')}"
        try:
            self._run(wanted, job_name, wanted.names, agents)
        except BaseException as error:
            self.kill(structs.replace(job, agents=agents))
            raise EngineError(f"Lightning has started no job: {error}") from error
        return agents

    def release(self, going: Running, job: Running) -> None:
        """Stops Lightning jobs without remaining agents; the machine of an ended agent is released by itself."""
        in_use = {_job_name(agent) for name, agent in job.agents.items() if name not in going.agents}
        ended = {name: agent for name, agent in going.agents.items() if _job_name(agent) not in in_use}
        self.kill(structs.replace(job, agents=ended))

    @staticmethod
    def _run(wanted: AgentsWanted, job_name: str, names: Sequence[str], agents: dict[str, Agent]) -> None:
        options = wanted.options
        arguments = {name: options[name] for name in ("teamspace", "studio", "interruptible", "max_runtime")
                     if name in options}  # fmt: skip
        kind = _sdk()
        agents.update({name: Agent(f"{job_name}/{rank}") for rank, name in enumerate(names)})
        kind.run(name=job_name, machine=options["machine"], num_machines=len(names),
                 command=_command(wanted), env=wanted.environment_of(names[0]) or None, **arguments)  # fmt: skip

    def look(self, job: Running) -> Mapping[str, Seen]:
        """Returns the states of the machines according to Lightning."""
        port, machines, states = job.options["port"], dict[str, list[Any]](), {}
        for name, agent in job.agents.items():
            job_name, _, rank = agent.id.partition("/")
            if job_name not in machines:
                machines[job_name] = _machines(job, job_name)
            machine = next((node for node in machines[job_name] if (node.rank or 0) == int(rank)), None)
            if machine is None and machines[job_name]:
                states[name] = Seen("waiting", f"waits: Lightning job {job_name} has no machine of rank {rank} yet")
            elif machine is None:
                states[name] = Seen("ended", f"is gone: Lightning knows no job {job_name} any more")
            else:
                states[name] = _seen(machine, job_name, port)
        return states

    def kill(self, job: Running) -> None:
        """Stops the Lightning jobs. Raises EngineError where Lightning does not answer: they may run on."""
        for job_name in dict.fromkeys(map(_job_name, job.agents.values())):
            remote = _job(job, job_name)
            try:
                if remote is not None and str(remote.status) not in _ENDED:
                    remote.stop()
            except Exception as error:
                raise EngineError(f"Lightning has not stopped the job {job_name}: {error}") from error

    def running(self) -> Mapping[str, Running]:
        """Returns the jobs whose folders are on this machine."""
        return living_jobs(self, "lightning")

    def lines(self, job: Running, name: str, count: int) -> list[str]:
        """Returns the last lines of the machine's log, as Lightning stores it."""
        job_name, _, rank = job.agents[name].id.partition("/")
        machines = (machine for machine in _machines(job, job_name) if (machine.rank or 0) == int(rank))
        return next((_last_lines(machine, count) for machine in machines), [])


def _job_name(agent: Agent) -> str:
    """Returns Lightning's name of the job of an agent."""
    return agent.id.partition("/")[0]


def _command(wanted: AgentsWanted) -> str:
    words = [
        str(wanted.options["python"]), "-P", "-m", "monarch_nb.job.worker", f"tcp://0.0.0.0:{wanted.options['port']}",
        "--key", str(wanted.secret), *([] if wanted.keep_s is None else ["--keep", str(wanted.keep_s)]),
    ]  # fmt: skip
    return shlex.join(words)


def _seen(machine: Any, job_name: str, port: int) -> Seen:
    status, address = str(machine.status), machine.private_ip_address
    if status in _ENDED:
        words = log_words(_last_lines(machine, ALL_LINES))
        return Seen("ended", f"is gone: its machine of Lightning job {job_name} {_ENDED[status]}{words}")
    if status in _WAITING or not address:
        return Seen("waiting", f"waits: its machine of Lightning job {job_name} is {status}")
    return Seen("running", f"at {address}, of Lightning job {job_name}", (f"tcp://{address}:{port}",))


def _last_lines(machine: Any, count: int) -> list[str]:
    try:
        return str(machine.logs).strip().splitlines()[-count:]
    except Exception:  # it has none yet, or none any more
        return []


def _machines(job: Running, job_name: str) -> list[Any]:
    remote = _job(job, job_name)
    if remote is None:
        return []
    try:
        return list(remote.machines) if remote.num_machines > 1 else [remote]
    except Exception as error:
        raise EngineError(f"Lightning does not report the machines of {job_name}: {error}") from error


def _job(job: Running, job_name: str) -> Any:
    """Returns Lightning's job of that name, or None."""
    kind = _sdk()
    try:
        return kind(name=job_name, teamspace=job.options.get("teamspace"))
    except ValueError as error:
        if "does not exist" in str(error):
            return None
        raise EngineError(f"Lightning: {error}") from error
    except Exception as error:
        raise EngineError(f"Lightning does not answer: {error}. Log in with `lightning login`") from error


def _sdk() -> Any:
    """Returns the class of Lightning's jobs. Raises EngineError."""
    os.environ.setdefault("LIGHTNING_DISABLE_VERSION_CHECK", "1")  # its message would appear in cells
    try:
        from lightning_sdk import Job
    except ImportError:
        raise EngineError(f"a LightningJob needs the package lightning-sdk: {_INSTALL}") from None
    return Job


register_job("lightning", Lightning)
