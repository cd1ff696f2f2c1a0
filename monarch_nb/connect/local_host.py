"""Hosts on this machine with agents that this process has not started: reached through run folders, watched by pid."""

import contextlib
import os
import select
import stat
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from monarch_nb._private import is_private
from monarch_nb.connect.routes import ExternalHost, HostRoutes
from monarch_nb.host import find_run_folder, verbs
from monarch_nb.host import protocol as p
from monarch_nb.host.folders import host_of_folder
from monarch_nb.host.linux import has_pidfd
from monarch_nb.lifecycle.watching import ProcessWatcher
from monarch_nb.mesh.requests import RequestError, fail_requests, request
from monarch_nb.runtime import Future, Runtime, when_done
from monarch_nb.settings import settings
from monarch_nb.transport import TransportError, TrustError, UnreachableError
from monarch_nb.wire import Done, agent_of, host_name, parse_address

_POLL_S = 0.02  # between checks for a socket
_ANSWER_S = 3.0  # after which the path is checked again
_PULSE_S = 0.5  # between checks of a process, where the system has no pidfd


class LocalHost:
    """A host on this machine, with the interface of a remote one."""

    via_gateway = False
    dials_only_controller = False
    is_local = True
    keys = None  # its own, unknown here

    def __init__(self, runtime: Runtime, folder: Path, state: p.HostState) -> None:
        self.runtime = runtime
        self.folder = folder
        self.endpoint = f"ipc://{folder}"
        self.state = state
        self.host = state.host
        self.incarnation = state.incarnation
        self.pid = state.pid
        self.lost = ""  # the reason, once it is lost
        self._leaving = False  # whether its end is intended
        self._killed = False  # whether another program kills it
        self._ended = threading.Event()

    def __repr__(self) -> str:
        return f"<host {self.host} in {self.folder}{', lost: ' + self.lost if self.lost else ''}>"

    def dials(self, other: ExternalHost) -> bool:
        """Returns False: its agent has no key for others."""
        return False

    def join(self) -> Future[Done]:
        """Has the agent watch this process, and watches the agent. Resolves when the agent has agreed."""
        self.runtime.local_hosts.add(self.host)
        threading.Thread(target=self._watch, name=f"monarch-host-{self.host}", daemon=True).start()
        return request(self.runtime, agent_of(self.host), verbs.LEASE, p.OwnerLease(pid=os.getpid()))

    def leave(self) -> Future[Done]:
        """Has the agent stop this process's meshes there, at once."""
        return request(self.runtime, agent_of(self.host), verbs.LEAVE, Done())

    def shutdown(self) -> Future[p.StopReply]:
        """Ends the agent and all processes there."""
        self._leaving = True
        reply = request(self.runtime, agent_of(self.host), verbs.SHUTDOWN, p.Shutdown())

        def done(_: Future[p.StopReply]) -> None:
            self.end()
            self._forget("it was shut down")

        when_done(reply, done)
        return reply

    def give_up(self, reason: str) -> None:
        """Called when the program that started its agent ends it, which is no failure; pending requests fail then.

        Notifies the agent that this process leaves: SIGTERM, sent by some schedulers, is no notice to an unused host.
        """
        self._leaving = self._killed = True
        with contextlib.suppress(TransportError):
            self.runtime.post(agent_of(self.host), verbs.LEAVE, Done())

    def cut(self) -> None:
        """Does nothing: no connection leads to it."""

    def outage(self) -> str:
        """Returns the reason if it is lost; there are no other outages on one machine."""
        return self.lost

    def await_return(self, seconds: float) -> None:
        """Returns at once: it never returns, and a new agent there is another host."""

    def end(self) -> None:
        """Stops watching it."""
        self._ended.set()

    def _watch(self) -> None:
        try:
            fd = os.pidfd_open(self.pid) if has_pidfd() else -1
        except OSError:  # ended already
            self._lose()
            return
        try:
            while not self._ended.is_set() and not self.runtime.closed:
                if self._has_ended(fd):
                    self._lose()
                    return
        finally:
            if fd >= 0:
                os.close(fd)

    def _has_ended(self, fd: int) -> bool:
        if fd >= 0:
            poller = select.poll()
            poller.register(fd, select.POLLIN)
            return bool(poller.poll(_PULSE_S * 1000))
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        return self._ended.wait(_PULSE_S) and False

    def _forget(self, reason: str) -> None:
        self.runtime.local_hosts.discard(self.host)
        self.runtime.node.forget(self.host, reason, self.incarnation)

    def _lose(self) -> None:
        if self._ended.is_set() or self.runtime.closed:
            return
        words = self.runtime.part(ProcessWatcher).end_of(self.host)
        self.lost = f"its host agent (process {self.pid}) has ended{f': {words}' if words else ''}"
        if self._leaving:
            fail_requests(self.runtime, (agent_of(self.host),), self.lost)
            if self._killed:
                self._forget("it was killed")
            return
        loss = self.runtime.part(ProcessWatcher).hosts_lost({self.host: self.incarnation}, self.lost)
        self._forget(self.lost)
        self.runtime.part(HostRoutes).announce_lost(self.host, self.lost, self.incarnation, loss)


