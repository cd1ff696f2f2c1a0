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
    Running,
    Seen,
    living_jobs,
    log_words,
    state_folder,
)
from monarch_nb.job.adapter_job import AdapterJob
from monarch_nb.job.kinds import register_job
from monarch_nb.job.role import Role

_STUDIO = Path("/teamspace/studios/this_studio")  # what of a Studio goes to the machines of its jobs
_INSTALL = "pip install 'monarch-nb[lightning]'"
_WAITING = {"NotCreated", "Pending"}
_ENDED = {"Stopping": "is being stopped", "Stopped": "was stopped", "Completed": "has ended", "Failed": "has failed"}


class LightningJob(AdapterJob):
    """A host agent on each machine of a Lightning job: `LightningJob({"trainers": 4}, machine="L4_X_4")`.

    To be used in a Studio: its files, the job's key among them, go to the machines as Lightning's own snapshot of it,
    and its environment is theirs. The agents are met at their private addresses, at `monarch_port`. Meshes whose hosts
    are alike share one Lightning job. `teamspace` and `studio` are those of this Studio unless they are named;
    `max_runtime` seconds after its start Lightning ends the job.
    Needs `pip install 'monarch-nb[lightning]'`. Raises EngineError, with the words of Lightning.
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
        given = {name: value for name, value in options.items() if value is not None}
        super().__init__("lightning", meshes, env, options=given)


class Lightning(JobAdapter):
    """The ids of agents are `Lightning's name of the job/rank`."""

    keep_s = 3600.0  # one may have waited for these machines

    def folder(self) -> Path:
        """In the Studio's own folder, which the machines of its jobs have too, at the same path."""
        if not _STUDIO.is_dir():
            return state_folder()
        folder = _STUDIO / ".monarch" / "jobs"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder

    def start(self, wanted: AgentsWanted) -> Agents:
        """Asks for one Lightning job for all hosts that are alike. Raises EngineError."""
        agents: dict[str, Agent] = {}
        job = Running(wanted.job, str(wanted.folder), agents, dict(wanted.options))
        alike: dict[str, list[str]] = {}
        for name in wanted.names:
            role = wanted.role(name)
            if role.image:
                raise EngineError(f"{name}: a LightningJob runs in the Studio's own environment, and takes no image")
            alike.setdefault(repr(sorted(wanted.environment_of(name).items())), []).append(name)
        try:
            for number, names in enumerate(alike.values()):
                self._run(wanted, f"monarch-{wanted.job[:8]}-{number}", names, agents)
        except BaseException as error:  # an interrupt too
            self.kill(job)
            if isinstance(error, Exception):
                raise EngineError(f"Lightning has started no job: {error}") from error
            raise
        return agents

    def add(self, job: Running, wanted: AgentsWanted) -> Agents:
        """Asks for another Lightning job, with so many machines of the same kind."""
        agents: dict[str, Agent] = {}
        called = f"monarch-{wanted.job[:8]}-{wanted.names[-1].replace('_', '-')}"
        try:
            self._run(wanted, called, wanted.names, agents)
        except BaseException as error:
            self.kill(structs.replace(job, agents=agents))
            raise EngineError(f"Lightning has started no job: {error}") from error
        return agents

    def release(self, going: Running, job: Running) -> None:
        """Stops Lightning jobs of which no agent stays; the machine of an agent that has ended goes back by itself."""
        stays = {_called(agent) for name, agent in job.agents.items() if name not in going.agents}
        ended = {name: agent for name, agent in going.agents.items() if _called(agent) not in stays}
        self.kill(structs.replace(job, agents=ended))

    @staticmethod
    def _run(wanted: AgentsWanted, called: str, names: Sequence[str], agents: dict[str, Agent]) -> None:
        options = wanted.options
        asked = {name: options[name] for name in ("teamspace", "studio", "interruptible", "max_runtime")
                 if name in options}  # fmt: skip
        kind = _sdk()
        agents.update({name: Agent(f"{called}/{rank}") for rank, name in enumerate(names)})
        kind.run(name=called, machine=options["machine"], num_machines=len(names),
                 command=_command(wanted), env=wanted.environment_of(names[0]) or None, **asked)  # fmt: skip

    def look(self, job: Running) -> Mapping[str, Seen]:
        """Returns the states of the machines according to Lightning."""
        port, found, seen = job.options["port"], dict[str, list[Any]](), {}
        for name, agent in job.agents.items():
            called, _, rank = agent.id.partition("/")
            if called not in found:
                found[called] = _machines(job, called)
            machine = next((one for one in found[called] if (one.rank or 0) == int(rank)), None)
            if machine is None and found[called]:
                seen[name] = Seen("waiting", f"waits: Lightning job {called} has no machine of rank {rank} yet")
            elif machine is None:
                seen[name] = Seen("ended", f"is gone: Lightning knows no job {called} any more")
            else:
                seen[name] = _seen(machine, called, port)
        return seen

    def kill(self, job: Running) -> None:
        """Stops the Lightning jobs. Raises EngineError where Lightning does not answer: they may run on."""
        for called in dict.fromkeys(map(_called, job.agents.values())):
            found = _job(job, called)
            try:
                if found is not None and str(found.status) not in _ENDED:
                    found.stop()
            except Exception as error:
                raise EngineError(f"Lightning has not stopped the job {called}: {error}") from error

    def running(self) -> Mapping[str, Running]:
        """Those whose folders this machine has."""
        return living_jobs(self, "lightning")

    def lines(self, job: Running, name: str, count: int) -> list[str]:
        """The last lines of the machine's log, as Lightning keeps it."""
        called, _, rank = job.agents[name].id.partition("/")
        return next((_last_lines(one, count) for one in _machines(job, called) if (one.rank or 0) == int(rank)), [])


