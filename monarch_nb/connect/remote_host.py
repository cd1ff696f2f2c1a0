"""Attached hosts, reached directly or through a gateway, and the threads that watch them while they are cut off."""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Sequence

from monarch_nb._deferred import futures
from monarch_nb.connect.routes import ExternalHost, HostLosses, HostRoutes, Tunnel, is_loopback
from monarch_nb.host import find_run_folder, verbs
from monarch_nb.host import protocol as p
from monarch_nb.host.folders import run_folder_for
from monarch_nb.host.introduction import IntroductionResult, introduce
from monarch_nb.lifecycle.watching import ProcessWatcher
from monarch_nb.mesh.mesh_events import HostBack, MeshEvents
from monarch_nb.mesh.requests import fail_requests, request
from monarch_nb.runtime import Future, Runtime, when_done
from monarch_nb.transport import DescriptorLimitError, Keys, TransportError, UnreachableError, knock, lost_here
from monarch_nb.wire import Asker, Done, Header, agent_of, host_of

log = logging.getLogger(__name__)
_POLL_S = 0.2
_AWAY_S = 1.0  # between checks of a lost host; grows to
_AWAY_MAX_S = 5.0
_HELLO_S = 3.0
_ENDING_S = 1.0  # the same for a host whose scheduler says that it ends; asked again while it is connected
_KNOCK_S = 1.0
_LEAVE_S = 0.1  # for a last message to go out
REFUSED_S = 5.0  # a machine that answers, but has had no listener at the port for that long, has lost its agent
_MARGIN_S = 5.0  # for the gateway's reply, beyond the time-out of its own attempt
_ASK_S = 0.5  # for a connection; an answer on it may take longer
_event_lock = threading.Lock()


class OutageTimer:
    """Decides when a host with a broken connection is lost. Times are of a monotonic clock, in seconds; no I/O."""

    def __init__(self, now: float, lease: float) -> None:
        self._lease = lease
        self._answered_at = now
        self._refused_at: float | None = None

    def silent(self, now: float, vouched: bool) -> bool:
        """Returns whether the lease is over; `vouched` says that the machine answers now."""
        if vouched:
            self._answered_at = now
        return now - self._answered_at >= self._lease

    def refused(self, now: float, listens: bool | None) -> bool:
        """Returns whether its agent has ended: its port has no listener; `listens` is None if that is unknown."""
        if listens is not False:
            self._refused_at = None
        elif self._refused_at is None:
            self._refused_at = now
        return self._refused_at is not None and now - self._refused_at >= min(REFUSED_S, self._lease)


class LazyEvent:
    """Like `threading.Event`, but creates the real event only when a thread waits."""

    __slots__ = ("_event", "_is_set")

    def __init__(self) -> None:
        self._is_set = False
        self._event: threading.Event | None = None

    def is_set(self) -> bool:
        """Returns whether it is set."""
        return self._is_set

    def set(self) -> None:
        """Sets it and wakes all waiting threads."""
        with _event_lock:
            self._is_set = True
            event = self._event
        if event is not None:
            event.set()

    def wait(self, timeout: float | None = None) -> bool:
        """Blocks until it is set, or until the time-out; returns whether it is set."""
        with _event_lock:
            if self._is_set:
                return True
            event = self._event = self._event or threading.Event()
        return event.wait(timeout)


