"""The contract between jobs and the schedulers that run machines: one adapter for each kind, and the list of kinds."""

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from monarch_nb._private import write_private
from monarch_nb.host.launch import command
from monarch_nb.transport import Keys
from monarch_nb.wire import converted, counted, json_decoder

HERE = "here"  # the join address of the controller's own host
PREFIX = "mnb-job-"  # of the names of jobs' folders
JOB_FILE = "job.json"  # in the folder of a job
ALL_LINES = 1 << 20
_ENDS = 5  # lines to show of each end of a log
_LOADERS: "dict[str, Callable[[], JobAdapter]]" = {}  # each kind's module adds its own
_adapters: "dict[str, JobAdapter]" = {}


class Role(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One mesh of a job: `hosts` machines with at least these resources; unset ones are left to the scheduler.

    A job may have hosts of several kinds: `{"trainers": Role(hosts=4, gpus=8), "loaders": Role(hosts=2, cpus=16)}`.
    A scheduler that does not support one of the fields refuses the job.
    """

    hosts: int = 1
    spares: int = 0  # additional hosts that join, and wait to replace lost ones
    gpus: int | None = None  # on each host, checked when it joins; a host with fewer is refused
    cpus: int | None = None  # on each host
    memory: str = ""  # on each host, in the scheduler's notation: 64G
    image: str = ""  # the container image, for schedulers that run images
    env: dict[str, str] = {}  # laid over the environment of its hosts


def read_roles(meshes: "Mapping[str, int | Role]") -> dict[str, Role]:
    """Returns the roles of a job's meshes, which may also be numbers of hosts. Raises ValueError."""
    roles = {}
    for name, entry in meshes.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise ValueError(f"{name!r} cannot name a mesh: it must be a name as Python has them")
        role = entry if isinstance(entry, Role) else Role(hosts=entry)
        if isinstance(role.hosts, bool) or not isinstance(role.hosts, int) or role.hosts < 1:
            raise ValueError(f"{name}={role.hosts!r}: a mesh has a whole number of hosts, at least 1")
        if isinstance(role.spares, bool) or not isinstance(role.spares, int) or role.spares < 0:
            raise ValueError(f"{name}: spares={role.spares!r} must be a whole number of hosts, 0 for none")
        roles[name] = role
    return roles


def saved_roles(roles: Mapping[str, Role]) -> dict[str, object]:
    """Returns roles as plain data."""
    data: dict[str, object] = msgspec.to_builtins(dict(roles))
    return data


def loaded_roles(data: Mapping[str, object]) -> dict[str, Role]:
    """Restores roles from plain data. Raises ValueError."""
    return converted(dict(data), dict[str, Role])


class Agent(NamedTuple):
    """One host agent that was requested."""

    id: str  # the scheduler's id, never reused for another agent
    join: str = ""  # the address at which controllers reach it; empty while only the agent itself will know


Agents = Mapping[str, Agent]  # by the names of their hosts


class Seen(NamedTuple):
    """The state of one agent according to its scheduler."""

    state: Literal["waiting", "running", "ended", "unknown"]
    description: str = ""  # for people: the obstacle it waits for, its place, or its end, with its last lines
    joins: tuple[str, ...] = ()  # addresses to reach it, the best first; empty while unknown
    gpus: int | None = None  # number found; None if unknown
    host: str = ""  # the id that it has given itself, if it has reported it
    stuck: bool = False  # True if it waits for something that does not happen with time alone


class Running(msgspec.Struct, frozen=True):
    """A job as its scheduler knows it."""

    job: str  # its id
    folder: str  # on this machine, for this user alone; empty if there is none
    agents: dict[str, Agent]
    options: dict[str, Any] = {}
    kind: str = ""
    started: float = 0.0  # wall clock, seconds
    spares: tuple[str, ...] = ()  # names of agents that belong to no mesh
    hosts: dict[str, str] = {}  # the ids of hosts that have joined, by name

    def save(self) -> None:
        """Writes it into its folder, where `kept_jobs` finds it."""
        write_private(Path(self.folder, JOB_FILE), msgspec.json.encode(self))

    def now(self) -> "Running":
        """Returns the job as its folder has it: another process may have added or released agents."""
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
    environment: Mapping[str, str] = field(default_factory=dict)  # laid over that of the agents
    options: Mapping[str, Any] = field(default_factory=dict)  # the scheduler's own, from the job
    roles: Mapping[str, Role] = field(default_factory=dict)  # requirements for the hosts, by mesh
    keep_s: float | None = None  # how long they live on when no program uses them; None: until they are ended
    places: tuple[str, ...] = ()  # machines for them, as users name them; empty: the scheduler chooses

    def join(self, name: str) -> str:
        """Returns an address at which an agent on this machine can be reached."""
        return f"ipc://{self.folder}/{name}"

    def role(self, name: str) -> Role:
        """Returns the requirements for the host of that name."""
        return self.roles.get(mesh_of(name), Role())

    def environment_of(self, name: str) -> dict[str, str]:
        """Returns the variables laid over the environment of one agent."""
        return {**self.environment, **self.role(name).env}

    @property
    def secret(self) -> Path:
        """The file with the job's key, for agents reached over TCP. The key is never on a command line."""
        file = self.folder / "key"
        Keys.load_or_create(file)
        return file

    def command(self, join: str, secret: Path | None = None) -> list[str]:
        """Returns the command line of an agent reached at `join`, with the file that holds the key on its machine."""
        key: list[object] = [] if secret is None else ["--key", secret]
        keep: list[object] = [] if self.keep_s is None else ["--keep", self.keep_s]
        return command("monarch_nb.job.worker", join, *key, *keep)


def deduplicated(descriptions: Mapping[str, str]) -> dict[str, str]:
    """Shortens descriptions of hosts, by name: lines below the first, such as a log's, appear once."""
    first: dict[str, str] = {}
    shortened = {}
    for name, description in descriptions.items():
        line, more, _ = description.partition("\n")
        shortened[name] = description if not more or description not in first else f"{line}, as {first[description]} is"
        first.setdefault(description, name)
    return shortened


def log_words(lines: Sequence[str]) -> str:
    """Formats a log below the description of its writer's end: launchers give the cause first, most others last."""
    excerpt = [line for line in lines if line.strip("-=* ")]
    if len(excerpt) > 2 * _ENDS:
        excerpt = [*excerpt[:_ENDS], f"... {counted(len(excerpt) - 2 * _ENDS, 'line')} between ...", *excerpt[-_ENDS:]]
    return "".join(f"\n  | {line}" for line in excerpt)


class JobAdapter(ABC):
    """One scheduler. Its methods are called on any thread, and block for a bounded time."""

    keep_s: float | None = 60.0  # how long agents live on when no program uses them; None: they cannot end themselves
    watch_s = 5.0  # between checks of agents whose hosts have joined, for their ends; 0: never
    chooses = False  # True if `add` chooses among places without agents of the job: processes must take turns
    takes_places = False  # True if users can choose the machines on which `add` starts agents

    @abstractmethod
    def start(self, wanted: AgentsWanted) -> Agents:
        """Starts the agents. If it fails half-way, or is interrupted, it ends the started ones."""

    def add(self, job: Running, wanted: AgentsWanted) -> Agents:
        """Starts more agents for a running job, as `start` does. Raises EngineError if the scheduler cannot."""
        raise EngineError(
            "jobs of this kind get no hosts while they run. Start another job beside it, and name its hosts: "
            "mesh.grow(hosts=other_job.state(None).more)"
        )

    def release(self, going: Running, job: Running) -> None:
        """Releases resources of agents that have been asked to end; `going` has only these."""
        return  # most schedulers have none left

    @abstractmethod
    def look(self, job: Running) -> Mapping[str, Seen]:
        """Returns the state of each agent of a job. An agent unknown to the scheduler has ended.

        Raises EngineError if the scheduler does not answer, whatever the states of the agents.
        """

    @abstractmethod
    def kill(self, job: Running) -> None:
        """Ends a job's agents, with all that runs on their hosts. Does nothing to those that have ended.

        SIGTERM does not end an agent in use: it is a notice to its users. SIGKILL ends it and then all that runs on it.
        """

    @abstractmethod
    def running(self) -> Mapping[str, Running]:
        """Returns all jobs of this user with agents that run or wait, by id, whoever has started them."""

    def folder(self) -> Path:
        """Returns the parent of job folders: one that outlives a login, unless the scheduler needs another."""
        return state_folder()

    def join(self, job: Running, name: str, joins: Sequence[str]) -> Sequence[str]:
        """Returns the addresses at which this process reaches an agent; may open a tunnel first."""
        return joins

    def detour(self, job: Running) -> str:
        """Returns advice for agents that this process does not reach."""
        return "reach it through a gateway"

    def joined(self, job: Running, name: str) -> None:
        """Called when an agent's host has joined: another agent started in its place is not the same host."""
        return  # most schedulers start none

    def hold(self, job: Running, keep: bool) -> None:
        """Called before and after this process polls a job regularly, so that connections can be kept open."""
        return  # most schedulers have none

    def key_changed(self, job: Running) -> None:
        """Called when the job's folder has another key, which its agents have already: for those that come later."""
        return  # most schedulers take it from there

    def lines(self, job: Running, name: str, count: int) -> list[str]:
        """Returns the last lines that an agent has written, as far as the scheduler stores them."""
        return []

    def shell(self, job: Running, name: str) -> list[str]:
        """Returns the command line of a shell where an agent runs. Raises LookupError if there is none."""
        raise LookupError(f"jobs of this kind give no shell on {name}")


class EngineError(RuntimeError):
    """A scheduler refused a request, or could not be asked; the text has its message and a remedy."""


def mesh_of(name: str) -> str:
    """Returns the mesh of a host's name."""
    return name.rpartition("_")[0]


def state_folder() -> Path:
    """Returns `$XDG_STATE_HOME/monarch-nb/jobs`, a private folder, and makes it if needed."""
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    folder = Path(home, "monarch-nb", "jobs")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def kept_jobs(folder: Path, kind: str) -> dict[str, Running]:
    """Returns the jobs of a kind with folders here, by id, whatever has become of them."""
    jobs: dict[str, Running] = {}
    for file in folder.glob(f"{PREFIX}*/{JOB_FILE}"):
        with contextlib.suppress(OSError, msgspec.MsgspecError):  # it is being removed
            if file.stat().st_uid != os.geteuid():
                continue
            job = json_decoder(Running).decode(file.read_bytes())
            if job.kind == kind and job.folder == str(file.parent):
                jobs[job.job] = job
    return jobs


def living_jobs(adapter: JobAdapter, kind: str) -> dict[str, Running]:
    """Returns those of them with agents that have not ended. Blocks while the scheduler is asked."""
    jobs = {}
    for number, job in kept_jobs(adapter.folder(), kind).items():
        try:
            states = adapter.look(job)
        except EngineError:  # it may be running
            jobs[number] = job
            continue
        if any(state.state != "ended" for state in states.values()):
            jobs[number] = job
    return jobs


def register_job(kind: str, load: Callable[[], JobAdapter]) -> None:
    """Adds a kind of jobs; `load` makes its adapter when it is first needed. Raises ValueError for a known kind."""
    if kind in _LOADERS:
        raise ValueError(f"there is a kind of jobs {kind!r} already")
    _LOADERS[kind] = load


def unregister_job(kind: str) -> None:
    """Removes a kind; running jobs of it are not ended. Raises LookupError for an unknown kind."""
    if _LOADERS.pop(kind, None) is None:
        raise LookupError(f"there is no kind of jobs {kind!r}")
    _adapters.pop(kind, None)


def kinds() -> list[str]:
    """Returns the names of all kinds of jobs."""
    return sorted(_LOADERS)


def adapter_of(kind: str) -> JobAdapter:
    """Returns the adapter of a kind, one for this process. Raises LookupError, or EngineError without its package."""
    if kind not in _LOADERS:
        raise LookupError(f"there is no kind of jobs {kind!r} here: there are {', '.join(kinds())}")
    if kind not in _adapters:
        try:
            _adapters[kind] = _LOADERS[kind]()
        except ModuleNotFoundError as error:
            raise EngineError(f"{kind} jobs need the package {error.name}: install monarch-nb[{kind}]") from error
    return _adapters[kind]
