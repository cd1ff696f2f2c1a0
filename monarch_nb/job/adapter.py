"""What an engine that runs machines has to offer for jobs on it: one small contract."""

import contextlib
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from monarch_nb.host.bootstrap import command
from monarch_nb.job.role import Role
from monarch_nb.transport import Keys
from monarch_nb.wire import counted, json_decoder

HERE = "here"  # the join address of the controller's own host


class Agent(NamedTuple):
    """One host agent that was asked for."""

    id: str  # what its engine calls it, so that no later one is taken for it
    join: str = ""  # the address at which controllers meet it; empty while only the agent itself will know


class Seen(NamedTuple):
    """One agent as its engine sees it now."""

    state: Literal["waiting", "running", "ended", "unknown"]
    story: str = ""  # in words: what it waits for, where it runs, how it ended, with its last lines
    joins: tuple[str, ...] = ()  # where it can be met, the best address first; empty while that is not known
    gpus: int | None = None  # how many it has found; None where nobody has looked
    host: str = ""  # the id that it has given itself, if it has said so
    stuck: bool = False  # it waits for what time alone does not bring


Agents = Mapping[str, Agent]  # by the names of their hosts
PREFIX = "mnb-job-"  # of the names of jobs' folders
JOB_FILE = "job.json"  # in the folder of a job
_ENDS = 5  # lines that are shown of each end of a log
ALL_LINES = 1 << 20
_saving = threading.Lock()


class Running(msgspec.Struct, frozen=True):
    """A job as its engine knows it."""

    job: str  # its id
    folder: str  # on this machine, for this user alone; empty if there is none
    agents: dict[str, Agent]
    options: dict[str, Any] = {}
    kind: str = ""
    started: float = 0.0  # wall clock, seconds
    spares: tuple[str, ...] = ()  # those of the agents that are part of no mesh
    hosts: dict[str, str] = {}  # the ids of those that have joined, by name

    def save(self) -> None:
        """Writes it into its folder, where `kept_jobs` finds it."""
        draft = Path(self.folder, f".{JOB_FILE}")
        with _saving:
            draft.touch(0o600)
            draft.write_bytes(msgspec.json.encode(self))
            draft.replace(Path(self.folder, JOB_FILE))

    def now(self) -> "Running":
        """As its folder has it: another process may have got more agents, or let some go."""
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            saved = json_decoder(Running).decode(Path(self.folder, JOB_FILE).read_bytes()) if self.folder else self
            if saved.job == self.job:
                return saved
        return self


@dataclass(frozen=True)
class AgentsWanted:
    """Host agents to start, one for each name."""

    job: str  # the job's id, by which its agents are listed
    names: tuple[str, ...]  # mesh_number
    folder: Path  # of the job, on this machine, for this user alone; it is removed when the job is killed
    environment: Mapping[str, str] = field(default_factory=dict)  # to lay over that of the agents
    options: Mapping[str, Any] = field(default_factory=dict)  # the engine's own, as the job was given them
    roles: Mapping[str, Role] = field(default_factory=dict)  # by mesh: what its hosts must have
    keep_s: float | None = None  # how long they live on when no program uses them; None: until they are ended
    places: tuple[str, ...] = ()  # the machines for them, as users name them; empty: where the engine wants them

    def join(self, name: str) -> str:
        """An address at which an agent on this machine can be met."""
        return f"ipc://{self.folder}/{name}"

    def role(self, name: str) -> Role:
        """What the host of a name must have."""
        return self.roles.get(mesh_of(name), Role())

    def environment_of(self, name: str) -> dict[str, str]:
        """What is laid over the environment of one agent."""
        return {**self.environment, **self.role(name).env}

    @property
    def secret(self) -> Path:
        """The file with the job's key, which agents need that are met over TCP. It is never on a command line."""
        file = self.folder / "key"
        Keys.load_or_create(file)
        return file

    def command(self, join: str, secret: Path | None = None) -> list[str]:
        """The command line of an agent that is met at an address, with the file that holds the key where it runs."""
        key: list[object] = [] if secret is None else ["--key", secret]
        keep: list[object] = [] if self.keep_s is None else ["--keep", self.keep_s]
        return command("monarch_nb.job.worker", join, *key, *keep)


def said_once(stories: Mapping[str, str]) -> dict[str, str]:
    """What an engine says of hosts, by name: the lines below the first, such as a log's, with the first host alone."""
    first: dict[str, str] = {}
    said = {}
    for name, story in stories.items():
        line, more, _ = story.partition("\n")
        said[name] = story if not more or story not in first else f"{line}, as {first[story]} is"
        first.setdefault(story, name)
    return said