class RemoteHost:
    """An attached host, watched by its own thread only while the connection is broken or the host is lost."""

    is_local = False
    via_gateway = False
    dials_only_controller = False

    def __init__(
        self,
        runtime: Runtime,
        endpoint: str,
        state: p.HostState,
        keys: Keys | None,
        insecure: bool,
        lease: float | None,
    ) -> None:
        self.runtime = runtime
        self.endpoint = endpoint
        self.host = state.host
        self.incarnation = state.incarnation
        self.pid = state.pid
        self.keys = keys
        self.insecure = insecure
        self.lease = lease or state.lease_s  # seconds without a connection after which the host counts as lost
        self.lost = ""  # the reason, while it is lost
        self.has_engine = False  # which will report the reason of its end
        self._wanted_lease = lease
        self._ended = LazyEvent()
        self._lock = threading.Lock()
        self._patrol: threading.Thread | None = None
        self._cut_at = 0.0
        self._end_reason = ""  # of its agent's end, from its starter
        # A tunnel that the user has opened, such as by `ssh -L`, without further information.
        self._foreign_tunnel = Tunnel(f"the other end of {endpoint}") if _is_forwarded(endpoint, state) else None
        self._undelivered: list[tuple[Header, str]] = []  # rarely any: an empty deque takes ten times the memory
        # Set once the new incarnation of its restarted agent can be used.
        self._returning: threading.Event | None = None

    def __repr__(self) -> str:
        return f"<host {self.host} at {self.endpoint or 'its own call'}{', lost: ' + self.lost if self.lost else ''}>"

    def is_still(self, endpoint: str, incarnation: int, keys: Keys | None) -> bool:
        """Returns whether it is the same healthy host."""
        return not self.lost and (self.endpoint, self.incarnation, self.keys) == (endpoint, incarnation, keys)

    def dials(self, other: ExternalHost) -> bool:
        """Returns whether this host's agent can dial the other one where this process does, with its own key."""
        if not isinstance(other, RemoteHost) or not other.endpoint or other.via_gateway > self.via_gateway:
            return False
        unreachable = is_loopback(other.endpoint) and not is_loopback(self.endpoint)
        unreachable = unreachable or other.endpoint in self.runtime.part(HostRoutes).tunnels
        return other is not self and not unreachable and self.keys == other.keys

    def join(self) -> Future[Done]:
        """Makes it reachable from this process. Resolves when the agent has accepted the lease."""
        self.runtime.node.learn(
            self.host, self.endpoint, keys=self.keys, insecure_loopback=self.insecure, incarnation=self.incarnation
        )
        lease = p.OwnerLease(seconds=self.lease)
        return request(self.runtime, agent_of(self.host), verbs.LEASE, lease)

    def leave(self) -> Future[Done]:
        """Has the agent stop this process's meshes there, at once."""
        return request(self.runtime, agent_of(self.host), verbs.LEAVE, Done())

    def shutdown(self) -> Future[p.StopReply]:
        """Ends the agent and all processes there."""
        self.end()
        reply = request(self.runtime, self._agent, verbs.SHUTDOWN, p.Shutdown())
        when_done(reply, lambda _: self.runtime.node.forget(self.host, "it was shut down"))
        return reply

    def retire(self, incarnation: int) -> None:
        """Hands it over to another watcher; `incarnation` is that of its current agent."""
        if incarnation != self.incarnation and not self.lost:
            self._lose(f"its agent{self._location} was restarted, and everything that ran there is gone")
        self.end()

    def end(self) -> None:
        """Stops watching it."""
        self._ended.set()
        self.runtime.part(HostLosses).clear(self.host)

    def give_up(self, reason: str) -> None:
        """Called when its agent is about to be killed by its starter: no failure, but pending requests fail.

        Notifies the agent that this process leaves: SIGTERM, sent by some schedulers, is no notice to an unused host.
        """
        self.end()
        with contextlib.suppress(TransportError):
            self.runtime.post(self._agent, verbs.LEAVE, Done())
        fail_requests(self.runtime, (self._agent,), reason)
        self.runtime.later(_LEAVE_S, lambda: self.runtime.node.forget(self.host, reason, self.incarnation))

    def ends(self, reason: str) -> None:
        """Called when its agent's starter reports its end: the host is lost as soon as its agent does not answer.

        An agent that answers is not lost: a scheduler may report its end some seconds early.
        """
        self._end_reason = reason
        if self.lost:
            self.lost = reason
            self.runtime.part(HostLosses).explain(self.host, reason)
        else:
            self.cut()

    def await_return(self, seconds: float) -> None:
        """Blocks while the host is still marked as lost although its restarted agent runs."""
        returning = self._returning
        if returning is not None:
            returning.wait(seconds)

    def cut(self) -> None:
        """Handles a broken connection to it; reading thread."""
        if not self.lost and not self._ended.is_set():
            self.runtime.part(HostLosses).suspect(self.host)
        with self._lock:
            self._cut_at = self._cut_at or time.monotonic()
            if self._patrol is None and not self._ended.is_set():
                self._patrol = threading.Thread(target=self._watch, name=f"monarch-host-{self.host}", daemon=True)
                self._patrol.start()

    def outage(self) -> str:
        """Returns since when the connection is broken, and when the host counts as lost; "" while it is up."""
        cut_at = self._cut_at
        if self.lost or not cut_at:
            return self.lost
        seconds = time.monotonic() - cut_at
        remaining = max(0.0, self.lease - seconds)
        return f"{self._silence_reason(round(seconds))}; the host counts as lost in {remaining:.0f} s"

    def undelivered(self, header: Header, reason: str) -> None:
        """Holds a lost message until the fate of the host is known; reading thread."""
        self._undelivered.append((header, reason))
        self.cut()

    @property
    def _location(self) -> str:
        return f" at {self._target}" if self.endpoint else ""

    @property
    def _tunnel(self) -> Tunnel | None:
        """The tunnel to it, if its endpoint is one of this machine."""
        return self.runtime.part(HostRoutes).tunnels.get(self.endpoint) or self._foreign_tunnel

    @property
    def _target(self) -> str:
        tunnel = self._tunnel
        return self.endpoint if tunnel is None else tunnel.to

    # -- monitoring -------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._is_watch_over():
            try:
                self._watch_outage()
                self._report_undelivered()
                if self.lost:
                    self._watch_return()
            except Exception:
                log.exception("watching host %s", self.host)
                self._ended.wait(_AWAY_S)

    def _report_undelivered(self) -> None:
        while self._undelivered:
            self.runtime.undelivered(*self._undelivered.pop(0))

    def _is_watch_over(self) -> bool:
        with self._lock:
            calm = not self.lost and self._cut_at == 0.0 and not self._undelivered
            if calm or self._ended.is_set() or self.runtime.closed:
                self._patrol = None
                return True
            return False

    @property
    def _agent(self) -> str:
        return agent_of(self.host)

    def _watch_outage(self) -> None:
        """Returns when the same agent answers again, or the host is lost."""
        cut = OutageTimer(self._cut_at or time.monotonic(), self.lease)
        while not (self.lost or self._ended.wait(_POLL_S)) and not self.runtime.closed:
            now = time.monotonic()
            state = self._ask() if self._connected() else None
            if state is not None:
                if (state.host, state.incarnation) == (self.host, self.incarnation):
                    self._recovered(now)
                    return
                self._returning = threading.Event()
                self._lose(f"its agent{self._location} was restarted, and everything that ran there is gone")
                return
            if not self._connected():  # a machine under load may need long for an answer
                if self._end_reason:
                    self._lose(self._end_reason)
                    return
                if words := self.runtime.part(ProcessWatcher).end_of(self.host):
                    self._lose(f"its agent{self._location} has ended: {words}")
                    return
            if route_lost := self._route_lost():
                self._lose(route_lost)
                return
            if cut.silent(now, self._vouched):
                self._lose(self._silence_reason(self.lease))
                return
            if cut.refused(now, self._knock()):
                self._lose(f"its agent has ended: nobody listens at {self._target} any more")
                return

    def _recovered(self, since: float) -> None:
        """Ends the outage, unless the connection has broken again meanwhile."""
        with self._lock:
            self._cut_at = 0.0 if self._connected() else since
        if not (self._cut_at or self._end_reason):
            self.runtime.part(HostLosses).clear(self.host)

    def _lose(self, reason: str) -> None:
        if self._ended.is_set():
            return
        self.lost = reason
        explained = bool(self._end_reason) or not self.has_engine
        self.runtime.part(HostLosses).lost(self.host, reason, self.incarnation, explained=explained)

    def _watch_return(self) -> None:
        """Returns when the host can be used again, for processes that are spawned or healed from now on."""
        pause = 0.0
        while not self._ended.wait(pause) and not self.runtime.closed:
            pause = min(_AWAY_MAX_S, 1.5 * pause or _AWAY_S)
            if not self._knock():
                continue
            state = self._ask()
            if state is None or state.host != self.host:
                continue
            is_same = state.incarnation == self.incarnation
            self.incarnation, self.pid = state.incarnation, state.pid
            self.lease = self._wanted_lease or state.lease_s or self.lease
            try:
                reply = self.join()
                if is_same:
                    self.leave().get(_HELLO_S)  # stops processes there, which were given up here
                reply.get(_HELLO_S)
                self.runtime.part(HostRoutes).rejoin(self, _HELLO_S)
            except (TimeoutError, RuntimeError):
                continue
            if self._returning is not None:
                self._returning.set()
                self._returning = None
            self._recovered(time.monotonic())
            self.runtime.part(MeshEvents).publish(HostBack(self.host))
            return

    # -- how it is reached, for subclasses to override ----------------------------------------------------------------

    def _connected(self) -> bool:
        return self.runtime.node.connected(self._agent)

    @property
    def _vouched(self) -> bool:
        """True if its machine answers libzmq's heartbeats, though its agent may not answer."""
        return self._connected()

    def _silence_reason(self, seconds: float) -> str:
        trouble = self._tunnel.trouble() if self._tunnel is not None else ""
        silence = f"no connection to its agent at {self._target} for {seconds:g} s"
        return f"{silence}: {trouble}" if trouble else silence

    def _route_lost(self) -> str:
        """Returns why it can no longer be reached; "" if it can."""
        return ""

    def _knock(self) -> bool | None:
        tunnel = self._tunnel
        if tunnel is None:
            return knock(self.endpoint, _KNOCK_S)
        if tunnel.knock is not None:
            return tunnel.knock(_KNOCK_S)
        return knock(self.endpoint, _KNOCK_S) or None  # a refusal comes from the near end

    def _ask(self) -> p.HostState | None:
        # If its end is known, the losses of other hosts wait for it: see HostLosses.
        timeout = _ENDING_S if self._end_reason else _HELLO_S
        [answer] = introduce([self.endpoint], self.keys, insecure_loopback=self.insecure, timeout=timeout)
        return answer if isinstance(answer, p.HostState) else None


