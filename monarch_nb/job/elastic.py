"""Hosts that a running job requests and returns, and its spares: the source of its host meshes."""

import contextlib
import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from monarch_nb._private import try_lock
from monarch_nb.connect import own_hosts
from monarch_nb.connect.routes import HostRoutes
from monarch_nb.job.adapter import Agent, Agents, EngineError, Running, Seen, mesh_of
from monarch_nb.job.arrival import Arrival, HostsMissingError
from monarch_nb.lifecycle.elastic import run_in_background
from monarch_nb.lifecycle.watching import show_host_message
from monarch_nb.mesh.host_record import Fate, NoMoreHostsError
from monarch_nb.mesh.mesh_events import Event, HostLost, MeshEvents
from monarch_nb.runtime import Future, current_runtime, fail_future, pending_future, resolve_future, when_done
from monarch_nb.supervision import Intensity
from monarch_nb.transport import TrustError, held_back
from monarch_nb.wire import host_name

if TYPE_CHECKING:
    from monarch_nb.job.adapter_job import AdapterJob

logger = logging.getLogger("monarch_nb.job")
_ANSWER_S = 4.0  # for a scheduler to report the fate of hosts
_LOCK_S = 0.02  # between two attempts
_no_folder = threading.Lock()  # for a job without a folder to lock
_REFILLS, _WITHIN_S = 3, 600.0  # limits how often a failed spare is replaced


class Spares:
    """The spares of one mesh. They belong to no host mesh, so that the death of one fails nothing."""

    def __init__(
        self, mesh: str, known_as: str, *, start: Callable[[int], dict[str, Arrival]],
        drop: Callable[[str], None],
    ) -> None:  # fmt: skip
        """`start` requests a number of hosts, and returns their arrivals by name; `drop` gives one up, by name."""
        self._mesh, self._known_as, self._start, self._drop = mesh, known_as, start, drop
        self._lock = threading.RLock()
        self._arrivals: dict[str, Arrival] = {}  # by name; they have joined, or may yet
        self._target = 0
        self._limit = Intensity(_REFILLS, _WITHIN_S)
        self._closed = False
        self._runtime = current_runtime()

    def follow(self, arrivals: dict[str, Arrival], count: int) -> None:
        """Adds requested spares; `count` is how many there should be."""
        with self._lock:
            self._target = count
            self._arrivals.update(arrivals)
            if self._on_event not in self._runtime.part(MeshEvents).listeners and not self._closed:
                self._runtime.part(MeshEvents).listeners.append(self._on_event)
        for name, arrival in arrivals.items():
            when_done(arrival.hosts[self._mesh], partial(self._on_arrival, name))

    @property
    def arrivals(self) -> list[Arrival]:
        """The arrivals of the spares."""
        with self._lock:
            return list(self._arrivals.values())

    @property
    def target(self) -> int:
        """The number of spares that there should be."""
        return self._target

    def waiting(self) -> dict[str, str]:
        """Returns the ids of spares that can be used now, by name. Does not block."""
        attached = self._runtime.part(HostRoutes).attached
        with self._lock:
            hosts = {name: host for name, arrival in self._arrivals.items() if (host := _host(arrival, self._mesh))}
        return {name: host for name, host in hosts.items() if host in attached and not attached[host].lost}

    def take(self, count: int) -> dict[str, tuple[str, Arrival]]:
        """Removes at most `count` usable spares; returns the id and the arrival of each by name."""
        with self._lock:
            spares = dict(list(self.waiting().items())[:count])
            return {name: (host, self._arrivals.pop(name)) for name, host in spares.items()}

    def refill(self) -> None:
        """Requests missing spares from the engine, in the background."""
        threading.Thread(target=self._refill, name="monarch-spares", daemon=True).start()

    def close(self) -> None:
        """Stops watching: the job is about to be killed, or is no longer used here."""
        with self._lock:
            self._closed = True
        listeners = self._runtime.part(MeshEvents).listeners
        if self._on_event in listeners:
            listeners.remove(self._on_event)

    def _refill(self) -> None:
        with self._lock:
            missing = 0 if self._closed else self._target - len(self._arrivals)
            if missing <= 0:
                return
            wait = self._limit.wait(self._mesh, 0, time.monotonic())
            if wait is not None:
                show_host_message(
                    f"{self._known_as}: {self._mesh} has no spare host any more: {_REFILLS} came to nothing within "
                    f"{_WITHIN_S:.0f} s"
                )
                return
            self._limit.count(self._mesh, 0, time.monotonic())
        try:
            arrivals = self._start(missing)
        except (EngineError, OSError, ValueError) as error:
            if not self._closed:
                show_host_message(f"{self._known_as}: there is no new spare host for {self._mesh}: {error}")
            return
        self.follow(arrivals, self._target)

    # -- their ends, on threads of the engine ---------------------------------------------------------------

    def _on_arrival(self, name: str, future: Future[tuple[str, ...]]) -> None:
        error = future.exception(0)
        if error is not None:
            reason = error.missing.get(name, "") if isinstance(error, HostsMissingError) else ""
            self._lose(name, reason or str(error))

    def _on_event(self, event: Event) -> None:
        if isinstance(event, HostLost):
            with self._lock:
                names = [name for name, arrival in self._arrivals.items() if _host(arrival, self._mesh) == event.host]
            remote = self._runtime.part(HostRoutes).attached.get(event.host)
            for name in names:
                self._lose(name, f"(host {event.host}) is lost: {remote.lost if remote is not None else 'it is gone'}")

    def _lose(self, name: str, reason: str) -> None:
        with self._lock:
            arrival = None if self._closed else self._arrivals.pop(name, None)
        if arrival is None:
            return
        show_host_message(f"{self._known_as}: the spare host {name} {reason}. No mesh was on it")

        def replace() -> None:
            arrival.stop("it came to nothing")
            self._drop(name)
            self._refill()

        threading.Thread(target=replace, name="monarch-spares", daemon=True).start()


