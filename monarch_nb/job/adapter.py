"""What an engine that runs machines has to offer for jobs on it: one small contract."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

from monarch_nb.host.bootstrap import command
from monarch_nb.transport import Keys


class Agent(NamedTuple):
    """One host agent that was started."""

    id: str  # what its engine calls it, so that no later one is taken for it
    join: str  # the address at which controllers meet it; empty for the host of the controller itself


PREFIX = "mnb-job-"  # of the names of jobs' folders
Agents = Mapping[str, Agent]  # by the names of their hosts


@dataclass(frozen=True)
class AgentsWanted:
    """Host agents to start, one for each name."""

    job: str  # the job's id, by which its agents are listed
    names: tuple[str, ...]  # mesh_number
    folder: Path  # of the job, on this machine, for this user alone; it is removed when the job is killed
    environment: Mapping[str, str] = field(default_factory=dict)  # to lay over that of the agents

    def join(self, name: str) -> str:
        """An address at which an agent on this machine can be met."""
        return f"ipc://{self.folder}/{name}"

    @property
    def secret(self) -> Path:
        """The file with the job's key, which agents need that are met over TCP. It is never on a command line."""
        file = self.folder / "key"
        Keys.load_or_create(file)
        return file

    def command(self, join: str, secret: Path | None = None) -> list[str]:
        """The command line of an agent that is met at an address, with the file that holds the key where it runs."""
        return command("monarch_nb.job.worker", join, *([] if secret is None else [secret]))


class Running(NamedTuple):
    """A job as its engine knows it."""

    folder: str
    agents: Agents


class JobAdapter(Protocol):
    """One engine. Its methods are called on any thread, and block for a bounded time."""

    def start(self, wanted: AgentsWanted) -> Agents:
        """Starts the agents. What was started of a job that fails half-way, or is interrupted, is ended again."""

    def ended(self, agents: Agents) -> Mapping[str, str]:
        """Those that have ended, each with how in words, and its last lines where there are some."""

    def kill(self, agents: Agents) -> None:
        """Ends agents, with all that runs on their hosts. Nothing happens to those that have ended."""

    def running(self) -> Mapping[str, Running]:
        """All jobs of this user with agents that run, by their ids, whoever has started them."""