def _is_forwarded(endpoint: str, state: p.HostState) -> bool:
    """Returns whether an endpoint of this machine leads to an agent on another one."""
    if not (state.pid and endpoint.startswith("tcp://") and is_loopback(endpoint)) or state.pid == os.getpid():
        return False
    try:
        os.kill(state.pid, 0)
    except PermissionError:  # another user's: it may be the agent
        return False
    except OSError:
        return True
    return not run_folder_for(state.host).exists() and find_run_folder(state.host) is None


def await_return(runtime: Runtime, host: str, seconds: float) -> None:
    """Blocks while an attached host is still marked as lost although its restarted agent runs."""
    remote = runtime.part(HostRoutes).attached.get(host)
    if isinstance(remote, RemoteHost):
        remote.await_return(seconds)


def undelivered(runtime: Runtime, header: Header, reason: str) -> None:
    """Handles a message of this process that will not arrive; reading thread."""
    remote = runtime.part(HostRoutes).attached.get(host_of(header.dst))
    is_own = isinstance(lost_here(reason), DescriptorLimitError)  # regardless of the host's fate
    if isinstance(remote, RemoteHost) and not (remote.lost or runtime.closed or is_own):
        remote.undelivered(header, reason)
    else:
        runtime.undelivered(header, reason)


