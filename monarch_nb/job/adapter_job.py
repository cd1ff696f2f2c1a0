"""Jobs of any kind: host meshes of the agents that the adapter of the kind starts."""

import contextlib
import logging
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future as FutureResult
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec

from monarch_nb.connect.own_hosts import give_up_hosts
from monarch_nb.connect.routes import HostRoutes
from monarch_nb.host.command import check_environment
from monarch_nb.job.adapter import (
    HERE,
    PREFIX,
    Agent,
    Agents,
    AgentsWanted,
    EngineError,
    JobAdapter,
    Role,
    Running,
    adapter_of,
    deduplicated,
    loaded_roles,
    mesh_of,
    read_roles,
    saved_roles,
)
from monarch_nb.job.arrival import Arrival, Progress
from monarch_nb.job.elastic import JobHosts, locked
from monarch_nb.job.report import FolderUse, end_uses, tidy_soon
from monarch_nb.job.trait import AppliedRecord, JobState, JobTrait
from monarch_nb.mesh import HostMesh, give_up, this_host
from monarch_nb.mesh.host import host_labels
from monarch_nb.runtime import current_runtime, started
from monarch_nb.settings import parse_duration
from monarch_nb.wire import counted, kind_of

_PROGRESS_S = 0.5
_KILLED = "its job was killed"
T = TypeVar("T")
logger = logging.getLogger("monarch_nb.job")
_jobs: "weakref.WeakSet[AdapterJob]" = weakref.WeakSet()  # of this program; several objects may be the same job


class AdapterForm(msgspec.Struct):
    """The saved attributes of a job."""

    _kind: str
    _meshes: dict[str, Annotated[int, msgspec.Meta(ge=1)]]
    _env: dict[str, str]
    _agents: dict[str, Agent]
    _folder: str
    _roles: dict[str, object] = {}
    _options: dict[str, Any] = {}
    _patience: float | None = None
    _keep: float | None = None
    _spares: tuple[str, ...] = ()
    _ids: dict[str, str] = {}


class WrittenHosts(msgspec.Struct, frozen=True):
    """A mesh of a job, recorded for another process."""

    job: str  # the output of `dumps`
    mesh: str
    path: str | None = None  # the file it was saved in


