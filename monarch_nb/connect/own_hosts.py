"""The controller's own host agents, their start and end, and the end of the program."""

import logging
import operator
import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from monarch_nb.connect.mesh_detach import Detacher
from monarch_nb.connect.routes import HostRoutes
from monarch_nb.host import verbs
from monarch_nb.host.folders import clear_run_folder, new_host_id, release, remove_run_folder, run_folder_for
from monarch_nb.host.launch import AgentHandle, Ahead, BegunWith, agent_environment, begin_agent, begun_with
from monarch_nb.lifecycle import unhandled
from monarch_nb.lifecycle.proc_spawn import host_mesh_of
from monarch_nb.lifecycle.stopping import MeshStopper
from monarch_nb.lifecycle.watching import HostNotices, ProcessWatcher
from monarch_nb.logs import MeshLogs
from monarch_nb.mesh.host import HostMesh, host_labels
from monarch_nb.mesh.registry import MeshRegistry
from monarch_nb.mesh.requests import gather, request
from monarch_nb.runtime import (
    Future,
    ProcState,
    Runtime,
    current_runtime,
    fail_future,
    install,
    pending_future,
    resolve_future,
    resolved_future,
    started,
    unretrieved,
)
from monarch_nb.settings import settings
from monarch_nb.wire import Done, agent_of, counted, parse_address

logger = logging.getLogger(__name__)

EXIT_SECONDS = 2.0  # for the cleanup of all that a program has started
INTERRUPTED_SECONDS = 0.3  # the same if Ctrl-C has ended the program
MOST_HOSTS = 1000  # on this machine, each with an agent of about 30 MB


class LocalAgents:
    """The agents that this process has started, and the one that was started before there was a runtime."""

    def __init__(self, runtime: Runtime, ahead: Ahead | None) -> None:
        self.running: dict[str, AgentHandle] = {}  # by host
        self.lock = threading.RLock()
        self._runtime = runtime
        self._ahead = ahead  # may not listen yet
        self._unused: dict[str, BegunWith] = {}  # settings of its agent's start, by unused host
        self._dead: set[str] = set()  # hosts of this process whose agent has ended

    def ensure(self) -> None:
        """Starts the agent of this host, if this is a controller and it does not run yet; blocks about 0.2 s.

        An agent that was started ahead is replaced if the settings of its start have changed since.
        """
        runtime = self._runtime
        if runtime.host in self.running and not self._unused:
            return

        def ensure() -> None:
            with self.lock:
                if self._unused.pop(runtime.host, None) not in (None, begun_with()):
                    handle = self.running.pop(runtime.host)
                    handle.kill()
                    clear_run_folder(handle.run_folder, keep=parse_address(runtime.address).name)
                if runtime.host not in self.running:
                    self._start(runtime.host, Path(run_folder_for(runtime.host)))

        _in_background(ensure)

    def prestart(self) -> None:
        """Starts the agent of this host in the background, ahead of the first spawn."""

        def start() -> None:
            with self.lock:
                if self._runtime.host in self.running or self._runtime.closed:
                    return
                begun = begun_with()
                try:
                    self._start(self._runtime.host, Path(run_folder_for(self._runtime.host)))
                    self._unused[self._runtime.host] = begun
                except Exception as error:  # the first use tries again, and raises
                    logger.info("the host agent could not be started ahead: %s", error)

        threading.Thread(target=start, name="monarch-prestart", daemon=True).start()

    def add(self, count: int) -> list[str]:
        """Starts agents of new hosts on this machine and returns their names; blocks.

        If one does not start, or the wait is interrupted, those that have started are ended.
        """
        hosts: list[str] = []
        interrupted = threading.Event()

        def start() -> None:
            with self.lock:
                while len(hosts) < count and not interrupted.is_set():
                    host = new_host_id()
                    self._start(host, Path(run_folder_for(host)))
                    hosts.append(host)

        try:
            _in_background(start)
        except BaseException:
            interrupted.set()
            with self.lock:  # until the one that is being started has joined the others
                shutdown_hosts(hosts)
            raise
        return hosts

    def revive(self, hosts: Iterable[str]) -> None:
        """Restarts agents of local hosts that have died; the hosts keep their names."""
        dead = [host for host in hosts if host in self._dead]

        def start() -> None:
            for host in dead:
                with self.lock:
                    if host in self._dead:
                        self._start(host, Path(run_folder_for(host)))

        if dead:
            _in_background(start)

    def give_up(self) -> list[AgentHandle]:
        """Removes and returns all agents of this process, which is leaving."""
        handles = list(self.running.values())
        self.running.clear()
        self._unused.clear()
        self._dead.clear()
        return handles

    def _start(self, host: str, folder: Path) -> None:
        runtime = self._runtime
        ahead, self._ahead = (self._ahead, None) if host == runtime.host else (None, self._ahead)
        if ahead is not None and ahead.begun_with != begun_with():  # the environment has changed meanwhile
            ahead.agent.kill()
            ahead = None
        runtime.part(MeshRegistry).agent_environment[host] = dict(os.environ) if ahead is None else ahead.environ
        timeout_s = settings.host_spawn_ready_timeout
        if ahead is not None:
            handle = ahead.agent.wait(timeout_s)
        else:
            lease_s = settings.mesh_orphan_timeout
            handle = begin_agent(host, folder, env=agent_environment(), lease_s=lease_s).wait(timeout_s)
        self.running[host] = handle
        self._dead.discard(host)
        runtime.node.learn(host, run_folder=folder, incarnation=handle.incarnation)
        runtime.local_hosts.add(host)
        runtime.part(HostRoutes).local[host] = handle.incarnation
        runtime.part(HostRoutes).settle((), 0.0)  # else agents of other programs refuse messages to processes here
        threading.Thread(target=self._watch, args=(handle,), name="monarch-agent-watch", daemon=True).start()

    def _watch(self, handle: AgentHandle) -> None:
        """Reports the end of an agent, and so of its processes, at once."""
        status = handle.wait()
        runtime = self._runtime
        with self.lock:  # a new agent starts only after the end of this one has been announced
            if runtime.closed or self.running.get(handle.host) is not handle:
                return
            del self.running[handle.host]
            self._dead.add(handle.host)
            runtime.part(HostRoutes).local.pop(handle.host, None)
            outcome = f"status {status}" if status >= 0 else f"signal {-status}"
            reason = f"its host agent (process {handle.pid}) ended with {outcome}"
            if words := runtime.part(ProcessWatcher).end_of(handle.host):
                reason = f"{reason}: {words}"
            loss = runtime.part(ProcessWatcher).hosts_lost({handle.host: handle.incarnation}, reason)
            runtime.part(HostRoutes).announce_lost(handle.host, reason, handle.incarnation, loss)
            if handle.host == runtime.host:
                clear_run_folder(handle.run_folder, keep=parse_address(runtime.address).name)
            else:
                remove_run_folder(handle.run_folder)