def _called(agent: Agent) -> str:
    """Lightning's name of the job of an agent."""
    return agent.id.partition("/")[0]


def _command(wanted: AgentsWanted) -> str:
    words = [
        str(wanted.options["python"]), "-P", "-m", "monarch_nb.job.worker", f"tcp://0.0.0.0:{wanted.options['port']}",
        "--key", str(wanted.secret), *([] if wanted.keep_s is None else ["--keep", str(wanted.keep_s)]),
    ]  # fmt: skip
    return shlex.join(words)


def _seen(machine: Any, called: str, port: int) -> Seen:
    status, address = str(machine.status), machine.private_ip_address
    if status in _ENDED:
        words = log_words(_last_lines(machine, ALL_LINES))
        return Seen("ended", f"is gone: its machine of Lightning job {called} {_ENDED[status]}{words}")
    if status in _WAITING or not address:
        return Seen("waiting", f"waits: its machine of Lightning job {called} is {status}")
    return Seen("running", f"at {address}, of Lightning job {called}", (f"tcp://{address}:{port}",))


def _last_lines(machine: Any, count: int) -> list[str]:
    try:
        return str(machine.logs).strip().splitlines()[-count:]
    except Exception:  # there are none yet, or none any more
        return []


def _machines(job: Running, called: str) -> list[Any]:
    found = _job(job, called)
    if found is None:
        return []
    try:
        return list(found.machines) if found.num_machines > 1 else [found]
    except Exception as error:
        raise EngineError(f"Lightning does not report the machines of {called}: {error}") from error


def _job(job: Running, called: str) -> Any:
    """Lightning's job of that name; None if there is none."""
    kind = _sdk()
    try:
        return kind(name=called, teamspace=job.options.get("teamspace"))
    except ValueError as error:
        if "does not exist" in str(error):
            return None
        raise EngineError(f"Lightning: {error}") from error
    except Exception as error:
        raise EngineError(f"Lightning does not answer: {error}. Log in with `lightning login`") from error


def _sdk() -> Any:
    """The class of Lightning's jobs. Raises EngineError."""
    os.environ.setdefault("LIGHTNING_DISABLE_VERSION_CHECK", "1")  # it would write to cells
    try:
        from lightning_sdk import Job
    except ImportError:
        raise EngineError(f"a LightningJob needs the package lightning-sdk: {_INSTALL}") from None
    return Job


register_job("lightning", Lightning)