def log_words(lines: Sequence[str]) -> str:
    """A log below the words on how its writer ended: launchers give the cause first, most others last."""
    few = [line for line in lines if line.strip("-=* ")]
    if len(few) > 2 * _ENDS:
        few = [*few[:_ENDS], f"... {counted(len(few) - 2 * _ENDS, 'line')} between ...", *few[-_ENDS:]]
    return "".join(f"\n  | {line}" for line in few)


class JobAdapter(ABC):
    """One engine. Its methods are called on any thread, and block for a bounded time."""

    keep_s: float | None = 60.0  # how long agents live on when no program uses them; None: they cannot end themselves
    watch_s = 5.0  # between looks at agents whose hosts have joined, for how the engine ends them; 0: never
    chooses = False  # whether `add` chooses what a job's agents have not taken yet: one at a time may, of all processes
    takes_places = False  # whether users can say on which machines `add` starts agents

    @abstractmethod
    def start(self, wanted: AgentsWanted) -> Agents:
        """Starts the agents. What was started of a job that fails half-way, or is interrupted, is ended again."""

    def add(self, job: Running, wanted: AgentsWanted) -> Agents:
        """Starts agents more for a job that runs, as `start` does. Raises EngineError where its engine cannot."""
        raise EngineError(
            "jobs of this kind get no hosts while they run. Start another job beside it, and name its hosts: "
            "mesh.grow(hosts=other_job.state(None).more)"
        )

    def let_go(self, going: Running, job: Running) -> None:
        """Gives back what some agents of a job had, which have been told to end; `going` has these alone."""
        return  # nothing is left of most

    @abstractmethod
    def look(self, job: Running) -> Mapping[str, Seen]:
        """How each agent of a job is. One that the engine does not know any more has ended.

        Raises EngineError where the engine does not answer: that says nothing of the agents.
        """

    @abstractmethod
    def kill(self, job: Running) -> None:
        """Ends a job's agents, with all that runs on their hosts. Nothing happens to those that have ended.

        SIGTERM would not end one that is used: it is notice to its users. SIGKILL ends it, and what is on it after it.
        """

    @abstractmethod
    def running(self) -> Mapping[str, Running]:
        """All jobs of this user with agents that run or wait, by their ids, whoever has started them."""

    def folder(self) -> Path:
        """Where the folders of jobs go: one that outlives a login, unless an engine needs another."""
        return state_folder()

    def join(self, job: Running, name: str, joins: Sequence[str]) -> Sequence[str]:
        """The addresses at which this process meets an agent; an engine may open a way for it first."""
        return joins

    def detour(self, job: Running) -> str:
        """What to do where agents run that this process does not reach."""
        return "reach it through a gateway"

    def joined(self, job: Running, name: str) -> None:
        """The host of an agent has joined: another that the engine starts in its place is not the same."""
        return  # most start none

    def hold(self, job: Running, keep: bool) -> None:
        """This process will ask of a job again and again, or not any more: an engine may keep connections for it."""
        return  # most need none

    def lines(self, job: Running, name: str, count: int) -> list[str]:
        """The last lines that an agent has written, as far as the engine keeps them."""
        return []

    def shell(self, job: Running, name: str) -> list[str]:
        """The command line that gives a shell where an agent runs. Raises LookupError where there is none."""
        raise LookupError(f"jobs of this kind give no shell on {name}")


class EngineError(RuntimeError):
    """An engine refused, or could not be asked; the text has its own words and what to do."""


def mesh_of(name: str) -> str:
    """The mesh of a host's name."""
    return name.rpartition("_")[0]


def state_folder() -> Path:
    """`$XDG_STATE_HOME/monarch-nb/jobs`, for this user alone; it is made if it is not there."""
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    folder = Path(home, "monarch-nb", "jobs")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def kept_jobs(folder: Path, kind: str) -> dict[str, Running]:
    """The jobs of a kind whose folders lie here, by their ids, whatever has become of them."""
    jobs: dict[str, Running] = {}
    for file in folder.glob(f"{PREFIX}*/{JOB_FILE}"):
        with contextlib.suppress(OSError, msgspec.MsgspecError):  # it ends just now
            if file.stat().st_uid != os.geteuid():
                continue
            job = json_decoder(Running).decode(file.read_bytes())
            if job.kind == kind and job.folder == str(file.parent):
                jobs[job.job] = job
    return jobs


def living_jobs(adapter: JobAdapter, kind: str) -> dict[str, Running]:
    """Those of them of which not all agents have ended. Blocks while the engine is asked."""
    jobs = {}
    for number, job in kept_jobs(adapter.folder(), kind).items():
        try:
            seen = adapter.look(job)
        except EngineError:  # it may well run
            jobs[number] = job
            continue
        if any(each.state != "ended" for each in seen.values()):
            jobs[number] = job
    return jobs
