"""Hosts of a mesh that cannot be reached when a controller comes back to it: lost here, and looked for from then on."""

from collections.abc import Mapping

from monarch_nb.connect.following import key_of
from monarch_nb.connect.gateway import Gateway, GatewayHost
from monarch_nb.connect.joining import JoinedHost
from monarch_nb.connect.remote_host import RemoteHost
from monarch_nb.connect.routes import Routes
from monarch_nb.host import protocol as p
from monarch_nb.host.mesh_files import MeshFile, Way
from monarch_nb.lifecycle.watching import ProcessWatcher
from monarch_nb.runtime import Runtime


def lose(engine: Runtime, mesh: MeshFile, failures: Mapping[str, str]) -> None:
    """What runs on these hosts counts as lost, here and on all others; why is given by host.

    Once a host can be reached its ranks can be healed: what lived on there is stopped then.
    """
    routes, ways = engine.part(Routes), {way.host: way for way in mesh.ways}
    for host, why in failures.items():
        reason = f"it could not be reached when {mesh.name} was attached: {why}"
        loss = engine.part(ProcessWatcher).host_lost(host, reason, 0, told=True)
        routes.tell_lost(host, reason, 0, loss)
        remote = None if host not in ways else _remote(engine, mesh, ways[host])
        if remote is not None:
            remote.lost = reason
            routes.attached[host] = remote
            remote.cut()  # it is looked for


def _remote(engine: Runtime, mesh: MeshFile, way: Way) -> RemoteHost | None:
    """None for one that cannot come back: an agent on this machine that has ended, or what a lost gateway led to."""
    gateway, key = engine.part(Routes).gateway, key_of(mesh, way)
    unknown = p.HostState(host=way.host, pid=0, procs=())
    if way.calls:
        return JoinedHost(engine, unknown, way.calls, key, None)
    if way.gateway is not None:
        return GatewayHost(engine, way.endpoint, unknown, gateway, None) if isinstance(gateway, Gateway) else None
    if way.endpoint.startswith("tcp://"):
        return RemoteHost(engine, way.endpoint, unknown, key, key is None, None)
    return None
