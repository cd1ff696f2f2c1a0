"""How another controller reaches the hosts of a mesh: written down by the one that has them."""

from monarch_nb.connect.joining import JoinedHost
from monarch_nb.connect.routes import AttachedHost, Routes
from monarch_nb.host.folders import run_folder_for
from monarch_nb.host.mesh_files import Way
from monarch_nb.runtime import Runtime


def way_to(engine: Runtime, host: str) -> Way:
    """How another controller reaches a host that this one has, or has had."""
    routes = engine.part(Routes)
    remote = routes.attached.get(host)
    if remote is None:
        return Way(host, f"ipc://{run_folder_for(host)}")
    if remote.near:
        return Way(host, remote.endpoint)
    way = _way(routes, remote, remote.endpoint)
    if isinstance(remote, JoinedHost):
        return Way(host, "", way.key, calls=remote.calls)
    if remote.behind and routes.gateway is not None:
        leads = routes.gateway
        return Way(host, remote.endpoint, way.key, gateway=_way(routes, leads.remote, leads.address))
    return way


def _way(routes: Routes, remote: AttachedHost, endpoint: str) -> Way:
    key = "" if remote.keys is None else remote.keys.to_text().decode()
    tunnel = routes.tunnels.get(endpoint)
    return Way(remote.host, endpoint, key, tunnel="" if tunnel is None else tunnel.written)
