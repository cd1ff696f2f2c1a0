"""Ways between hosts: what agents are told of each other, and of hosts that are gone."""

import contextlib
import ipaddress
from collections.abc import Iterable
from typing import TYPE_CHECKING

from monarch_nb.host import protocol as p
from monarch_nb.host.folders import run_folder_for
from monarch_nb.mesh.requests import request
from monarch_nb.runtime import Future, Runtime
from monarch_nb.transport import split

if TYPE_CHECKING:
    from monarch_nb.mesh.gateway import Gateway
    from monarch_nb.mesh.neighbour import Neighbour
    from monarch_nb.mesh.remote import Remote

remotes: "dict[str, Remote | Neighbour]" = {}  # attached hosts, by id
local: set[str] = set()  # hosts whose agents this process has started
gateway: "Gateway | None" = None  # dials in place of this process those hosts that are attached from then on


def tell_ways(engine: Runtime) -> "dict[str, Future[p.Done]]":
    """Tells every agent how it reaches the others: directly where it can, else by way of this process."""
    living = [remote for remote in remotes.values() if not remote.lost]
    here = {host: f"ipc://{run_folder_for(host)}" for host in local}
    here.update({remote.host: remote.endpoint for remote in living if remote.near})
    through = {remote.host: engine.address for remote in living if not remote.near}
    asked = {}
    if len(here) > 1 or through:
        own = {remote.host for remote in living if is_behind(remote)}  # the gateway has found these itself
        for host in here:
            leads = gateway is not None and gateway.remote.host == host
            vias = {other: via for other, via in through.items() if not (leads and other in own)}
            asked[host] = _tell(engine, host, p.Hosts(here, vias))
    for remote in living:
        if remote.near:
            continue
        host = remote.host
        leads = gateway is not None and gateway.remote is remote
        endpoints = {
            other.host: other.endpoint
            for other in living
            if not other.near and (remote.dials(other) or (leads and is_behind(other)))
        }
        vias = {other: engine.address for other in (*here, *through) if other not in endpoints and other != host}
        endpoints.pop(host, None)
        if gateway is not None and is_behind(remote):
            vias[gateway.remote.host] = gateway.agent  # which has dialled it
        asked[host] = _tell(engine, host, p.Hosts(endpoints, vias))
    return asked


def is_behind(remote: "Remote | Neighbour") -> bool:
    """Whether a gateway leads to it."""
    return getattr(remote, "gateway", None) is not None


def settle(engine: Runtime, hosts: Iterable[str], timeout: float) -> None:
    """Tells the ways, and waits until these hosts have heard: what is sent now finds them."""
    told = tell_ways(engine)
    for host in hosts:
        if host in told:
            told.pop(host).get(timeout)
    for answer in told.values():
        with contextlib.suppress(TimeoutError):  # another host may be out of touch: that is not the matter here
            answer.exception(1.0)


def tell_lost(engine: Runtime, host: str, reason: str) -> None:
    """Tells every other agent, and through them all processes, that a host is gone."""
    for other in (*local, *(remote.host for remote in remotes.values() if not remote.lost)):
        if other != host:
            engine.control(f"{other}/agent", "agent.lost", p.Lost({host: reason}))
    if gateway is not None and gateway.remote.host == host:
        for remote in tuple(remotes.values()):
            if is_behind(remote):
                remote.cut()  # type: ignore[union-attr]


def is_loopback(endpoint: str) -> bool:
    """Whether an endpoint means this machine itself, wherever it is said."""
    name = split(endpoint)[0]
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"


def _tell(engine: Runtime, host: str, ways: p.Hosts) -> "Future[p.Done]":
    return request(engine, f"{host}/agent", "agent.hosts", ways, p.Done)
