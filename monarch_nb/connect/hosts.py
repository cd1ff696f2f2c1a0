"""Hosts that a user has started: attached over TCP, or dialling in; left running when the controller ends."""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from os import PathLike, fspath

from monarch_nb.connect.remote_host import Gateway, GatewayHost, RemoteHost
from monarch_nb.connect.routes import ExternalHost, HostRoutes
from monarch_nb.host import protocol as p
from monarch_nb.host import verbs
from monarch_nb.host.introduction import IntroductionResult, introduce
from monarch_nb.host.packages import differences
from monarch_nb.lifecycle.watching import HostNotices
from monarch_nb.mesh.host import HostMesh, host_labels
from monarch_nb.mesh.requests import request
from monarch_nb.runtime import Future, Runtime, current_runtime
from monarch_nb.transport import Keys, TransportError, TrustError, UnreachableError, split
from monarch_nb.wire import Asker, Done, agent_of, counted

log = logging.getLogger(__name__)
_KNOCK_S = 1.0
_BEAT_S = 1.0  # between messages to a host: only a write reveals a broken connection
_BEATS = 1000  # messages per second, for any number of hosts
_ASK_S = 3.0
_JOIN_S = 10.0
_ANSWER_S = 1.0  # for a host that has dialled, even at the end of the time
_CALL_S = 5.0  # from an agent's request to join until its connection stands


class AttachError(RuntimeError):
    """Hosts, or a mesh, could not be attached; the text has the cause and the remedy. `errors` is by endpoint."""

    def __init__(self, errors: dict[str, Exception], count: int) -> None:
        self.errors = errors
        reasons = "\n".join(f"  {error}" for error in errors.values())
        super().__init__(
            f"{len(errors)} of {count} hosts cannot be attached:\n{reasons}" if count > 1 else reasons.strip()
        )

    @classmethod
    def of(cls, text: str) -> "AttachError":
        """Makes an error about a mesh rather than about one of its hosts."""
        return cls({"": RuntimeError(text)}, 1)


def attach_hosts(
    endpoints: Sequence[str],
    *,
    key: "Keys | str | PathLike[str] | None" = None,
    name: str = "hosts",
    lease: float | None = None,
    insecure_loopback: bool = False,
    timeout: float = 10.0,
) -> HostMesh:
    """Returns a mesh, with dimension `hosts`, of hosts where `monarch-nb agent --tcp ... --key ... --keep` runs.

    `endpoints` are their addresses ("tcp://node7:22222"), `key` is the key file they were started with. Blocks until
    all have answered; a host that does not listen yet is waited for, up to `timeout` seconds. When this process has
    been disconnected for `lease` seconds (by default the agent's own value, 60), its processes there are stopped, and
    the host counts as lost here; the agents live on. Raises AttachError, TrustError (no key for a TCP
    endpoint; with `insecure_loopback` 127.0.0.1 and ::1 need none), or ValueError for an invalid endpoint.
    """
    if isinstance(endpoints, str):
        raise ValueError("attach_hosts takes a list of endpoints, such as ['tcp://node7:22222']")
    if not endpoints:
        raise ValueError("attach_hosts needs at least one endpoint, such as 'tcp://node7:22222'")
    _check_lease(lease)
    for endpoint in endpoints:
        split(endpoint)
    hosts = reach_hosts(endpoints, read_key(key), insecure_loopback, lease, timeout)
    return HostMesh(name, hosts, host_labels(hosts), owned=True)


def reach_hosts(
    endpoints: Sequence[str], keys: Keys | None, insecure_loopback: bool, lease: float | None, timeout: float,
    given_up: Callable[[], bool] = lambda: False,
) -> list[str]:  # fmt: skip
    """Attaches the hosts at these endpoints, all or none; blocks until it is `given_up`. Raises AttachError."""
    states, errors = inspect_endpoints(endpoints, keys, insecure_loopback, timeout, given_up)
    if errors:
        raise AttachError(errors, len(endpoints))
    attach_states(current_runtime(), states, keys, insecure_loopback, lease, timeout)
    return [states[endpoint].host for endpoint in endpoints]