def _host(arrival: Arrival, mesh: str) -> str:
    """Returns the id of the host of an arrival; empty until it has joined."""
    future = arrival.hosts[mesh]
    return future.get(0)[0] if future.done() and future.exception(0) is None else ""


class JobHosts:
    """The hosts of one mesh of a job."""

    def __init__(self, job: "AdapterJob", mesh: str) -> None:
        self._job, self._mesh = job, mesh
        self._lock = threading.Lock()
        self._added: list[str] = []  # after the first hosts, in order
        self._removed: set[str] = set()
        self._replacements: dict[str, str] = {}  # lost host: its replacement
        self.spares = Spares(mesh, job.known_as, start=self._start_spares, drop=self._drop_spare)
        agents = {name: job.agents[name] for name in job.spare_agents if mesh_of(name) == mesh and name in job.agents}
        if count := job.role_of(mesh).spares or len(agents):
            self.spares.follow(self._arrivals_of(agents), count)

    @property
    def job(self) -> "AdapterJob":
        """The job that the hosts belong to."""
        return self._job

    @property
    def changed(self) -> bool:
        """True once the mesh has other hosts than at first, as far as this process knows."""
        return bool(self._added or self._removed or self._replacements)

    def hosts(self, first: Sequence[str]) -> list[str]:
        """Returns the current host ids in order of rank; `first` are the hosts that the mesh started with."""
        return [host for host in map(self._current, (*first, *self._added)) if host not in self._removed]

    def _current(self, host: str) -> str:
        while host in self._replacements:
            host = self._replacements[host]
        return host

    def __str__(self) -> str:
        return self._job.known_as

    @property
    def waiting(self) -> tuple[str, ...]:
        """The ids of its spare hosts that can be used now. Does not block."""
        return tuple(self.spares.waiting().values())

    def take_spares(self, dead: Sequence[str]) -> dict[str, str]:
        """Replaces dead hosts by waiting spares, as far as there are any; returns the new host of each."""
        job, names, replacements = self._job, self._names_of(dead), dict[str, str]()
        spares: dict[str, tuple[str, Arrival]] = {}
        try:
            with self._exclusive():
                free = set(job.spare_agents)  # another process of this user may have taken some
                while len(spares) < len(dead) and (offered := self.spares.take(len(dead) - len(spares))):
                    spares.update({name: spare for name, spare in offered.items() if name in free})
                swaps = {names[lost]: name for lost, name in zip(dead, spares, strict=False) if lost in names}
                self._swap(swaps, spares)
        except OSError as error:
            show_host_message(f"{job.known_as}: who loads the job takes {', '.join(spares)} for spares: {error}")
        for lost, (name, (host, arrival)) in zip(dead, spares.items(), strict=False):
            job.arrived(arrival)
            self._replacements[lost] = replacements[lost] = host
            former = f"{names.get(lost, 'a lost host')} ({host_name(lost)})"
            show_host_message(f"{job.known_as}: the spare host {name} ({host_name(host)}) took the place of {former}")
        return replacements

    def fate(self, hosts: Sequence[str]) -> dict[str, Fate]:
        """Returns the scheduler's report on lost hosts; blocks for some seconds at most."""
        names, agents = self._names_of(hosts), self._job.agents
        listed = {name: agents[name] for name in names.values() if name in agents}

        def look() -> Mapping[str, Seen]:
            return self._job.adapter.look(self._job.running(listed)) if listed else {}

        try:
            states = run_in_background(look, f"the engine of {self} is asked").get(_ANSWER_S)
        except TimeoutError:
            raise NoMoreHostsError(f"the engine of {self} has not answered within {_ANSWER_S:g} s: see what it says "
                                   "with monarch-nb job ls, and heal again once it answers") from None  # fmt: skip
        except Exception as error:
            raise NoMoreHostsError(f"the engine of {self} cannot be asked for its hosts: {error}") from error
        return {host: _fate(host, names.get(host, ""), states, str(self)) for host in hosts}

    def _names_of(self, hosts: Collection[str]) -> dict[str, str]:
        """Returns the names of these hosts by id; hosts without a known name are left out."""
        joined = {host: name for arrival in self._job.arrivals for name, host in arrival.joined.items()}
        names = {host: name for name, host in self._job.host_ids.items()} | joined
        return {host: names[host] for host in hosts if host in names}

    def _swap(self, swaps: Mapping[str, str], added: Collection[str]) -> None:
        """Puts agents in the mesh: `swaps` has, for each agent that leaves it, its replacement, by name."""
        agents = self._job.agents
        moved = {name: agents[name] for name in swaps.values() if name in agents}
        ordered: dict[str, Agent] = {}
        for name, agent in agents.items():
            if swaps.get(name) in moved:
                ordered[swaps[name]] = moved[swaps[name]]
            if name not in moved:
                ordered[name] = agent
        ordered |= {name: agent for name, agent in agents.items() if name not in ordered}
        self._job.keep_agents(ordered, [*(name for name in self._job.spare_agents if name not in added), *swaps])

    def _exclusive(self, check: Callable[[], object] = lambda: None) -> contextlib.AbstractContextManager[None]:
        """Excludes changes of the job by other threads and processes within the context."""
        return locked(self._job.running({}).folder, check)

    def key_file(self, force: bool) -> Path | None:
        """The file with the job's key, if any. Raises TrustError while hosts have not joined yet, unless `force`."""
        missing = [name for arrival in (*self._job.arrivals, *self.spares.arrivals) for name in arrival.missing()]
        if missing and not force:
            late = ", ".join(missing)
            raise TrustError(f"{self}: the key was not changed: {late} could not join. Wait for all, or use force=True")
        folder = self._job.running({}).folder
        file = Path(folder, "key")
        return file if folder and file.exists() else None

    def key_changed(self) -> None:
        """Makes hosts that start from now on use the job's new key. Raises EngineError."""
        self._job.adapter.key_changed(self._job.running(self._job.agents))

    def written(self) -> str:
        """Returns the job and the mesh as text; "" for a job that cannot be saved."""
        return self._job.written(self._mesh)

    def refill(self) -> None:
        """Requests missing spares from the engine, in the background."""
        self.spares.refill()

    def close(self) -> None:
        """Requests no more hosts: the job is about to be killed, or is no longer used here."""
        self.spares.close()

    def more(
        self, target: "int | Sequence[str]", timeout: float, *, instead: Sequence[str] = ()
    ) -> tuple[str, ...]:  # fmt: skip
        """Requests a number of hosts, or one on each of these machines, and waits for them.

        If not all join, the started ones are ended. The same happens if an interrupt ends the wait; the caller does not
        wait for that end, but the exit of this program does.
        """
        request = _Growth()
        done: Future[tuple[str, ...]] = pending_future(describe=request.describe)
        arguments = (done, request, target, tuple(instead), timeout)
        thread = threading.Thread(target=self._settle, args=arguments, daemon=True)
        try:
            thread.start()
            return done.get()
        except Exception:
            raise
        except BaseException as stop:
            description = request.describe()
            held_back(self._give_up, request, thread)
            if isinstance(stop, KeyboardInterrupt):
                text = f"stopped waiting for hosts of {self}: {description}. "
                text += "What has come of it ends, and nothing has changed"
                raise KeyboardInterrupt(text) from stop
            raise

    def give_back(self, hosts: Sequence[str]) -> None:
        """Makes the scheduler end the agents of these hosts."""
        with self._lock:
            names = {name: host for host, name in self._names_of(hosts).items()}
            for arrival in self._job.arrivals:
                arrival.forget(hosts)
            self._removed.update(hosts)
            routes = current_runtime().part(HostRoutes)
            for host in hosts:
                if (remote := routes.attached.get(host)) is not None and remote.lost:
                    routes.attached.pop(host).give_up("it was replaced")
            living = [host for host in hosts if host in routes.attached]
            if living:
                own_hosts.shutdown_hosts(living).exception()
            job = self._job.running(self._job.agents)
            self._end(job, {name: agent for name, agent in job.agents.items() if name in names})

    # -- on a thread of its own, which no interrupt ends

    def _settle(self, done: Future[tuple[str, ...]], request: "_Growth", target: "int | Sequence[str]",
                instead: Sequence[str], timeout: float) -> None:  # fmt: skip
        try:
            resolve_future(done, self._ask(request, target, instead, time.monotonic() + timeout, timeout))
        except BaseException as error:
            fail_future(done, error)

    def _ask(
        self, request: "_Growth", target: "int | Sequence[str]", instead: Sequence[str], until: float, timeout: float
    ) -> tuple[str, ...]:
        machines, count = ((), target) if isinstance(target, int) else (tuple(target), len(target))
        with self._lock:
            started: dict[str, Agent] = {}
            try:
                arrival = self._start(request, count, machines, started)
                hosts = arrival.hosts[self._mesh].get(max(0.0, until - time.monotonic()))
                request.complete(hosts)
                self._take(hosts, instead, list(started))
                return hosts
            except Exception as error:
                description = request.describe()
                request.give_up()
                self._end(self._job.running(self._job.agents), started)
                if isinstance(error, TimeoutError):
                    raise NoMoreHostsError(
                        f"{self} has given {self._mesh} no {_more(count)} within {timeout:g} s: {description}. They "
                        "were returned, and nothing has changed. Wait longer with timeout=…, or see what the "
                        "engine says: monarch-nb job ls"
                    ) from None
                if isinstance(error, (HostsMissingError, EngineError, ValueError, OSError)):
                    raise NoMoreHostsError(
                        f"{self} gives {self._mesh} no {_more(count)}, and nothing has changed: {error}"
                    ) from error
                raise

    def _take(self, hosts: Sequence[str], instead: Sequence[str], names: Sequence[str]) -> None:
        """Makes the hosts, whose names are `names`, part of the mesh."""
        if not instead:
            self._added += hosts
            return
        lost_names = self._names_of(instead)
        swaps = {lost_names[lost]: name for lost, name in zip(instead, names, strict=True) if lost in lost_names}
        try:
            with self._exclusive():
                self._swap(swaps, names)
        except OSError as error:
            logger.warning("%s: who loads the job finds %s behind its other hosts: %s", self, ", ".join(names), error)
        self._replacements.update(zip(instead, hosts, strict=True))

    def _start(self, request: "_Growth", count: int, machines: tuple[str, ...], started: dict[str, Agent]) -> Arrival:
        adapter = self._job.adapter
        if machines and not adapter.takes_places:
            raise EngineError(f"its engine chooses the machines. Say how many: hosts={count}")
        request.check()
        job = self._add(count, machines, started, request.check, spare=False)
        roles = {self._mesh: self._job.role_of(self._mesh)}
        started_job = msgspec.structs.replace(job, agents=dict(started))
        arrival = Arrival(adapter, started_job, roles, str(self), None, self._job.joined)
        self._job.arrived(arrival)
        request.wait_for(arrival)
        return arrival

    # -- spares

    def _start_spares(self, count: int) -> dict[str, Arrival]:
        with self._lock:
            started: dict[str, Agent] = {}
            try:
                self._add(count, (), started, lambda: None, spare=True)
                return self._arrivals_of(started)
            except Exception:  # the job was killed meanwhile, say
                self._end(self._job.running(self._job.agents), started)
                raise

    def _add(
        self, count: int, machines: tuple[str, ...], started: dict[str, Agent], check: Callable[[], object],
        *, spare: bool,
    ) -> Running:  # fmt: skip
        """Makes the scheduler start `count` more agents, and records them; returns the job as it was before."""
        chooses, unlocked = self._job.adapter.chooses, contextlib.nullcontext()
        with self._exclusive(check) if chooses else unlocked:
            with unlocked if chooses else self._exclusive(check):
                job = self._job.running(self._job.agents)
                wanted = self._job.wanting(self._mesh, _next_names(job, self._mesh, count), machines)
            started.update(self._job.adapter.add(job, wanted))
            with unlocked if chooses else self._exclusive():
                spares = [*self._job.spare_agents, *(started if spare else ())]
                self._job.keep_agents({**self._job.agents, **started}, spares)
        return job

    def _drop_spare(self, name: str) -> None:
        with self._lock:
            job = self._job.running(self._job.agents)
            self._end(job, {key: agent for key, agent in job.agents.items() if key == name})

    def _arrivals_of(self, agents: dict[str, Agent]) -> dict[str, Arrival]:
        """Returns an arrival for each agent, so that a failure of one does not affect the others."""
        job, roles = self._job, {self._mesh: self._job.role_of(self._mesh)}
        return {
            name: Arrival(job.adapter, job.running({name: agent}), roles, str(self), None, job.joined)
            for name, agent in agents.items()
        }

    def _end(self, job: Running, agents: Agents) -> None:
        if not agents:
            return
        try:
            going = msgspec.structs.replace(job, agents=dict(agents))
            self._job.adapter.release(going, msgspec.structs.replace(job, agents={**job.agents, **agents}))
        except Exception as error:
            logger.warning("%s: %s may run on: %s", self, ", ".join(agents), error)
        try:
            with self._exclusive():
                self._job.keep_agents({name: agent for name, agent in self._job.agents.items() if name not in agents})
        except EngineError:  # it was killed, and has none
            return
        except OSError as error:
            logger.warning("%s: who loads the job may still find %s, which ended: %s", self, ", ".join(agents), error)

    def _give_up(self, request: "_Growth", thread: threading.Thread) -> None:
        hosts = request.give_up()
        work: Callable[[], object] = (lambda: self.give_back(hosts)) if hosts else thread.join
        threading.Thread(target=work, name="monarch-hosts-end", daemon=False).start()


