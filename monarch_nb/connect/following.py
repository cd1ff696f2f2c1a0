"""The way to a host of a mesh that another controller has written down, followed by this one."""

import platform
import time

from monarch_nb.connect.hosts import AttachError, attach_hosts
from monarch_nb.connect.joining import readmit
from monarch_nb.connect.local_host import meet
from monarch_nb.connect.own_hosts import LocalAgents
from monarch_nb.connect.routes import Routes
from monarch_nb.connect.workers import attach
from monarch_nb.host.mesh_files import MeshFile, Way
from monarch_nb.runtime import Runtime
from monarch_nb.transport import Keys, UnreachableError

_ANSWER_S = 10.0
_CALLS_S = 20.0  # for a host that dials: it does so every few seconds


def follow(engine: Runtime, mesh: MeshFile, way: Way) -> None:
    """Makes a host known to this process, and this process to it; blocks.

    Raises TransportError, AttachError, and RuntimeError in the words of a job that opens no tunnel any more.
    """
    routes = engine.part(Routes)
    if way.host in routes.local or (way.host in routes.attached and not routes.attached[way.host].lost):
        return
    key = Keys.from_text(way.key.encode(), f"the file of {mesh.name}") if way.key else None
    if way.endpoint.startswith("ipc://"):
        _follow_here(engine, mesh, way)
    elif way.calls:
        readmit(engine, way.host, way.calls, key, _CALLS_S)
    else:
        if way.gateway is not None:
            there = way.gateway
            attach(_endpoint(routes, there), private_key=there.key.encode() or None)
        endpoint = _endpoint(routes, way)
        [host] = attach_hosts([endpoint], key=key, insecure_loopback=key is None).host_ids
        if host != way.host:
            raise AttachError.of(
                f"host {host} answers at {endpoint}, not {way.host}: that one's agent has ended, or the name leads "
                "elsewhere"
            )


def _endpoint(routes: Routes, way: Way) -> str:
    """Where a host is dialled; a tunnel to it is opened first, if need be."""
    if not way.tunnel:
        return way.endpoint
    endpoint = routes.opens(way.tunnel)
    routes.tunnels[endpoint] = way.tunnel
    return endpoint


def _follow_here(engine: Runtime, mesh: MeshFile, way: Way) -> None:
    if mesh.machine != platform.node():
        raise UnreachableError(f"it is on the machine {mesh.machine}, where no TCP port leads to it; this is "
                               f"{platform.node()}")  # fmt: skip
    engine.part(LocalAgents).ensure()  # agents are told of each other, and so of this process
    folder = way.endpoint.removeprefix("ipc://")
    local = meet(engine, f"{folder}/agent", time.monotonic() + 1.0, lambda: engine.closed)
    engine.part(Routes).attached[local.host] = local
    local.join().get(_ANSWER_S)