def inspect_endpoints(
    endpoints: Sequence[str], keys: Keys | None, insecure_loopback: bool, timeout: float,
    given_up: Callable[[], bool] = lambda: False,
) -> tuple[dict[str, p.HostState], dict[str, Exception]]:  # fmt: skip
    """Returns the hosts and the errors at these endpoints, by endpoint. Blocks. Raises TrustError."""
    answers = _introduce(endpoints, keys, insecure_loopback, timeout, given_up)
    states: dict[str, p.HostState] = {}
    errors: dict[str, Exception] = {}
    for endpoint, state in zip(endpoints, answers, strict=True):
        tunnel = current_runtime().part(HostRoutes).tunnels.get(endpoint)
        if isinstance(state, TransportError) and not isinstance(state, TrustError) and tunnel is not None:
            errors[endpoint] = UnreachableError(tunnel.wrong(state, _KNOCK_S))
            continue
        error = (
            state
            if isinstance(state, TransportError)
            else objection(endpoint, state, tuple(states.values())) or _conflict(endpoint, state)
        )
        if error is not None:
            errors[endpoint] = error
        elif isinstance(state, p.HostState):
            states[endpoint] = state
    return states, errors


def attach_states(
    runtime: Runtime, states: Mapping[str, p.HostState], keys: Keys | None, insecure_loopback: bool,
    lease: float | None, timeout: float,
) -> None:  # fmt: skip
    """Attaches hosts that were found at endpoints. Blocks until they have agreed."""
    replies = []
    for endpoint, state in states.items():
        old = runtime.part(HostRoutes).attached.get(state.host)
        if isinstance(old, RemoteHost) and old.is_still(endpoint, state.incarnation, keys):
            continue
        if (via := runtime.part(HostRoutes).gateway) and via.remote is old and old.incarnation == state.incarnation:
            continue  # the gateway itself, by its own name for it
        if isinstance(old, RemoteHost):
            old.retire(state.incarnation)
        elif old is not None:
            old.end()
        if _is_behind_gateway(endpoint):
            gateway = runtime.part(HostRoutes).gateway
            assert isinstance(gateway, Gateway)
            remote: RemoteHost = GatewayHost(runtime, endpoint, state, gateway, lease)
        else:
            remote = RemoteHost(runtime, endpoint, state, keys, insecure_loopback, lease)
        runtime.part(HostRoutes).attached[state.host] = remote
        runtime.part(HostNotices).attached(state.host)
        replies.append(remote.join())
    for answer in replies:
        answer.get(timeout)
    runtime.part(HostRoutes).settle([state.host for state in states.values()], timeout)


def refusals(states: Sequence[p.HostState], take: Callable[[Sequence[p.HostState]], object]
            ) -> list[tuple[p.HostState, Exception]]:  # fmt: skip
    """Takes hosts in, all at once or, if that fails, one by one; returns failed ones with their errors. Blocks."""
    try:
        take(states)
    except (RuntimeError, TimeoutError) as error:
        if len(states) == 1:
            return [(states[0], error)]
        return [refusal for state in states for refusal in refusals((state,), take)]
    return []


def _conflict(endpoint: str, state: p.HostState) -> Exception | None:
    """Returns an error if an agent has the name of an attached host that is alive."""
    attached = current_runtime().part(HostRoutes).attached.get(state.host)
    if attached is None or attached.lost or attached.incarnation == state.incarnation or attached.endpoint == endpoint:
        return None
    if not current_runtime().node.connected(agent_of(state.host)):
        return None
    return ValueError(
        f"{endpoint} calls itself host {state.host}, as {attached.endpoint or 'one that has dialled'} does, which is "
        "attached and lives: start one of the two agents with --host and another id"
    )


def _check_lease(lease: float | None) -> None:
    if lease is not None and not lease > 0:
        raise ValueError(f"lease={lease!r} must be a positive number of seconds")


def read_key(key: "Keys | str | PathLike[str] | None") -> Keys | None:
    """Reads the key of a job from its file. Raises TrustError."""
    if key is None or isinstance(key, Keys):
        return key
    try:
        return Keys.load(key)
    except FileNotFoundError:
        raise TrustError(
            f"there is no key file {fspath(key)}: an agent that is started with --key makes one; copy that file here, "
            "mode 0600"
        ) from None


def _is_behind_gateway(endpoint: str) -> bool:
    """Returns whether a gateway dials this endpoint."""
    gateway = current_runtime().part(HostRoutes).gateway
    return gateway is not None and gateway.remote.endpoint != endpoint


