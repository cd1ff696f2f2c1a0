"""Ways between hosts: what agents are told of each other, and of hosts that are gone."""

import contextlib
import ipaddress
import threading
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from monarch_nb.host import protocol as p
from monarch_nb.host import verbs
from monarch_nb.host.folders import run_folder_for
from monarch_nb.mesh.requests import request
from monarch_nb.runtime import Future, Runtime
from monarch_nb.transport import split
from monarch_nb.wire import Done, agent_of

if TYPE_CHECKING:
    from monarch_nb.attach.gateway import Gateway
    from monarch_nb.attach.local_host import LocalHost
    from monarch_nb.attach.remote_host import RemoteHost

remotes: "dict[str, RemoteHost | LocalHost]" = {}  # attached hosts, by id
local: dict[str, int] = {}  # hosts whose agents this process has started, and their incarnations
gateway: "Gateway | None" = None  # dials in place of this process those hosts that are attached from then on


_settling = threading.Lock()  # else two hosts that come back at once are not told of each other
_PATIENCE_S = 1.0


def tell_ways(engine: Runtime, coming: "RemoteHost | None" = None) -> "dict[str, Future[Done]]":
    """Tells every agent how it reaches the others: directly where it can, else by way of this process.

    `coming` is a host that was lost, and counts as there.
    """
    living = [remote for remote in remotes.values() if not remote.lost or remote is coming]
    incarnations = {**local, **{remote.host: remote.incarnation for remote in living}}
    here = {host: f"ipc://{run_folder_for(host)}" for host in local}
    here.update({remote.host: remote.endpoint for remote in living if remote.near})
    through = {remote.host: engine.address for remote in living if not remote.near}
    asked = {}
    if len(here) > 1 or through:
        own = {remote.host for remote in living if is_behind(remote)}  # the gateway has found these itself
        for host in here:
            leads = gateway is not None and gateway.remote.host == host
            vias = {other: via for other, via in through.items() if not (leads and other in own)}
            asked[host] = _tell(engine, host, p.Hosts(here, vias, incarnations))
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
        asked[host] = _tell(engine, host, p.Hosts(endpoints, vias, incarnations))
    return asked


def is_behind(remote: "RemoteHost | LocalHost") -> bool:
    """Whether a gateway leads to it."""
    return getattr(remote, "gateway", None) is not None


def settle(engine: Runtime, hosts: Iterable[str], timeout: float) -> None:
    """Tells the ways, and waits until these hosts have heard: what is sent now finds them."""
    with _settling:
        _settle(engine, hosts, timeout, None)


def rejoin(engine: Runtime, remote: "RemoteHost", timeout: float) -> None:
    """A host that was lost counts as there again, once all who are in touch have heard of it, and it of them."""
    with _settling:
        _settle(engine, (remote.host,), timeout, remote)
        remote.lost = ""


def _settle(engine: Runtime, hosts: Iterable[str], timeout: float, coming: "RemoteHost | None") -> None:
    told = tell_ways(engine, coming)
    for host in hosts:
        if host in told:
            told.pop(host).get(timeout)
    deadline = time.monotonic() + _PATIENCE_S
    for answer in told.values():
        with contextlib.suppress(TimeoutError):  # another host may be out of touch: that is not the matter here
            answer.exception(max(0.0, deadline - time.monotonic()))


def tell_lost(engine: Runtime, host: str, reason: str, incarnation: int) -> None:
    """Tells every other agent, and through them all processes, that a host is gone; `incarnation` is its agent's."""
    for other in (*local, *(remote.host for remote in remotes.values() if not remote.lost)):
        if other != host:
            engine.tell(agent_of(other), verbs.LOST, p.Lost({host: reason}, {host: incarnation}))
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


def _tell(engine: Runtime, host: str, ways: p.Hosts) -> "Future[Done]":
    return request(engine, agent_of(host), verbs.HOSTS, ways)