def find_folder(path: str, deadline: float, given_up: Callable[[], bool]) -> Path:
    """Returns the run folder of the agent that listens at a path, or behind the link there.

    Blocks until there is one; raises UnreachableError once `deadline` (monotonic) has passed or it is given up, and
    TrustError for a folder that other users could have created.
    """
    link = os.path.abspath(path)
    while not os.path.exists(link):
        if given_up() or time.monotonic() >= deadline:
            if os.path.lexists(link):
                raise UnreachableError(f"the worker at ipc://{path} has ended: {os.readlink(link)} is gone")
            raise UnreachableError(
                f"attach failed: config push failed during attach: no worker answers at ipc://{path}: "
                "start it there with run_worker_loop_forever(address=...)"
            )
        time.sleep(_POLL_S)
    socket = Path(os.path.realpath(link))
    if os.lstat(link).st_uid != os.geteuid():
        raise TrustError(f"ipc://{path} belongs to another user")
    if not stat.S_ISSOCK(socket.stat().st_mode) or socket.name != "agent":
        raise UnreachableError(f"ipc://{path} does not lead to a host agent of Monarch-NB, but to {socket}")
    if not is_private(socket.parent):
        raise TrustError(f"{socket.parent} is not this user's own private folder")
    return socket.parent


def connect_local_host(runtime: Runtime, path: str, deadline: float, given_up: Callable[[], bool]) -> LocalHost:
    """Connects to the host that listens at a path; blocks until it has answered. Raises as `find_folder` does."""
    while True:
        folder = find_folder(path, deadline, given_up)
        host = host_of_folder(folder)
        if not host:
            raise UnreachableError(f"ipc://{path} leads to {folder}, which is not named after a host")
        if host == runtime.host or host in runtime.part(HostRoutes).local:
            raise ValueError(f"ipc://{path} is host {host}, which this process has started itself")
        runtime.node.learn(host, run_folder=folder)
        reply = request(runtime, agent_of(host), verbs.STATUS, Done())
        remaining = deadline - time.monotonic()
        try:
            state = reply.get(max(0.5, min(remaining, _ANSWER_S)))
        except (TimeoutError, RequestError):  # one that is about to end; another may replace it
            if remaining < 0 or given_up():
                raise UnreachableError(f"the worker at ipc://{path} has not answered in time") from None
            continue
        attached = runtime.part(HostRoutes).attached.get(host)
        return attached if isinstance(attached, LocalHost) and not attached.lost else LocalHost(runtime, folder, state)


_lock = threading.Lock()
_without_agent: set[str] = set()  # hosts without an agent: programs that have spawned nothing on this machine


def connect_named_hosts(runtime: Runtime, hosts: Iterable[str], name: str) -> None:
    """Connects to named hosts if they are on this machine; blocks until their agents have answered.

    For references that a process was handed outside of a message, such as by a parent to a child of `multiprocessing`,
    which is a controller by itself. The agent of a worker knows all routes. Raises UnreachableError for a host that is
    neither on this machine nor attached.
    """
    if not parse_address(runtime.address).is_controller:
        return
    with _lock:
        unknown = [host for host in dict.fromkeys(hosts) if not _is_reachable(runtime, host)]
        connected = [host for host in unknown if _connect_if_agent(runtime, host, name)]
    if connected:
        runtime.part(HostRoutes).settle(connected, settings.message_delivery_timeout)


def _is_reachable(runtime: Runtime, host: str) -> bool:
    return (
        host == runtime.host
        or host in runtime.part(HostRoutes).local
        or host in runtime.part(HostRoutes).attached
        or host in _without_agent
    )


def _connect_if_agent(runtime: Runtime, host: str, name: str) -> bool:
    """Connects to a host on this machine; returns False if it has no agent."""
    folder = find_run_folder(host)
    if folder is None:
        raise UnreachableError(
            f"{name} has a part on host {host_name(host)}, which is not on this machine and has not been attached by "
            "this process: attach it here first (attach_hosts, attach_to_workers)"
        )
    if not (folder / "agent").exists():
        runtime.node.learn(host, run_folder=folder)
        _without_agent.add(host)
        return False
    limit = settings.message_delivery_timeout
    local = connect_local_host(runtime, str(folder / "agent"), time.monotonic() + limit, lambda: runtime.closed)
    runtime.part(HostRoutes).attached[host] = local
    local.join().get(limit)
    return True