def _introduce(
    endpoints: Sequence[str], keys: Keys | None, insecure_loopback: bool, timeout: float, given_up: Callable[[], bool]
) -> list[IntroductionResult]:
    """Returns the host, or the error, at each endpoint, as found by this process or by its gateway."""
    gateway = current_runtime().part(HostRoutes).gateway
    if not isinstance(gateway, Gateway):
        return introduce(endpoints, keys, insecure_loopback=insecure_loopback, timeout=timeout, given_up=given_up)
    direct = [endpoint for endpoint in endpoints if not _is_behind_gateway(endpoint)]
    remote = [endpoint for endpoint in endpoints if _is_behind_gateway(endpoint)]
    by_endpoint = dict(zip(remote, gateway.introduce(remote, timeout), strict=True))
    if direct:
        answers = introduce(direct, keys, insecure_loopback=insecure_loopback, timeout=timeout, given_up=given_up)
        by_endpoint.update(zip(direct, answers, strict=True))
    return [by_endpoint[endpoint] for endpoint in endpoints]


def objection(endpoint: str, state: p.HostState, peers: Sequence[p.HostState]) -> Exception | None:
    """Returns why the host that answers at an endpoint cannot be attached; None if it can."""
    reason, stops = differences(endpoint, state)
    if stops:
        return RuntimeError(reason)
    if reason:
        log.warning("%s", reason)
    if state.host in current_runtime().part(HostRoutes).local or any(state.host == peer.host for peer in peers):
        return ValueError(
            f"{endpoint} is host {state.host}, which is attached already: list it once, or start its "
            "agent with --host and another id"
        )
    return None


class JoinedHost(RemoteHost):
    """A host that dials this process, and dials again when its connection breaks."""

    dials_only_controller = True

    def __init__(self, runtime: Runtime, state: p.HostState, calls: str, keys: Keys | None, lease: float | None,
                 ) -> None:  # fmt: skip
        super().__init__(runtime, "", state, keys, False, lease)
        self.calls = calls  # the endpoint of this process that it dials
        runtime.later(self._pause, self._send_beat)

    def dials(self, other: ExternalHost) -> bool:
        """Returns False: it is unknown whether this host's agent can dial the other one."""
        return False

    def join(self) -> Future[Done]:
        """Resolves when the agent has accepted the lease."""
        return request(self.runtime, self._agent, verbs.LEASE, p.OwnerLease(seconds=self.lease))

    @property
    def _pause(self) -> float:
        return max(_BEAT_S, len(self.runtime.part(HostRoutes).attached) / _BEATS)

    def _send_beat(self) -> None:
        if self._ended.is_set() or self.runtime.closed:
            return
        if not self.lost:
            try:
                self.runtime.post(self._agent, verbs.BEAT, Done())
            except Exception:
                self.cut()
        self.runtime.later(self._pause, self._send_beat)

    def _lose(self, reason: str) -> None:
        super()._lose(reason)
        self.runtime.node.learn(self.host)  # accepts its messages again if it dials

    def _silence_reason(self, seconds: float) -> str:
        return f"it closed its connection and has not dialled again for {seconds:g} s"

    def _knock(self) -> bool | None:
        return True if self._connected() else None

    def _ask(self) -> p.HostState | None:
        try:
            return request(self.runtime, self._agent, verbs.STATUS, Done()).get(_ASK_S)
        except (TimeoutError, RuntimeError):
            return None


