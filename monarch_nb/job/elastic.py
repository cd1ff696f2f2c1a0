"""Hosts that a running job is given, and takes back: the source of its host meshes."""

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from monarch_nb.connect import own_hosts
from monarch_nb.connect.routes import Routes
from monarch_nb.job.adapter import Agent, Agents, AgentsWanted, EngineError, JobAdapter, Running, mesh_of
from monarch_nb.job.arrival import Arrival, HostsMissingError
from monarch_nb.job.role import Role
from monarch_nb.mesh.host_record import NoMoreHostsError
from monarch_nb.runtime import runtime

logger = logging.getLogger("monarch_nb.job")


class ElasticJob(Protocol):
    """What a job is asked for."""

    @property
    def adapter(self) -> JobAdapter:
        """Of its engine."""

    @property
    def known_as(self) -> str:
        """What people call it."""

    @property
    def agents(self) -> dict[str, Agent]:
        """By the names of their hosts."""

    def keep_agents(self, agents: dict[str, Agent]) -> None:
        """These are its agents from now on; they are written down, for who loads the job."""

    def running(self, agents: dict[str, Agent]) -> Running:
        """The job with some of its agents."""

    def wanting(self, mesh: str, names: Sequence[str]) -> AgentsWanted:
        """What its engine is asked for, for more hosts of a mesh. Raises EngineError where there are none."""

    def role_of(self, mesh: str) -> Role:
        """What the hosts of a mesh must have."""

    @property
    def arrivals(self) -> list[Arrival]:
        """How its hosts have come in."""

    def arrived(self, arrival: Arrival) -> None:
        """More hosts have come in."""


class JobHosts:
    """Those of one mesh of a job."""

    def __init__(self, job: ElasticJob, mesh: str) -> None:
        self._job, self._mesh = job, mesh
        self._lock = threading.Lock()
        self._came: list[str] = []
        self._went: set[str] = set()

    @property
    def changed(self) -> bool:
        """Whether the mesh has other hosts than at first, as this process knows it."""
        return bool(self._came or self._went)

    def hosts(self, first: Sequence[str]) -> list[str]:
        """The ids of its hosts; `first` are those that it had at first."""
        return [host for host in (*first, *self._came) if host not in self._went]

    def __str__(self) -> str:
        return self._job.known_as

    def more(self, count: int, timeout: float) -> tuple[str, ...]:
        """Asks the engine for hosts, and waits for them. What has been started ends again where not all come."""
        job = self._job
        with self._lock:
            names = _next_names(job.running(job.agents), self._mesh, count)
            wanted = job.wanting(self._mesh, names)
            started: dict[str, Agent] = {}
            arrival: Arrival | None = None
            try:
                started.update(job.adapter.add(job.running(job.agents), wanted))
                job.keep_agents({**job.agents, **started})
                arrival = Arrival(
                    job.adapter, job.running(started), {self._mesh: job.role_of(self._mesh)}, job.known_as, None
                )
                hosts = arrival.hosts[self._mesh].get(timeout)
                job.arrived(arrival)
                self._came += hosts
                return hosts
            except BaseException as error:
                story = "" if arrival is None else str(arrival.progress)
                if arrival is not None:
                    arrival.stop("it was given up")
                _in_thread(lambda: self._end(started), wait=isinstance(error, Exception))
                if isinstance(error, TimeoutError):
                    raise NoMoreHostsError(
                        f"{job.known_as} has given {self._mesh} no {_more(count)} within {timeout:g} s: {story}. They "
                        "were let go again, and nothing has changed. Wait longer with timeout=…, or see what the "
                        "engine says: monarch-nb job ls"
                    ) from None
                if isinstance(error, (HostsMissingError, EngineError, ValueError)):
                    raise NoMoreHostsError(
                        f"{job.known_as} gives {self._mesh} no {_more(count)}, and nothing has changed: {error}"
                    ) from error
                raise

    def let_go(self, hosts: Sequence[str]) -> None:
        """Ends the agents of these hosts, as the engine wants it."""
        with self._lock:
            names = {name: host for arrival in self._job.arrivals for name, host in arrival.forget(hosts).items()}
            self._went.update(hosts)
            routes = runtime().part(Routes)
            for host in hosts:
                if (remote := routes.attached.get(host)) is not None and remote.lost:
                    routes.attached.pop(host).give_up("it was replaced")
            living = [host for host in hosts if host in routes.attached]
            if living:
                own_hosts.shutdown_hosts(living).exception()
            self._end({name: agent for name, agent in self._job.agents.items() if name in names})

    def _end(self, agents: Agents) -> None:
        if not agents:
            return
        job = self._job
        try:
            job.adapter.let_go(job.running(dict(agents)), job.running(job.agents))
        except Exception as error:
            logger.warning("%s: %s may run on: %s", job.known_as, ", ".join(agents), error)
        job.keep_agents({name: agent for name, agent in job.agents.items() if name not in agents})


def _more(count: int) -> str:
    return "other host" if count == 1 else f"{count} more hosts"


def _next_names(job: Running, mesh: str, count: int) -> tuple[str, ...]:
    """Names that no host of the mesh has or had: what those have left in the job's folder is not taken for news."""
    left = [path.stem for path in Path(job.folder).glob(f"{mesh}_*")] if job.folder else []
    numbers = [name.rpartition("_")[2] for name in (*job.agents, *left) if mesh_of(name) == mesh]
    first = max((int(number) for number in numbers if number.isdecimal()), default=-1) + 1
    return tuple(f"{mesh}_{first + place}" for place in range(count))


def _in_thread(function: Callable[[], object], *, wait: bool) -> None:
    """An interrupt does not cut it off."""
    thread = threading.Thread(target=function, name="monarch-job-end", daemon=True)
    thread.start()
    if wait:
        thread.join()