class AdapterJob(JobTrait):
    """Hosts of one kind, such as `"process"`; `meshes` has the number of hosts of each mesh, or a `Role`.

    `env` is laid over the environment of the hosts, which outlive the client for the time set by `keep_for`; `options`
    are those of the scheduler. `kill()` ends them, from any process that has the job's file. `state()` does not wait
    for the hosts: spawning on them waits, and `wait()` shows how many have joined. If not all have been started within
    `patience` seconds, the job is given up; None: never. Raises LookupError for an unknown kind.
    """

    _transient = frozenset({"_host_meshes", "_arrival", "_sources", "_later_arrivals", "_use"})
    _form: ClassVar[type[msgspec.Struct] | None] = AdapterForm

    def __init__(
        self, kind: str, meshes: "Mapping[str, int | Role]", env: Mapping[str, str] | None = None, *,
        options: Mapping[str, Any] | None = None, patience: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self._kind = kind
        check_environment(env or {}, f"{type(self).__name__}(env=...)")
        self._env = dict(env or {})
        self._options = dict(options or {})
        self._patience = patience
        self._agents: dict[str, Agent] = {}
        self._spares: tuple[str, ...] = ()  # names of agents that belong to no mesh
        self._ids: dict[str, str] = {}  # of hosts that have joined, by name
        self._folder = ""
        self._wish(meshes)
        self._restored()
        self._keep = self._adapter.keep_s

    @property
    def keep(self) -> float | None:
        """Seconds that hosts live on when no program uses them; None: until the job is killed."""
        return self._keep

    @property
    def can_end_itself(self) -> bool:
        """True if hosts of this kind can end by themselves."""
        return self._adapter.keep_s is not None

    def keep_for(self, time: "str | float | None") -> None:
        """Sets how long hosts live on when no program uses them: `"8h"`, or seconds; None: until the job is killed.

        The default is a minute, or an hour where one may have waited for the hosts. A mesh that was left by `detach`
        uses its hosts until its lease ends. Raises ValueError for an invalid duration, after the job was applied, and
        for hosts that their scheduler would start again.
        """
        if self.active:
            raise ValueError("the job runs: how long its hosts are kept can only be said before")
        if not self.can_end_itself:
            raise ValueError(f"hosts of {kind_of(self)} live until kill()")
        seconds = None if time in (None, "never") else parse_duration(time) / 1e9 if isinstance(time, str) else time
        if seconds is not None and not float(seconds) > 0:
            raise ValueError(f"keep={time!r} must be a positive time, or None")
        self._keep = None if seconds is None else float(seconds)

    def _wish(self, meshes: "Mapping[str, int | Role]") -> None:
        roles = read_roles(meshes)
        self._meshes = {name: role.hosts for name, role in roles.items()}
        self._roles = saved_roles(roles)

    def _restored(self) -> None:
        adapter_of(self._kind)  # raises for an unknown kind
        self._host_meshes: list[HostMesh] = []
        self._arrival: Arrival | None = None
        self._sources: dict[str, JobHosts] = {}
        self._later_arrivals: list[Arrival] = []  # of later hosts
        self._use: FolderUse | None = None
        _jobs.add(self)

    def __getstate__(self) -> dict[str, object]:
        # A copy connects anew, as a job from a file does: futures and connections belong to this program.
        return {name: value for name, value in super().__getstate__().items() if name not in self._transient}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        self._restored()

    @property
    def _adapter(self) -> JobAdapter:
        return adapter_of(self._kind)

    @property
    def _job(self) -> Running:
        return self.running(self._agents)

    def _role(self, mesh: str) -> Role:
        return loaded_roles(self._roles).get(mesh, Role(hosts=self._meshes[mesh]))

    def _names(self, mesh: str) -> list[str]:
        if not self._agents:
            return [f"{mesh}_{number}" for number in range(self._meshes[mesh])]
        return [name for name in self._agents if mesh_of(name) == mesh and name not in self._spares]

    def _create(self, client_script: str | None) -> None:
        if client_script is not None:
            raise RuntimeError(f"{kind_of(self)} cannot run a client script: run it yourself, beside the job")
        if not self._meshes:
            raise ValueError(f"{kind_of(self)} needs at least one mesh")
        self._folder = tempfile.mkdtemp(prefix=PREFIX, dir=self._adapter.folder())
        self._use_folder()
        tidy_soon(self._kind, self._adapter)
        try:
            self._start(Path(self._folder))
            self._job.save()
        except BaseException:  # an interrupt too: nothing of a half-made job may remain
            self._kill()
            raise

    def _start(self, folder: Path) -> None:
        roles = {mesh: self._role(mesh) for mesh in self._meshes}
        spares = {mesh: [f"{mesh}_{role.hosts + n}" for n in range(role.spares)] for mesh, role in roles.items()}
        names = tuple(name for mesh in self._meshes for name in (*self._names(mesh), *spares[mesh]))
        self._spares = tuple(name for group in spares.values() for name in group)
        roles = {mesh: msgspec.structs.replace(role, hosts=role.hosts + role.spares) for mesh, role in roles.items()}
        wanted = AgentsWanted(str(self._applied.apply_id), names, folder, self._env, self._options, roles, self._keep)
        job = self.running({})

        def undo(agents: Agents) -> None:
            try:
                self._adapter.kill(msgspec.structs.replace(job, agents=dict(agents)))
                shutil.rmtree(folder, ignore_errors=True)
            except EngineError as error:
                logger.warning("%s of a job that was interrupted may run on: %s", ", ".join(agents), error)

        started: Agents = _uninterrupted(lambda: self._adapter.start(wanted), undo)
        self._agents = dict(started)

    def _state(self) -> JobState:
        lost = self._lost()
        if lost:
            raise RuntimeError(f"the job is gone: {self._describe()}: {lost}")
        return JobState({mesh: self._host_mesh(mesh) for mesh in self._meshes})

    def _host_mesh(self, mesh: str) -> HostMesh:
        names = self._names(mesh)
        if [self._agents[name].join for name in names] == [HERE]:
            return this_host()
        pending = self._coming().hosts[mesh]
        source = self._sources[mesh]
        ids = source.hosts(pending.get()) if source.changed else pending
        hosts = HostMesh(mesh, ids, host_labels(names), owned=True, source=source)
        self._host_meshes.append(hosts)
        return hosts

    def _coming(self) -> Arrival:
        if self._arrival is None or not self._arrival.belongs_here():
            self._use_folder()
            roles = {mesh: self._role(mesh) for mesh in self._meshes}
            self._later_arrivals = []
            for source in self._sources.values():
                source.close()
            agents = {name: agent for name, agent in self._agents.items() if name not in self._spares}
            self._arrival = Arrival(
                self._adapter, self.running(agents), roles, self.known_as, self._patience, self.joined
            )
            self._sources = {mesh: JobHosts(self, mesh) for mesh in self._meshes}
        return self._arrival

    @property
    def progress(self) -> Progress:
        """Hosts that have joined, and those that are missing or lost, with the reasons. Does not block."""
        job = self._running
        if not isinstance(job, AdapterJob):
            return Progress(sum(self._meshes.values()), (), {})
        job._coming()
        return job._present()

    def _use_folder(self) -> None:
        """Marks the job's folder as used for as long as this process has the job."""
        if self._folder and (self._use is None or self._use.folder != self._folder):
            with contextlib.suppress(OSError):  # gone, or on another machine
                self._use = FolderUse(self, self._folder)

    def _present(self) -> Progress:
        """Returns the current progress, with later hosts, and without those that have ended since."""
        attached = current_runtime().part(HostRoutes).attached
        ids, descriptions, ends = dict[str, str](), dict[str, str](), dict[str, str]()
        for arrival in self.arrivals:
            ids.update(arrival.joined)
            ends.update(arrival.ends)
            descriptions.update(arrival.progress.missing)
        joined, missing = list[str](), dict[str, str]()
        agents, spares = self.agents, set(self.spare_agents)
        for name in [name for name in agents if name not in spares]:
            host = ids.get(name, "")
            if agents[name].join == HERE or (host in attached and not attached[host].lost):
                joined.append(name)
            elif host in attached:
                missing[name] = ends.get(name) or f"is lost: {attached[host].lost}"
            elif host:
                missing[name] = "was returned"
            else:
                missing[name] = descriptions.get(name, "came to another program with this job, not to this one")
        pools = [source.spares for source in self._sources.values()]
        waiting = tuple(name for pool in pools for name in pool.waiting())
        return Progress(len(joined) + len(missing), tuple(joined), missing, waiting, sum(pool.target for pool in pools))

    def wait(self, timeout: float | None = None, tell: Callable[[Progress], object] | None = None) -> Progress:
        """Blocks until all hosts have joined; `tell` is called with the progress whenever it has changed.

        Ctrl-C while it waits kills the job with all its hosts. Raises HostsMissingError if some will not come, and
        TimeoutError, after which the job goes on.
        """
        job = self._running
        if not isinstance(job, AdapterJob):
            raise RuntimeError("the job was not applied: call state() first")
        arrival, deadline, last = job._coming(), None if timeout is None else time.monotonic() + timeout, ""
        try:
            while True:
                decided, progress = arrival.wait(_PROGRESS_S), job._present()
                if tell is not None and str(progress) != last:
                    last = str(progress)
                    tell(progress)
                if decided:
                    break
                if deadline is not None and time.monotonic() >= deadline:
                    raise TimeoutError(str(progress))
        except KeyboardInterrupt:
            self.kill()
            raise
        for future in arrival.hosts.values():
            future.get(0)
        return job._present()

    # -- for the source of its hosts (JobHosts)

    @property
    def adapter(self) -> JobAdapter:
        """The adapter of its kind."""
        return self._adapter

    @property
    def known_as(self) -> str:
        """Its kind and the beginning of its id."""
        return f"{type(self).__name__} {str(self._applied.apply_id)[:8]}"

    @property
    def agents(self) -> dict[str, Agent]:
        """Its agents by host name, from the job's folder, which processes share."""
        return self._job.now().agents

    @property
    def arrivals(self) -> list[Arrival]:
        """The arrivals of its hosts."""
        spares = [arrival for source in self._sources.values() for arrival in source.spares.arrivals]
        return [*([] if self._arrival is None else [self._arrival]), *self._later_arrivals, *spares]

    def arrived(self, arrival: Arrival) -> None:
        """Adds an arrival of later hosts."""
        self._later_arrivals.append(arrival)

    def running(self, agents: dict[str, Agent]) -> Running:
        """Returns the job with only these agents."""
        number, started = str(self._applied.apply_id), self._applied.started
        spares = tuple(name for name in self._spares if name in agents)
        ids = {name: host for name, host in self._ids.items() if name in agents}
        return Running(number, self._folder, agents, self._options, self._kind, started, spares, ids)

    @property
    def host_ids(self) -> dict[str, str]:
        """The ids of its hosts that have joined, here or elsewhere, by name."""
        return {**self._job.now().hosts, **self._ids}

    def joined(self, hosts: Mapping[str, str]) -> None:
        """Records the ids of hosts that have joined, by name, for other processes that load the job."""
        self._ids |= hosts
        try:
            with locked(self._folder):
                saved = self._job.now()
                if saved.folder and any(saved.hosts.get(name) != host for name, host in hosts.items()):
                    msgspec.structs.replace(saved, hosts={**saved.hosts, **hosts}).save()
        except (OSError, EngineError) as error:  # the job is about to end, or its folder cannot be written
            logger.info("%s: who loads the job does not know the ids of %s: %s", self.known_as, ", ".join(hosts), error)

    @property
    def spare_agents(self) -> tuple[str, ...]:
        """The names of its agents that belong to no mesh."""
        return self._job.now().spares

    def keep_agents(self, agents: dict[str, Agent], spares: Iterable[str] | None = None) -> None:
        """Replaces its agents, and its spares if given, and records them for other processes that load the job.

        Raises EngineError if it was killed meanwhile.
        """
        if not self._agents:
            raise EngineError("the job was killed")
        spares = self.spare_agents if spares is None else spares
        self._ids = {name: host for name, host in self.host_ids.items() if name in agents}
        self._agents = agents
        self._spares = tuple(name for name in spares if name in agents)
        if self._folder and self._agents:
            self._job.save()
        if self._applied.path is not None:
            self.dump(self._applied.path)

    def wanting(self, mesh: str, names: Sequence[str], machines: Sequence[str]) -> AgentsWanted:
        """Returns the request for more hosts of a mesh. Raises EngineError if nothing can be requested."""
        if not self._folder:
            raise EngineError("the job has no folder: its hosts were started by a program of the user's own")
        roles = {mesh: msgspec.structs.replace(self._role(mesh), hosts=len(names))}
        return AgentsWanted(
            str(self._applied.apply_id),
            tuple(names),
            Path(self._folder),
            self._env,
            self._options,
            roles,
            self._keep,
            tuple(machines),
        )

    def written(self, mesh: str) -> str:
        """Returns a record of this job and its mesh for another process; "" for a job that cannot be saved."""
        try:
            saved = self.dumps().decode()
        except TypeError as error:
            logger.info("who attaches a mesh of %s does not find the job: %s", self.known_as, error)
            return ""
        return msgspec.json.encode(WrittenHosts(saved, mesh, self._applied.path)).decode()

    def taken_up(self) -> None:
        """Takes over the agents from its folder, which other processes may have changed. Raises EngineError."""
        saved = self._job.now()
        if self._folder and not Path(self._folder).is_dir():
            raise EngineError(f"its folder {self._folder} is not here: it was killed, or started on another machine")
        self._agents, self._spares, self._ids = dict(saved.agents), saved.spares, {**self._ids, **saved.hosts}

    def source(self, mesh: str) -> JobHosts:
        """Returns the source of a mesh's hosts in this process."""
        self._coming()
        return self._sources[mesh]

    def role_of(self, mesh: str) -> Role:
        """Returns the requirements for the hosts of a mesh."""
        return self._role(mesh)

    def _wishes(self) -> str:
        spares = {name: self._role(name).spares for name in self._meshes}
        more = {name: f" and {counted(count, 'spare')}" for name, count in spares.items() if count}
        return ", ".join(f"{name}={count}{more.get(name, '')}" for name, count in self._meshes.items())

    def _lost(self) -> str:
        if not self._agents:
            return "it has no hosts"
        states = self._adapter.look(self.running({n: a for n, a in self._agents.items() if n not in self._spares}))
        ended = {name: state.description for name, state in states.items() if state.state == "ended"}
        return "; ".join(f"{name} {description}" for name, description in deduplicated(ended).items())

    def can_run(self, spec: JobTrait) -> bool:
        """Returns whether `spec` is an equal job (kind, meshes, options, environment), and all agents run or wait."""
        if not isinstance(spec, AdapterJob):
            return False
        wishes = (self._kind, self._meshes, self._roles, self._env, self._options)
        return wishes == (spec._kind, spec._meshes, spec._roles, spec._env, spec._options) and not self._lost()

    def _kill(self) -> None:
        hosts = self.host_ids.values()
        for instance in [job for job in tuple(_jobs) if job._applied.apply_id == self._applied.apply_id]:
            instance._give_up()  # including itself
        if (runtime := started()) is not None:  # hosts attached by name, and by no job of this program
            give_up_hosts([host for host in hosts if host in runtime.part(HostRoutes).attached], _KILLED)
        agents, self._agents = {**self.agents, **self._agents}, {}  # late agents are ended at once from now on
        if agents:
            job = self.running(agents)

            def end() -> None:
                self._adapter.kill(job)
                if job.folder:
                    shutil.rmtree(job.folder, ignore_errors=True)

            try:
                _uninterrupted(end)
            except BaseException:
                self._agents = agents
                raise
        elif self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
        end_uses(self._folder)
        self._spares, self._folder, self._ids = (), "", {}
        self._restored()

    def _give_up(self) -> None:
        """Gives up the job's hosts in this program, attached and pending, as the job is about to be killed."""
        for mesh in self._host_meshes:
            give_up(mesh, _KILLED)
        for source in self._sources.values():
            source.close()
        for arrival in self.arrivals:
            arrival.stop("the job was killed")


def _uninterrupted(work: Callable[[], T], undo: Callable[[T], object] | None = None) -> T:
    """Runs `work` to its end: an interrupt ends only the wait, and a later result is passed to `undo`."""
    outcome: FutureResult[T] = FutureResult()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            outcome.set_exception(error)
        else:
            outcome.set_result(result)

    threading.Thread(target=run, name="monarch-job-engine", daemon=False).start()  # the end of the program waits for it
    try:
        return outcome.result()
    except BaseException:
        if undo is not None:
            outcome.add_done_callback(lambda ended: None if ended.exception() else undo(ended.result()))
        raise


def running_jobs(kind: str) -> list[AdapterJob]:
    """Returns the running jobs of a kind, also those whose files are lost.

    `state()` gives their hosts, `kill()` ends them.
    Raises LookupError for an unknown kind, EngineError if the scheduler cannot be asked.
    """
    jobs = []
    for number, running in adapter_of(kind).running().items():
        meshes: dict[str, int] = {}
        for name in [name for name in running.agents if name not in running.spares]:
            meshes[mesh_of(name)] = meshes.get(mesh_of(name), 0) + 1
        job = AdapterJob(kind, meshes, options=running.options)
        job._agents, job._folder, job._spares = dict(running.agents), running.folder, running.spares
        job._applied = AppliedRecord(number, running.started)
        jobs.append(job)
    return jobs


def jobs_here(number: str | None) -> list[AdapterJob]:
    """Returns the jobs of this program with that id whose hosts it has requested or looked for."""
    jobs = [job for job in tuple(_jobs) if job._applied.apply_id == number and number is not None]
    return [job for job in jobs if job._arrival is not None and job._arrival.belongs_here()]