def connection(runtime: Runtime, address: str, up: bool) -> None:
    """Handles a change of a TCP connection, reported by the transport; reading thread."""
    remote = runtime.part(HostRoutes).attached.get(host_of(address))
    if isinstance(remote, RemoteHost) and not up:
        remote.cut()


class Gateway:
    """A host whose agent dials others for this process."""

    def __init__(self, runtime: Runtime, remote: ExternalHost, address: str) -> None:
        self.remote = remote
        self.agent = agent_of(remote.host)
        self.address = address  # as given by the user
        self._runtime = runtime
        if verbs.HOST_CUT.name not in runtime.verbs:
            runtime.verbs.handle(verbs.HOST_CUT, self._cut)

    def _cut(self, lost: p.HostsLost, asker: Asker[None]) -> None:
        """Handles that the gateway has lost its connection to hosts; reading thread."""
        for host in lost.hosts:
            remote = self._runtime.part(HostRoutes).attached.get(host)
            if remote is not None and remote.via_gateway:
                remote.cut()

    @property
    def up(self) -> bool:
        """True while it is connected."""
        return not self.remote.lost and (self.remote.is_local or self._runtime.node.connected(self.agent))

    def ask(self, endpoint: str, timeout: float) -> p.IntroduceReply:
        """Has the gateway connect to an endpoint and returns its reply. Blocks."""
        question = p.Introduce(endpoint, timeout)
        try:
            return request(self._runtime, self.agent, verbs.INTRODUCE, question).get(timeout + _MARGIN_S)
        except (TimeoutError, RuntimeError) as error:
            return p.IntroduceReply(error=f"the gateway {self.address} cannot find out who is at {endpoint}: {error}")

    def introduce(self, endpoints: Sequence[str], timeout: float) -> list[IntroductionResult]:
        """Returns the host, or the error, at each endpoint; blocks."""
        if not endpoints:
            return []

        def ask(endpoint: str) -> IntroductionResult:
            answer = self.ask(endpoint, timeout)
            return answer.state or UnreachableError(f"{answer.error} (asked by the gateway {self.address})")

        with futures.ThreadPoolExecutor(min(32, len(endpoints)), "monarch-gateway") as pool:
            return list(pool.map(ask, endpoints))


