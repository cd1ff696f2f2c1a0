"""The sources of the hosts of a chaos run: agents that a user started, a job over SSH, or a job on Slurm."""

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import psutil

from monarch_nb.transport import Keys
from scripts.processes import MARK
from tests.chaos.network import Network
from tests.cluster.engine_tools import PYTHON, SlurmCluster
from tests.cluster.hosts_tools import HostProcess
from tests.clusters.machines import Machines
from tests.polling import until

PORT = 22222
AGENT = "mnb-agent"  # the name of the process of a host agent


class Site(Protocol):
    """Hosts, each with an agent, and how the controller gets to them."""

    network: Network | None  # between the hosts and the controller, whose end is 0
    env: dict[str, str]  # of the controller

    def how(self) -> dict[str, Any]:
        """Says how a controller gets the hosts, as plain data for `program.hosts`."""

    def names(self) -> Sequence[str]:
        """Names that the text of an error may have."""

    def kill_agent(self, host: int, ranks: Sequence[int]) -> None:
        """Ends the agent of a host at once; `ranks` are processes of its ranks."""

    def start_agent(self, host: int) -> None:
        """Starts another agent of the same name at the same place, if that is not the job's affair."""

    def agent(self, host: int, ranks: Sequence[int]) -> int:
        """Returns the process of the agent of a host; 0 if it has ended."""

    def end(self) -> None:
        """Ends the hosts as a user does, where the controller has not."""

    def close(self) -> None:
        """Ends everything at once."""


class StartedAgents:
    """Agents that a user starts in network namespaces, and attaches."""

    def __init__(self, folder: Path, hosts: int, env: dict[str, str]) -> None:
        self.folder, self.env = folder, env
        self.key = folder / "job.key"
        Keys.load_or_create(self.key)
        self.network = Network(hosts + 1)
        self.agents: list[HostProcess] = []
        try:
            for host in range(hosts):
                self.agents.append(self._agent(host))
        except BaseException:
            self.close()
            raise

    def how(self) -> dict[str, Any]:
        return {"attach": [agent.endpoint for agent in self.agents], "key": str(self.key)}

    def names(self) -> Sequence[str]:
        return [agent.host for agent in self.agents]

    def _agent(self, host: int, *options: str) -> HostProcess:
        address = f"tcp://{self.network.addresses[host + 1]}:{PORT}"
        before = self.network.inside(host + 1)
        return HostProcess(self.folder, *options, key=self.key, tcp=address, env=self.env, before=before)

    def kill_agent(self, host: int, ranks: Sequence[int]) -> None:
        self.agents[host].process.kill()
        self.agents[host].process.wait()

    def start_agent(self, host: int) -> None:
        self.agents[host] = self._agent(host, "--host", self.agents[host].host)

    def agent(self, host: int, ranks: Sequence[int]) -> int:
        return self.agents[host].pid

    def end(self) -> None:
        for agent in self.agents:
            agent.close()

    def close(self) -> None:
        for agent in self.agents:
            agent.process.kill()
            agent.process.wait()
        self.network.close()


class AgentsOfJobs:
    """Common parts of agents that a job starts: they are found above the processes of their ranks."""

    def kill_agent(self, host: int, ranks: Sequence[int]) -> None:
        if pid := self.agent(host, ranks):
            os.kill(pid, signal.SIGKILL)

    def start_agent(self, host: int) -> None:
        """Leaves that to the job, which is asked by heal_mesh."""

    def agent(self, host: int, ranks: Sequence[int]) -> int:
        for rank in ranks:
            try:
                above = psutil.Process(rank).parents()
                return next(process.pid for process in above if process.name() == AGENT)
            except (psutil.NoSuchProcess, StopIteration):
                continue
        return 0

    def names(self) -> Sequence[str]:
        return ()

    def end(self) -> None:
        """Does nothing: the controller has ended the job."""


class SSHMachines(AgentsOfJobs):
    """Machines with OpenSSH servers in network namespaces, and a job that reaches them directly or by tunnels."""

    def __init__(self, folder: Path, hosts: int, env: dict[str, str], reach: str) -> None:
        self.folder, self.reach = folder, reach
        self.env = {**env, "HOME": str(folder)}
        variables = " ".join(f"{name}={value}" for name, value in env.items() if name != "XDG_STATE_HOME")
        state = f"XDG_STATE_HOME={folder / 'there'} MONARCH_NB_PRELOAD="
        self.machines = Machines(folder, hosts, {"SetEnv": f"{state} {variables}"})
        self.network: Network | None = self.machines.network

    def how(self) -> dict[str, Any]:
        server = self.machines.servers[0]
        return {
            "ssh": [server.name for server in self.machines.servers], "python": PYTHON, "reach": self.reach,
            "identity": str(server.identity), "known_hosts": str(server.known_hosts),
            "env": {MARK: self.env[MARK], "MONARCH_NB_PRELOAD": ""},
        }  # fmt: skip

    def close(self) -> None:
        self.machines.close()


class SlurmNodes(AgentsOfJobs):
    """Nodes of a Slurm of its own on this machine, and a job there."""

    network: Network | None = None

    def __init__(self, folder: Path, env: dict[str, str]) -> None:
        path = folder / "slurm"
        path.mkdir()
        self.slurm = SlurmCluster(path)
        self.env = {**env, "SLURM_CONF": str(self.slurm.conf), "MONARCH_NB_PRELOAD": ""}

    def how(self) -> dict[str, Any]:
        return {"slurm": True, "python": PYTHON, "env": {"MONARCH_NB_PRELOAD": ""}}

    def cancel(self) -> None:
        """Ends the batch jobs that run, as an administrator or `scancel` does."""
        self.slurm.ask("scancel", "--user=root", "--state=RUNNING")

    def await_end(self) -> None:
        """Blocks until the cancelled job has ended; until then its hosts work, in their grace."""
        until(lambda: "CG" not in self._states(), "the batch jobs have ended", 60)

    def _states(self) -> list[str]:
        return self.slurm.ask("squeue", "-h", "-o", "%t").split()

    def close(self) -> None:
        self.slurm.close()


SITES = ("agents", "ssh", "ssh-direct", "slurm")


def site(kind: str, folder: Path, hosts: int, env: dict[str, str]) -> Site:
    """Makes the hosts of a run, of one of `SITES`."""
    if kind == "slurm":
        return SlurmNodes(folder, env)
    if kind == "agents":
        return StartedAgents(folder, hosts, env)
    return SSHMachines(folder, hosts, env, "direct" if kind == "ssh-direct" else "tunnel")
