"""Hosts that a user started: attached over TCP, and left running when the controller goes."""

import logging
from collections.abc import Callable, Mapping, Sequence
from os import PathLike, fspath

from monarch_nb.connect.gateway import Gateway, GatewayHost
from monarch_nb.connect.remote_host import RemoteHost
from monarch_nb.connect.routes import Routes
from monarch_nb.host import protocol as p
from monarch_nb.host.introduction import Found, introduce
from monarch_nb.host.packages import differences
from monarch_nb.lifecycle.notices import HostNotices
from monarch_nb.mesh.host import HostMesh, host_labels
from monarch_nb.runtime import Runtime, current_runtime
from monarch_nb.transport import Keys, TransportError, TrustError, UnreachableError, split
from monarch_nb.wire import agent_of

log = logging.getLogger(__name__)

_KNOCK_S = 1.0


class AttachError(RuntimeError):
    """Hosts, or a mesh, could not be attached; the text says what is wrong and what to do. `errors` is by endpoint."""

    def __init__(self, errors: dict[str, Exception], count: int) -> None:
        self.errors = errors
        reasons = "\n".join(f"  {error}" for error in errors.values())
        super().__init__(
            f"{len(errors)} of {count} hosts cannot be attached:\n{reasons}" if count > 1 else reasons.strip()
        )

    @classmethod
    def of(cls, text: str) -> "AttachError":
        """What is wrong with a mesh rather than with one of its hosts."""
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
    """A mesh, with dimension `hosts`, of hosts on which `monarch-nb agent --tcp ... --key ... --keep` runs.

    `endpoints` are theirs ("tcp://node7:22222"), `key` is the key file they were started with. Blocks until all have
    told who they are; a host that does not listen yet is waited for, up to `timeout` seconds. When this process has
    been out of touch for `lease` seconds (else what the agent was started with, 60), what it spawned there is stopped,
    and here the host counts as lost; the agents live on.
    Raises AttachError, TrustError (no key for a TCP endpoint; with `insecure_loopback` 127.0.0.1 and ::1 may do
    without), or ValueError for what is no endpoint.
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
    """The hosts at these endpoints, which are attached, all or none; blocks until it is `given_up`. AttachError."""
    found, errors = look_at(endpoints, keys, insecure_loopback, timeout, given_up)
    if errors:
        raise AttachError(errors, len(endpoints))
    take_in(current_runtime(), found, keys, insecure_loopback, lease, timeout)
    return [found[endpoint].host for endpoint in endpoints]


def look_at(
    endpoints: Sequence[str], keys: Keys | None, insecure_loopback: bool, timeout: float,
    given_up: Callable[[], bool] = lambda: False,
) -> tuple[dict[str, p.HostState], dict[str, Exception]]:  # fmt: skip
    """Which hosts are at these endpoints, and what is wrong at the others, by endpoint. Blocks. Raises TrustError."""
    answers = _introduce(endpoints, keys, insecure_loopback, timeout, given_up)
    found: dict[str, p.HostState] = {}
    errors: dict[str, Exception] = {}
    for endpoint, state in zip(endpoints, answers, strict=True):
        tunnel = current_runtime().part(Routes).tunnels.get(endpoint)
        if isinstance(state, TransportError) and not isinstance(state, TrustError) and tunnel is not None:
            errors[endpoint] = UnreachableError(tunnel.wrong(state, _KNOCK_S))
            continue
        wrong = (
            state
            if isinstance(state, TransportError)
            else objection(endpoint, state, tuple(found.values())) or _double(endpoint, state)
        )
        if wrong is not None:
            errors[endpoint] = wrong
        elif isinstance(state, p.HostState):
            found[endpoint] = state
    return found, errors


def take_in(
    runtime: Runtime, found: Mapping[str, p.HostState], keys: Keys | None, insecure_loopback: bool,
    lease: float | None, timeout: float,
) -> None:  # fmt: skip
    """The hosts that were found at endpoints are used from now on. Blocks until they have agreed."""
    joined = []
    for endpoint, state in found.items():
        old = runtime.part(Routes).attached.get(state.host)
        if isinstance(old, RemoteHost) and old.is_still(endpoint, state.incarnation, keys):
            continue
        if isinstance(old, RemoteHost):
            old.retire(state.incarnation)
        elif old is not None:
            old.end()
        if _leads_to(endpoint):
            gateway = runtime.part(Routes).gateway
            assert isinstance(gateway, Gateway)
            remote: RemoteHost = GatewayHost(runtime, endpoint, state, gateway, lease)
        else:
            remote = RemoteHost(runtime, endpoint, state, keys, insecure_loopback, lease)
        runtime.part(Routes).attached[state.host] = remote
        runtime.part(HostNotices).attached(state.host)
        joined.append(remote.join())
    for answer in joined:
        answer.get(timeout)
    runtime.part(Routes).settle([state.host for state in found.values()], timeout)


def refused(states: Sequence[p.HostState], take: Callable[[Sequence[p.HostState]], object]
            ) -> list[tuple[p.HostState, Exception]]:  # fmt: skip
    """Takes hosts in, all at once; where that fails, one by one: those that do not agree, and why. Blocks."""
    try:
        take(states)
    except (RuntimeError, TimeoutError) as error:
        if len(states) == 1:
            return [(states[0], error)]
        return [each for state in states for each in refused((state,), take)]
    return []


def _double(endpoint: str, state: p.HostState) -> Exception | None:
    """What is wrong where two agents call themselves by one name, and the one that is attached lives."""
    known = current_runtime().part(Routes).attached.get(state.host)
    if known is None or known.lost or known.incarnation == state.incarnation or known.endpoint == endpoint:
        return None
    if not current_runtime().node.connected(agent_of(state.host)):
        return None
    return ValueError(
        f"{endpoint} calls itself host {state.host}, as {known.endpoint or 'one that has dialled'} does, which is "
        "attached and lives: start one of the two agents with --host and another id"
    )


def read_key(key: "Keys | str | PathLike[str] | None") -> Keys | None:
    """The key of a job, from its file. Raises TrustError."""
    if key is None or isinstance(key, Keys):
        return key
    try:
        return Keys.load(key)
    except FileNotFoundError:
        raise TrustError(
            f"there is no key file {fspath(key)}: an agent that is started with --key makes one; copy that file here, "
            "mode 0600"
        ) from None


def _leads_to(endpoint: str) -> bool:
    """Whether a gateway is to dial it."""
    gateway = current_runtime().part(Routes).gateway
    return gateway is not None and gateway.remote.endpoint != endpoint


def _introduce(
    endpoints: Sequence[str], keys: Keys | None, insecure_loopback: bool, timeout: float, given_up: Callable[[], bool]
) -> list[Found]:
    """Who answers at each endpoint, as this process finds out, or its gateway."""
    gateway = current_runtime().part(Routes).gateway
    if not isinstance(gateway, Gateway):
        return introduce(endpoints, keys, insecure_loopback=insecure_loopback, timeout=timeout, given_up=given_up)
    own = [endpoint for endpoint in endpoints if not _leads_to(endpoint)]
    far = [endpoint for endpoint in endpoints if _leads_to(endpoint)]
    by_endpoint = dict(zip(far, gateway.introduce(far, timeout), strict=True))
    if own:
        answers = introduce(own, keys, insecure_loopback=insecure_loopback, timeout=timeout, given_up=given_up)
        by_endpoint.update(zip(own, answers, strict=True))
    return [by_endpoint[endpoint] for endpoint in endpoints]


def objection(endpoint: str, state: p.HostState, others: Sequence[p.HostState]) -> Exception | None:
    """Why the host that answers there cannot take part."""
    told, stops = differences(endpoint, state)
    if stops:
        return RuntimeError(told)
    if told:
        log.warning("%s", told)
    if state.host in current_runtime().part(Routes).local or any(state.host == other.host for other in others):
        return ValueError(
            f"{endpoint} is host {state.host}, which is attached already: list it once, or start its "
            "agent with --host and another id"
        )
    return None