class GatewayHost(RemoteHost):
    """A host behind a gateway; `endpoint` is where the gateway dials it."""

    via_gateway = True

    def __init__(self, runtime: Runtime, endpoint: str, state: p.HostState, gateway: Gateway, lease: float | None,
                 ) -> None:  # fmt: skip
        super().__init__(runtime, endpoint, state, gateway.remote.keys, False, lease)
        self.gateway = gateway
        self._answer: p.IntroduceReply | None = None  # the gateway's last answer

    def is_still(self, endpoint: str, incarnation: int, keys: Keys | None) -> bool:
        """Returns whether it is the same healthy host; the key is the gateway's own."""
        return (
            super().is_still(endpoint, incarnation, self.keys) and self.runtime.part(HostRoutes).gateway is self.gateway
        )

    def dials(self, other: ExternalHost) -> bool:
        """Returns whether this host's agent can dial the other one: assumed for hosts behind the same gateway."""
        return isinstance(other, GatewayHost) and super().dials(other)

    def join(self) -> Future[Done]:
        """Makes it reachable from this process. Resolves when the agent has accepted the lease."""
        self.runtime.node.learn(self.host, via=self.gateway.agent, incarnation=self.incarnation)
        return request(self.runtime, self._agent, verbs.LEASE, p.OwnerLease(seconds=self.lease))

    @property
    def _tunnel(self) -> Tunnel | None:
        return None  # the gateway dials its endpoint

    def _connected(self) -> bool:
        return self.gateway.up

    @property
    def _vouched(self) -> bool:
        return False  # the gateway's presence proves nothing about the host

    def _knock(self) -> bool | None:
        if not self.gateway.up:
            return None
        answer = self._answer or self.gateway.ask(self.endpoint, _ASK_S)
        self._answer = None
        return True if answer.state is not None else False if answer.nobody else None

    def _ask(self) -> p.HostState | None:
        answer = self._answer = self.gateway.ask(self.endpoint, _ASK_S)
        return answer.state

    def _route_lost(self) -> str:
        return f"the gateway {self.gateway.address} to it is lost" if self.gateway.remote.lost else ""
