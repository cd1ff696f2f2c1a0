"""A job of processes on this machine, one for each host: what a cluster is, in small."""

from collections.abc import Mapping
from typing import NamedTuple

from monarch_nb.job.adapted import AdapterJob
from monarch_nb.job.processes import agent_of_process, process_of
from monarch_nb.job.role import Role
from monarch_nb.job.state import JobState


class ProcessState(NamedTuple):
    """A worker process that a job has started: its number and its address."""

    pid: int
    channel: str


class ProcessJob(AdapterJob):
    """Each host is a process of its own, as users start workers by hand: they live on when the client ends, for a
    minute unless `keep_for` says otherwise.

    `meshes` gives the number of hosts of each mesh; `env` is laid over the hosts' environment. `kill()` ends them, from
    any process that has the job's file.
    """

    _transient = AdapterJob._transient | {"_host_to_pid", "_adopted"}

    def __init__(self, meshes: "Mapping[str, int | Role]", env: Mapping[str, str] | None = None) -> None:
        super().__init__("process", meshes, env)

    def _restored(self) -> None:
        super()._restored()
        # As torchmonarch has it: a subclass with a `_create` of its own puts the workers there that it has started.
        self._host_to_pid: dict[str, ProcessState] = {}
        self._adopted: set[str] = set()  # those of them that are, or were, agents of the job

    def _create(self, client_script: str | None) -> None:
        super()._create(client_script)
        for name, agent in self._agents.items():
            self._host_to_pid[name] = ProcessState(process_of(agent)[0], agent.join)
        self._adopted = {*self._agents}

    def _adopt(self) -> None:
        for name, started in self._host_to_pid.items():
            if name not in self._adopted:  # one that has been returned does not come back
                self._agents[name] = agent_of_process(started.pid, started.channel)
        self._adopted |= self._host_to_pid.keys()

    def _state(self) -> JobState:
        self._adopt()
        return super()._state()

    def _kill(self) -> None:
        self._adopt()
        super()._kill()
