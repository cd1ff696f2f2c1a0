"""Hosts that a user has started: attached over TCP, and left running when the controller ends."""

import logging
from collections.abc import Callable, Mapping, Sequence
from os import PathLike, fspath

from monarch_nb.connect.gateway import Gateway, GatewayHost
from monarch_nb.connect.remote_host import RemoteHost
from monarch_nb.connect.routes import HostRoutes
from monarch_nb.host import protocol as p
from monarch_nb.host.introduction import IntroductionResult, introduce
from monarch_nb.host.packages import differences
from monarch_nb.lifecycle.notices import HostNotices
from monarch_nb.mesh.host import HostMesh, host_labels
from monarch_nb.runtime import Runtime, current_runtime
from monarch_nb.transport import Keys, TransportError, TrustError, UnreachableError, split
from monarch_nb.wire import agent_of

log = logging.getLogger(__name__)

_KNOCK_S = 1.0


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
    if lease is not None and lease <= 0:
        raise ValueError(f"lease={lease!r} must be a positive number of seconds")
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