def _in_background(function: Callable[[], None]) -> None:
    """Runs a function on its own thread: an interrupt ends the wait, and leaves no agent half started."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="monarch-agent-start", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def ensure_host(runtime: Runtime) -> None:
    """Starts the agent of this host, if this process is its controller and it does not run yet; blocks about 0.2 s."""
    if not runtime.is_worker:  # else its agent has started it
        runtime.part(LocalAgents).ensure()


def prestart(runtime: Runtime) -> None:
    """Starts the agent of this host in the background, unless `host_prestart` is off."""
    if settings.host_prestart:
        runtime.part(LocalAgents).prestart()


def local_hosts(count: int, name: str = "hosts") -> HostMesh:
    """Returns a mesh of `count` hosts on this machine, each with its own agent, for trying out several hosts."""
    count = operator.index(count)
    if count < 1:
        raise ValueError(f"count={count!r} must be at least 1")
    if count > MOST_HOSTS:
        raise ValueError(f"count={count!r} hosts are more than this machine can run: write {MOST_HOSTS} at most")
    runtime = current_runtime()
    ensure_host(runtime)
    hosts = [runtime.host, *runtime.part(LocalAgents).add(count - 1)]
    return HostMesh(name, hosts, host_labels(hosts), owned=True)


def hosts_answer(hosts: Sequence[str]) -> "Future[Any]":
    """Resolves to True when the agents of all hosts have answered."""
    runtime = current_runtime()
    replies: list[Future[Any]] = [request(runtime, agent_of(host), verbs.STATUS, Done()) for host in hosts]
    return gather(replies, lambda: f"{counted(len(hosts), 'host')} have not all answered yet", True)


def shutdown_hosts(hosts: Sequence[str]) -> "Future[None]":
    """Ends these hosts' agents and all processes on them."""
    done: Future[None] = pending_future(describe=lambda: "hosts are being shut down")
    runtime = current_runtime()

    def end() -> None:
        try:
            stops = stop_hosts(hosts, "its host was shut down")
            agents: dict[str, AgentHandle] = {} if runtime.is_worker else runtime.part(LocalAgents).running
            handles = [handle for host in hosts if (handle := agents.pop(host, None)) is not None]
            for handle in handles:
                runtime.part(HostRoutes).local.pop(handle.host, None)
                if handle.host == runtime.host:  # this process listens in its run folder, which the next agent shares
                    stops.exception(settings.mesh_terminate_timeout)
                    handle.kill()
                    runtime.node.forget(handle.address, "its host was shut down", handle.incarnation)
                    clear_run_folder(handle.run_folder, keep=parse_address(runtime.address).name)
                else:
                    handle.close()
            remotes = [
                remote for host in hosts if (remote := runtime.part(HostRoutes).attached.pop(host, None)) is not None
            ]
            if remotes:
                stops.exception(settings.mesh_terminate_timeout)
            via_gateway = [remote for remote in remotes if remote.via_gateway]
            direct = [remote for remote in remotes if not remote.via_gateway]
            for part in (via_gateway, direct):  # hosts behind a gateway before the gateway
                shutdowns = [remote.shutdown() for remote in part]
                for answer in shutdowns:
                    if isinstance(error := answer.exception(settings.mesh_terminate_timeout), TimeoutError):
                        raise error
            for remote in remotes:
                runtime.node.forget(agent_of(remote.host), "its host was shut down")
            resolve_future(done, None)
        except BaseException as error:
            fail_future(done, error)

    threading.Thread(target=end, name="monarch-shutdown", daemon=True).start()
    return done


