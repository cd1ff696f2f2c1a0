"""Hosts on this machine whose agents somebody else started: reached through run folders, watched by process id."""

import contextlib
import os
import select
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path

from monarch_nb._private import is_private
from monarch_nb.connect.routes import AttachedHost, Routes
from monarch_nb.host import protocol as p
from monarch_nb.host import verbs
from monarch_nb.host.folders import host_of_folder
from monarch_nb.host.linux import has_pidfd
from monarch_nb.lifecycle.watching import ProcessWatcher
from monarch_nb.mesh.requests import RequestError, fail_requests, request
from monarch_nb.runtime import Future, Runtime, when_done
from monarch_nb.transport import TransportError, TrustError, UnreachableError
from monarch_nb.wire import Done, agent_of

_LOOK_S = 0.02  # between looks for a socket that is not there yet
_ANSWER_S = 3.0  # after which the path is looked at again
_PULSE_S = 0.5  # between looks at a process, where the system does not tell of its end


class LocalHost:
    """One such host; what is told of it and what can be asked of it is as of a remote one."""

    behind = False  # no gateway leads to it
    dials_nobody = False
    near = True  # all processes of this machine reach its processes directly
    keys = None  # it has its own, which are not known here

    def __init__(self, runtime: Runtime, folder: Path, state: p.HostState) -> None:
        self.runtime = runtime
        self.folder = folder
        self.endpoint = f"ipc://{folder}"
        self.state = state
        self.host = state.host
        self.incarnation = state.incarnation
        self.pid = state.pid
        self.lost = ""  # why, once it is
        self._leaving = False  # its end is what we want
        self._killed = False  # and comes by somebody else's hand
        self._ended = threading.Event()

    def __repr__(self) -> str:
        return f"<host {self.host} in {self.folder}{', lost: ' + self.lost if self.lost else ''}>"

    def dials(self, other: AttachedHost) -> bool:
        """Its agent has no key for others."""
        return False

    def join(self) -> Future[Done]:
        """Has the agent notice this process's end, and this process the agent's. Resolves when the agent has agreed."""
        self.runtime.local_hosts.add(self.host)
        threading.Thread(target=self._watch, name=f"monarch-host-{self.host}", daemon=True).start()
        return request(self.runtime, agent_of(self.host), verbs.LEASE, p.Lease(pid=os.getpid()))

    def leave(self) -> Future[Done]:
        """Has the agent stop what this process owns there, at once."""
        return request(self.runtime, agent_of(self.host), verbs.LEAVE, Done())

    def shutdown(self) -> Future[p.Ended]:
        """Ends the agent and all processes there."""
        self._leaving = True
        ended = request(self.runtime, agent_of(self.host), verbs.SHUTDOWN, p.Shutdown())

        def done(_: Future[p.Ended]) -> None:
            self.end()
            self._forget("it was shut down")

        when_done(ended, done)
        return ended

    def give_up(self, reason: str) -> None:
        """Who started its agent ends it: no failure. Whoever still waits for an answer of it is told then.

        It hears that this process leaves: SIGTERM, by which some engines kill, is no notice to a host that nobody uses.
        """
        self._leaving = self._killed = True
        with contextlib.suppress(TransportError):
            self.runtime.post(agent_of(self.host), verbs.LEAVE, Done())

    def cut(self) -> None:
        """No connection leads to it that could break."""

    def await_return(self, seconds: float) -> None:
        """It does not come back: another agent there is another host."""

    def end(self) -> None:
        """It is no longer ours to watch."""
        self._ended.set()

    def _watch(self) -> None:
        try:
            fd = os.pidfd_open(self.pid) if has_pidfd() else -1
        except OSError:  # gone already
            self._lose()
            return
        try:
            while not self._ended.is_set() and not self.runtime.closed:
                if self._gone(fd):
                    self._lose()
                    return
        finally:
            if fd >= 0:
                os.close(fd)

    def _gone(self, fd: int) -> bool:
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
        self.lost = f"its host agent (process {self.pid}) has ended"
        if self._leaving:
            fail_requests(self.runtime, (agent_of(self.host),), self.lost)
            if self._killed:
                self._forget("it was killed")
            return
        loss = self.runtime.part(ProcessWatcher).host_lost(self.host, self.lost, self.incarnation)
        self._forget(self.lost)
        self.runtime.part(Routes).tell_lost(self.host, self.lost, self.incarnation, loss)


def find_folder(path: str, deadline: float, given_up: Callable[[], bool]) -> Path:
    """The run folder of the agent that listens at a path, or behind the link there.

    Blocks until there is one; raises UnreachableError once `deadline` (monotonic) has passed or it is given up, and
    TrustError for one that others could have made.
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
        time.sleep(_LOOK_S)
    socket = Path(os.path.realpath(link))
    if os.lstat(link).st_uid != os.geteuid():
        raise TrustError(f"ipc://{path} belongs to another user")
    if not stat.S_ISSOCK(socket.stat().st_mode) or socket.name != "agent":
        raise UnreachableError(f"ipc://{path} does not lead to a host agent of Monarch-NB, but to {socket}")
    if not is_private(socket.parent):
        raise TrustError(f"{socket.parent} is not this user's own private folder")
    return socket.parent


def meet(runtime: Runtime, path: str, deadline: float, given_up: Callable[[], bool]) -> LocalHost:
    """The host that listens at a path; blocks until it has answered, or raises as `find_folder` does."""
    while True:
        folder = find_folder(path, deadline, given_up)
        host = host_of_folder(folder)
        if not host:
            raise UnreachableError(f"ipc://{path} leads to {folder}, which is not named after a host")
        if host == runtime.host or host in runtime.part(Routes).local:
            raise ValueError(f"ipc://{path} is host {host}, which this process has started itself")
        runtime.node.learn(host, run_folder=folder)
        asked = request(runtime, agent_of(host), verbs.STATUS, Done())
        left = deadline - time.monotonic()
        try:
            state = asked.get(max(0.5, min(left, _ANSWER_S)))
        except (TimeoutError, RequestError):  # one that is about to end; another may take its place
            if left < 0 or given_up():
                raise UnreachableError(f"the worker at ipc://{path} has not answered in time") from None
            continue
        known = runtime.part(Routes).attached.get(host)
        return known if isinstance(known, LocalHost) and not known.lost else LocalHost(runtime, folder, state)