class _Growth:
    """A request for hosts, shared by the waiting caller and the thread that executes it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._given_up = False
        self._arrival: Arrival | None = None
        self._hosts: tuple[str, ...] = ()

    def describe(self) -> str:
        """Describes the state of the request."""
        return "the engine is asked for hosts" if self._arrival is None else str(self._arrival.progress)

    def check(self) -> None:
        """Raises RuntimeError if the request was given up."""
        if self._given_up:
            raise RuntimeError("it was given up")

    def wait_for(self, arrival: Arrival) -> None:
        """Records the arrival of the requested hosts. Raises RuntimeError if the request was given up."""
        with self._lock:
            self._arrival = arrival
        self.check()

    def complete(self, hosts: tuple[str, ...]) -> None:
        """Records the hosts, which have joined. Raises RuntimeError if the request was given up."""
        with self._lock:
            self.check()
            self._hosts = hosts

    def give_up(self) -> tuple[str, ...]:
        """Gives the request up; returns the hosts that have joined. Does not block."""
        with self._lock:
            self._given_up = True
        if self._arrival is not None and not self._hosts:
            self._arrival.stop("it was given up")
        return self._hosts


@contextlib.contextmanager
def locked(folder: str, check: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Locks a job's folder, which processes share; `check` is called during the wait, and may end it by raising.

    Raises EngineError where the folder was removed with its job.
    """
    if not folder:
        with _no_folder:
            yield
        return
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise EngineError("the job was killed: its folder is gone") from None
    try:
        while not try_lock(fd):
            check()
            time.sleep(_LOCK_S)
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)  # a process that was forked meanwhile has it open, too
        os.close(fd)


def _fate(host: str, name: str, states: Mapping[str, Seen], job: str) -> Fate:
    if not name:
        return Fate(True, f"it is no host of {job} any more")
    state = states.get(name, Seen("ended", "is not known to its engine any more"))
    replaced = state.host not in ("", host)  # its engine has started another agent in its place
    return Fate(replaced or state.state in ("ended", "waiting"), f"{name} {state.description or state.state}")


def _more(count: int) -> str:
    return "other host" if count == 1 else f"{count} more hosts"


def _next_names(job: Running, mesh: str, count: int) -> tuple[str, ...]:
    """Returns names that no host of the mesh has or had, whose files in the job's folder could be misread."""
    folder = Path(job.folder)
    leftovers = [path.stem for path in folder.glob(f"{mesh}_*")] if job.folder else []
    numbers = [name.rpartition("_")[2] for name in (*job.agents, *leftovers) if mesh_of(name) == mesh]
    first = max((int(number) for number in numbers if number.isdecimal()), default=-1) + 1
    names = tuple(f"{mesh}_{first + index}" for index in range(count))
    if job.folder:
        (folder / f"{names[-1]}.asked").touch(0o600)  # reserves the names, even if the hosts never join
    return names