def stop_hosts(
    hosts: Sequence[str], reason: str = "its hosts were stopped", *, identity: str | None = None
) -> "Future[Any]":
    """Stops the proc meshes of this process that have a part on these hosts; the agents live on.

    With the `identity` of a host mesh only those that were spawned on it.
    """
    runtime = current_runtime()
    stops = [
        runtime.part(MeshStopper).stop(state, reason)
        for state in tuple(runtime.meshes.values())
        if isinstance(state, ProcState) and not set(hosts).isdisjoint(state.hosts)
        and state.spawn_spec is not None and state.stopped is None and identity in (None, host_mesh_of(state))
    ]  # fmt: skip
    return gather(stops, lambda: f"{counted(len(hosts), 'host')} have not stopped yet")


def at_exit() -> None:
    """Ends what the program has started, when the program ends."""
    runtime = started()
    if runtime is not None:
        unhandled.end_quietly()
        if settings.mesh_keep > 0 and not runtime.is_worker:
            runtime.part(Detacher).detach_all("the program that held it has ended")
        shutdown()


def give_up_hosts(hosts: Sequence[str], reason: str) -> None:
    """Treats meshes on hosts that are about to be killed by their starter as stopped, not as failed.

    Does not block; calls that await the hosts end once these have ended, or at once if that cannot be observed here.
    """
    runtime = current_runtime()
    runtime.part(HostNotices).give_up(hosts)
    stop_hosts(hosts, reason)
    for host in hosts:
        attached = runtime.part(HostRoutes).attached.pop(host, None)
        if attached is not None:
            attached.give_up(reason)


def shutdown(patience: float | None = None) -> None:
    """Ends everything this controller has started, and leaves; a later call starts a new context.

    Actors have `patience` seconds to clean up, by default 2, or 0.3 where Ctrl-C has ended the program.
    """
    runtime = started()
    if runtime is not None and runtime.is_inherited:
        install(None)
    if runtime is None or runtime.is_inherited or runtime.is_worker:
        return
    agents = runtime.part(LocalAgents)
    with agents.lock:
        handles = agents.give_up()
        remotes = runtime.part(HostRoutes).clear()
    previous, unretrieved.leaving = unretrieved.leaving, True
    try:
        _leave(runtime, handles, remotes, _exit_patience() if patience is None else patience)
    finally:
        unretrieved.leaving = previous
    unhandled.exit_if_fatal()


def _exit_patience() -> float:
    interrupted = getattr(sys, "last_type", None) is KeyboardInterrupt and not unhandled.in_notebook()
    return INTERRUPTED_SECONDS if interrupted else EXIT_SECONDS


def _leave(runtime: Runtime, handles: Iterable[AgentHandle], remotes: Iterable[Any], patience: float) -> None:
    runtime.part(MeshStopper).leave("the program that spawned it ends", patience)
    for cell in tuple(runtime.cells.values()):
        cell.stop("its process ends")
    for cell in tuple(runtime.cells.values()):
        if cell.executor.thread.ident is not None:  # else it has not started, and will not
            cell.executor.thread.join(3.0)
    for remote in remotes:
        remote.end()
        if not remote.lost:
            remote.leave()
    runtime.part(MeshLogs).close()
    runtime.close()
    outlived = runtime.part(Detacher).hosts
    for handle in handles:
        if handle.host in outlived:
            handle.disown()
        else:
            handle.close(settings.process_exit_timeout)
    if runtime.host in outlived:
        release(run_folder_for(runtime.host))
    else:
        remove_run_folder(run_folder_for(runtime.host))
    install(None)


def shutdown_context(host_timeout: float | None = None) -> "Future[None]":
    """Ends what this process has started and leaves the cluster. Blocks until that is done.

    Hosts have `host_timeout` seconds. Raises ValueError for an invalid number of seconds, before anything has ended.
    """
    if host_timeout is not None and not 0 <= host_timeout < 2**63:
        raise ValueError(f"host_timeout must be None or a number of seconds >= 0, not {host_timeout}")
    shutdown(host_timeout)
    return resolved_future(None)
