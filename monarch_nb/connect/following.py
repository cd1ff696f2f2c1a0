"""The ways to the hosts of a mesh that another controller has written down, followed by this one."""

import platform
import time
from collections.abc import Callable, Sequence
from functools import partial

from monarch_nb.connect.hosts import look_at, refused, take_in
from monarch_nb.connect.joining import readmit
from monarch_nb.connect.local_host import meet
from monarch_nb.connect.own_hosts import LocalAgents
from monarch_nb.connect.routes import Routes
from monarch_nb.connect.threads import begun
from monarch_nb.connect.workers import attach
from monarch_nb.host import protocol as p
from monarch_nb.host.mesh_files import MeshFile, Way
from monarch_nb.runtime import Future, Runtime
from monarch_nb.transport import Keys, TransportError, UnreachableError
from monarch_nb.wire import host_name, text_of

_ANSWER_S = 10.0
_CALLS_S = 20.0  # for a host that dials: it does so every few seconds

Failures = dict[str, str]  # why hosts cannot be reached, by their ids


def follow(runtime: Runtime, mesh: MeshFile) -> Failures:
    """Makes the hosts of a mesh known to this process, and this process to them; blocks.

    All at once: one that does not answer costs the others nothing.
    """
    routes = runtime.part(Routes)
    gateways = {way.gateway.host: way.gateway for way in mesh.ways if way.gateway is not None}
    shut = _each(
        tuple(gateways.values()),
        lambda way: attach(endpoint_of(routes, way), private_key=way.key.encode() or None),
    )
    failures, ways = {}, []
    for way in mesh.ways:
        if way.gateway is not None and way.gateway.host in shut:
            failures[way.host] = f"the gateway to it, {host_name(way.gateway.host)}: {shut[way.gateway.host]}"
        elif not _is_known(routes, way.host):
            ways.append(way)
    here = [way for way in ways if way.endpoint.startswith("ipc://")]
    calling = [way for way in ways if way.calls]
    dialled = [way for way in ways if way not in here and way not in calling]
    if here and mesh.machine == platform.node():
        runtime.part(LocalAgents).ensure()  # agents are told of each other, and so of this process
    jobs = [partial(_each, [way], partial(_follow_here, runtime, mesh)) for way in here]
    jobs += [partial(_await_calls, runtime, mesh, part) for part in _alike(calling)]
    jobs += [partial(_dial, runtime, mesh, part) for part in _alike(dialled)]
    begins: list[Future[Failures]] = [begun(job) for job in jobs]
    for answer in begins:
        failures |= answer.get()
    return failures


def _is_known(routes: Routes, host: str) -> bool:
    return host in routes.local or (host in routes.attached and not routes.attached[host].lost)


def _alike(ways: Sequence[Way]) -> list[list[Way]]:
    """Those with one key, and one endpoint that they dial, if any, which can be asked together."""
    alike: dict[tuple[str, str], list[Way]] = {}
    for way in ways:
        alike.setdefault((way.key, way.calls), []).append(way)
    return list(alike.values())


def key_of(mesh: MeshFile, way: Way) -> Keys | None:
    """The key of a host, as it was written down."""
    return Keys.from_text(way.key.encode(), f"the file of {mesh.name}") if way.key else None


def endpoint_of(routes: Routes, way: Way) -> str:
    """Where a host is dialled; a tunnel to it is opened first, if need be. Raises RuntimeError in its job's words."""
    if not way.tunnel:
        return way.endpoint
    return routes.opens(way.tunnel)


def _each(ways: Sequence[Way], follow_one: Callable[[Way], object]) -> Failures:
    failures = {}
    for way in ways:
        try:
            follow_one(way)
        except Exception as error:  # what the transport, a job or the host itself says
            failures[way.host] = text_of(error)
    return failures


def _follow_here(runtime: Runtime, mesh: MeshFile, way: Way) -> None:
    if mesh.machine != platform.node():
        raise UnreachableError(f"it is on the machine {mesh.machine}, where no TCP port leads to it; this is "
                               f"{platform.node()}")  # fmt: skip
    folder = way.endpoint.removeprefix("ipc://")
    local = meet(runtime, f"{folder}/agent", time.monotonic() + 1.0, lambda: runtime.closed)
    runtime.part(Routes).attached[local.host] = local
    local.join().get(_ANSWER_S)


def _await_calls(runtime: Runtime, mesh: MeshFile, ways: Sequence[Way]) -> Failures:
    """Hosts that dial one endpoint, with one key."""
    hosts = [way.host for way in ways]
    errors = readmit(runtime, hosts, ways[0].calls, key_of(mesh, ways[0]), _CALLS_S)
    return {host: text_of(error) for host, error in errors.items()}


def _dial(runtime: Runtime, mesh: MeshFile, ways: Sequence[Way]) -> Failures:
    """Hosts with one key."""
    routes = runtime.part(Routes)
    endpoints: dict[str, str] = {}  # by host
    failures = _each(ways, lambda way: endpoints.update({way.host: endpoint_of(routes, way)}))
    key = key_of(mesh, ways[0])
    try:
        found, errors = look_at(list(dict.fromkeys(endpoints.values())), key, key is None, _ANSWER_S)
    except TransportError as error:  # none of them may be asked
        return failures | dict.fromkeys(endpoints, text_of(error))
    right = []
    for host, endpoint in endpoints.items():
        state = found.get(endpoint)
        if state is None:
            failures[host] = text_of(errors[endpoint])
        elif state.host == host:
            right.append(state)
        else:
            failures[host] = (
                f"host {host_name(state.host)} answers at {endpoint}, not {host_name(host)}: that one's agent has "
                "ended, or the name leads elsewhere"
            )

    def take(states: Sequence[p.HostState]) -> None:
        take_in(runtime, {endpoints[state.host]: state for state in states}, key, key is None, None, _ANSWER_S)

    return failures | {state.host: text_of(error) for state, error in refused(right, take)}