class Reception:
    """The endpoint at which hosts join."""

    def __init__(self, runtime: Runtime, address: str, keys: Keys | None, insecure_loopback: bool) -> None:
        self.address = address
        self.keys = keys
        self.refused: dict[str, Exception] = {}
        self._runtime = runtime
        self._new: dict[str, p.HostState] = {}
        self._accepted: dict[str, tuple[p.HostState, float]] = {}  # the last agent by name that was accepted, and when
        self._changed = threading.Condition()
        runtime.verbs.handle(verbs.IDENTIFY, self._on_identify)
        runtime.verbs.handle(verbs.HOST_JOINS, self._on_joined)
        try:
            self.endpoint = runtime.node.listen(address, keys, insecure_loopback)
        except BaseException:
            runtime.verbs.release(verbs.IDENTIFY)
            runtime.verbs.release(verbs.HOST_JOINS)
            raise

    def belongs_to(self, runtime: Runtime) -> bool:
        """Returns whether it accepts hosts for this runtime, not for one that this process has shut down."""
        return self._runtime is runtime

    def _on_identify(self, state: p.HostState, asker: Asker[p.IdentifyReply]) -> p.IdentifyReply:
        """Handles a host's request to join; reading thread."""
        attached = self._runtime.part(HostRoutes).attached.get(state.host)
        is_back = isinstance(attached, JoinedHost)
        error = self._conflict(state, attached)
        if error is None and not is_back:
            error = objection(f"host {state.host}", state, ())
        with self._changed:
            if error is None:
                self._accepted[state.host] = (state, time.monotonic())
                self.refused.pop(state.host, None)
            else:
                if str(self.refused.get(state.host)) != str(error):
                    log.warning("%s", error)
                self.refused[state.host] = error
        return p.IdentifyReply(self._runtime.address, "" if error is None else str(error))

    def _conflict(self, state: p.HostState, attached: ExternalHost | None) -> Exception | None:
        """Returns an error if an agent has the name of a host that has joined and is alive."""
        if attached is not None and not isinstance(attached, JoinedHost):
            return None  # `objection` covers it
        first, accepted_at = self._accepted.get(state.host, (state, 0.0))
        if first.incarnation == state.incarnation:
            return None
        calls = time.monotonic() - accepted_at < _CALL_S  # accepted a moment ago, and about to connect
        if not calls and not self._runtime.node.connected(agent_of(state.host)):
            return None
        return ValueError(
            f"host {state.host} has joined by another agent, process {first.pid}: this one, process {state.pid}, needs "
            "an id of its own (monarch-nb agent --host), or that one has to end first"
        )

    def _on_joined(self, state: p.HostState, asker: Asker[None]) -> None:
        with self._changed:
            if not isinstance(self._runtime.part(HostRoutes).attached.get(state.host), JoinedHost):
                self._new[state.host] = state
            self._changed.notify_all()

    def accept(self, count: int, timeout: float, lease: float | None) -> list[str]:
        """Attaches the first `count` hosts that have joined and answer; returns their ids. Blocks.

        Raises AttachError, which lists the missing ones; then none is attached, and all are there for the next call.
        """
        deadline, accepted = time.monotonic() + timeout, list[p.HostState]()
        silent: dict[str, Exception] = {}
        late: dict[str, p.HostState] = {}  # they had less time than they may need: the next call asks them again
        while len(accepted) < count:
            states = self._take(count - len(accepted), deadline)
            if not states:
                self._return(accepted)
                error = AttachError({**self.refused, **silent, "": self._missing(count, timeout)}, 1)
                self._keep(late)
                raise error
            within = min(_JOIN_S, max(_ANSWER_S, deadline - time.monotonic()))
            errors = self.admit(states, lease, within)
            silent |= errors
            accepted += [state for state in states if state.host not in errors]
            if within < _JOIN_S:
                late |= {state.host: state for state in states if state.host in errors}
        self._keep(late)
        return [state.host for state in accepted]

    def _take(self, count: int, deadline: float) -> list[p.HostState]:
        """Takes the first `count` hosts that have joined, or none by the deadline. Blocks."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._new) >= count, max(0.0, deadline - time.monotonic())):
                return []
            return [self._new.pop(host) for host in tuple(self._new)[:count]]

    def _return(self, states: Sequence[p.HostState]) -> None:
        """Leaves hosts that were attached to the next call."""
        for state in states:
            self._runtime.part(HostRoutes).attached.pop(state.host).end()
        with self._changed:
            self._new = {state.host: state for state in states} | self._new

    def _keep(self, late: dict[str, p.HostState]) -> None:
        """Leaves hosts to the next call, after all others."""
        with self._changed:
            self._new |= {host: state for host, state in late.items() if host not in self._new}

    def _missing(self, count: int, timeout: float) -> TimeoutError:
        return TimeoutError(
            f"{len(self._new)} of {counted(count, 'host')} joined at {self.endpoint} within {timeout:g} s. On the "
            f"others run: monarch-nb agent --dial tcp://HERE:{self.endpoint.rpartition(':')[2]} --key FILE --keep"
        )

    def await_host(self, host: str, timeout: float) -> p.HostState | None:
        """Returns this host once it has joined, or None after the time-out. Blocks."""
        with self._changed:
            self._changed.wait_for(lambda: host in self._new, timeout)
            return self._new.pop(host, None)

    def admit(
        self, states: Sequence[p.HostState], lease: float | None, within: float = _JOIN_S
    ) -> dict[str, Exception]:
        """Attaches these hosts; returns the errors of those that do not agree, and are not attached.

        Blocks up to `within` seconds.
        """
        routes, deadline = self._runtime.part(HostRoutes), time.monotonic() + within
        hosts = {state.host: JoinedHost(self._runtime, state, self.endpoint, self.keys, lease) for state in states}
        routes.attached.update(hosts)
        errors: dict[str, Exception] = {}
        for host, reply in [(host, remote.join()) for host, remote in hosts.items()]:
            try:
                reply.get(max(0.0, deadline - time.monotonic()))
            except (TimeoutError, RuntimeError):
                errors[host] = UnreachableError(f"host {host} joined, and has not answered within {within:.3g} s")
                routes.attached.pop(host).end()
        agreed = [host for host in hosts if host not in errors]
        try:
            routes.settle(agreed, max(_ANSWER_S, deadline - time.monotonic()))
        except TimeoutError as error:
            for host in agreed:
                errors[host] = error
                routes.attached.pop(host).end()
        return errors


_reception: Reception | None = None


def accept_hosts(
    count: int,
    *,
    at: str = "tcp://0.0.0.0:22222",
    key: "Keys | str | PathLike[str] | None" = None,
    name: str = "hosts",
    lease: float | None = None,
    insecure_loopback: bool = False,
    timeout: float = 60.0,
) -> HostMesh:
    """Returns a mesh, with dimension `hosts`, of the first `count` hosts that dial this process at the endpoint `at`.

    For hosts that cannot be dialled: `monarch-nb agent --dial tcp://HERE:22222 --key FILE --keep` runs there. Further
    hosts that dial are available to the next call. `key` and `lease` are as for `attach_hosts`. Processes on such hosts
    reach those of other hosts through this process. Blocks up to `timeout` seconds, and two more for answers of hosts
    that have dialled by then. From the first call on this process listens at that endpoint, until
    `shutdown_context()`. Raises AttachError if fewer hosts have come, TrustError without a key, TransportError if it
    cannot listen.
    """
    if count < 1:
        raise ValueError(f"count={count!r} must be at least 1")
    _check_lease(lease)
    keys = read_key(key)
    runtime = current_runtime()
    reception = _reception_at(runtime, at, keys, insecure_loopback)
    hosts = reception.accept(count, timeout, lease)
    return HostMesh(name, hosts, host_labels(hosts), owned=True)


def _reception_at(runtime: Runtime, endpoint: str, keys: Keys | None, insecure_loopback: bool) -> Reception:
    """Returns this process's reception. Raises ValueError if it is at another endpoint."""
    global _reception
    reception = _reception
    if reception is None or not reception.belongs_to(runtime):
        reception = _reception = Reception(runtime, endpoint, keys, insecure_loopback)
    elif endpoint not in (reception.address, reception.endpoint) or reception.keys != keys:
        conflict = "with another key" if endpoint in (reception.address, reception.endpoint) else f"at {endpoint}"
        raise ValueError(
            f"this process accepts hosts at {reception.endpoint} already, and cannot accept them {conflict} as well"
        )
    return reception


def use_keys(runtime: Runtime, old: Keys, new: Keys) -> None:
    """Has this process accept hosts with another key, if it accepts those with `old`."""
    if _reception is not None and _reception.belongs_to(runtime) and _reception.keys == old:
        _reception.keys = new


def readmit(
    runtime: Runtime, hosts: Sequence[str], endpoint: str, keys: Keys | None, timeout: float
) -> dict[str, Exception]:
    """Attaches hosts that dialled an earlier process at the same endpoint. Blocks until all have dialled.

    Returns the errors of hosts that have not dialled within `timeout` seconds, or do not agree.
    """
    try:
        reception = _reception_at(runtime, endpoint, keys, keys is None)
    except (ValueError, TransportError) as error:
        return dict.fromkeys(hosts, error)
    deadline = time.monotonic() + timeout
    by_host = {host: reception.await_host(host, max(0.0, deadline - time.monotonic())) for host in hosts}
    reason = f"it has not dialled {endpoint} within {timeout:g} s: its agent has ended, or dials elsewhere"
    errors: dict[str, Exception] = {host: UnreachableError(reason) for host in hosts if by_host[host] is None}
    states = [state for state in by_host.values() if state is not None]
    return errors | reception.admit(states, None)
