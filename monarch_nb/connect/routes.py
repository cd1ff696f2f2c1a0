"""Routes between hosts: what agents are told of each other, and of hosts that are gone."""

import contextlib
import ipaddress
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from monarch_nb.host import protocol as p
from monarch_nb.host import verbs
from monarch_nb.host.folders import run_folder_for
from monarch_nb.mesh.requests import request
from monarch_nb.runtime import Future, Runtime
from monarch_nb.transport import Keys, split
from monarch_nb.wire import Done, agent_of

_PATIENCE_S = 1.0
_TOGETHER_S = 0.02  # hosts that are lost within that time are told of in one message


@dataclass(frozen=True)
class Tunnel:
    """A way that an engine has opened from an endpoint of this machine: what is seen here says nothing of its end."""

    to: str  # in words: which port of which machine, and through what
    knock: Callable[[float], bool | None] | None = None  # whether somebody listens there, as `transport.knock` says
    trouble: Callable[[], str] = lambda: ""  # why nothing passes just now
    written: str = ""  # how another process opens such a one

    def wrong(self, seen: object, seconds: float) -> str:
        """Why nobody answers through it, of which `seen` was seen at this end. Blocks up to so many seconds."""
        listens = True if self.knock is None else self.knock(seconds)
        return f"{self.to}: {self.trouble() or (seen if listens is not False else 'nobody listens there')}"


class AttachedHost(Protocol):
    """A host that somebody else started, as routes see it."""

    host: str
    incarnation: int
    endpoint: str
    lost: str  # why, while it is

    @property
    def keys(self) -> Keys | None:
        """The keys with which it is dialled."""

    @property
    def near(self) -> bool:
        """Whether all processes of this machine reach it directly."""

    @property
    def behind(self) -> bool:
        """Whether a gateway leads to it."""

    @property
    def dials_nobody(self) -> bool:
        """Whether its agent reaches all others by way of this process."""

    def dials(self, other: "AttachedHost") -> bool:
        """Whether its agent reaches that one's by itself."""

    def cut(self) -> None:
        """A connection to it broke."""

    def await_return(self, seconds: float) -> None:
        """Blocks while it is lost although its agent, which was started anew, is there already."""

    def leave(self) -> Future[Done]:
        """Has the agent stop what this process owns there, at once."""

    def shutdown(self) -> Future[p.Ended]:
        """Ends the agent and all processes there."""

    def give_up(self, reason: str) -> None:
        """Who started its agent is about to kill it: that is no failure."""

    def end(self) -> None:
        """It is no longer ours to watch."""


class GatewayRoute(Protocol):
    """A host whose agent dials others in place of this process."""

    @property
    def remote(self) -> AttachedHost:
        """The host."""

    @property
    def agent(self) -> str:
        """The address of its agent."""

    @property
    def address(self) -> str:
        """As it was given."""


class Routes:
    """The hosts that one process knows, and what their agents are told of each other."""

    def __init__(self, runtime: Runtime, opens: Callable[[str], str]) -> None:
        """`opens` opens a tunnel anew, of which another process has written down how, and gives its end here."""
        self.attached: dict[str, AttachedHost] = {}  # by id
        self.local: dict[str, int] = {}  # hosts whose agents this process has started, and their incarnations
        # Endpoints of this machine that lead elsewhere: others cannot dial them, but open such a tunnel, as is written.
        self.tunnels: dict[str, Tunnel] = {}
        self.opens = opens
        # What is to be done with a host that was lost before it is used again; they block.
        self.reclaims: list[Callable[[str], None]] = []
        self._runtime = runtime
        self._gateway: GatewayRoute | None = None
        self._told: dict[str, int] = {}  # hosts whose agents know that all others are reached by way of this process
        self._gone: dict[str, tuple[str, int, int]] = {}  # hosts whose loss is about to be told, all in one message
        self._telling = threading.Lock()
        self._settling = threading.Lock()  # else two hosts that come back at once are not told of each other

    @property
    def gateway(self) -> GatewayRoute | None:
        """What dials, in place of this process, hosts that are attached."""
        return self._gateway

    def lead_through(self, gateway: GatewayRoute) -> None:
        """Hosts that are attached from now on are dialled by that one."""
        self._gateway = gateway

    def clear(self) -> list[AttachedHost]:
        """This process leaves: it knows no hosts any more. Those that were attached."""
        attached = list(self.attached.values())
        self.attached.clear()
        self.local.clear()
        self._told.clear()
        self._gateway = None
        return attached

    def announce(self, coming: AttachedHost | None = None) -> dict[str, Future[Done]]:
        """Tells every agent how it reaches the others: directly where it can, else by way of this process.

        `coming` is a host that was lost, and counts as there.
        """
        runtime, gateway = self._runtime, self._gateway
        living = [remote for remote in tuple(self.attached.values()) if not remote.lost or remote is coming]
        incarnations = {**self.local, **{remote.host: remote.incarnation for remote in living}}
        here = {host: f"ipc://{run_folder_for(host)}" for host in self.local}
        here.update({remote.host: remote.endpoint for remote in living if remote.near})
        through = {remote.host: runtime.address for remote in living if not remote.near}
        asked = {}
        if len(here) > 1 or through:
            own = {remote.host for remote in living if remote.behind}  # the gateway has found these itself
            for host in here:
                leads = gateway is not None and gateway.remote.host == host
                vias = {other: via for other, via in through.items() if not (leads and other in own)}
                asked[host] = self._tell(host, p.Hosts(here, vias, incarnations))
        for remote in living:
            if remote.near:
                continue
            host = remote.host
            if remote.dials_nobody:
                if host not in self._told or self._told[host] != remote.incarnation or coming is not None:
                    self._told[host] = remote.incarnation
                    back = {} if coming is None or coming is remote else {coming.host: coming.incarnation}
                    asked[host] = self._tell(host, p.Hosts({}, dict.fromkeys(("", *back), runtime.address), back))
                continue
            leads = gateway is not None and gateway.remote is remote
            endpoints = {
                other.host: other.endpoint
                for other in living
                if not other.near and (remote.dials(other) or (leads and other.behind))
            }
            vias = {other: runtime.address for other in (*here, *through) if other not in endpoints and other != host}
            endpoints.pop(host, None)
            if gateway is not None and remote.behind:
                vias[gateway.remote.host] = gateway.agent  # which has dialled it
            asked[host] = self._tell(host, p.Hosts(endpoints, vias, incarnations))
        return asked

    def settle(self, hosts: Iterable[str], timeout: float) -> None:
        """Tells the routes, and waits until these hosts have heard: what is sent now finds them.

        All others are waited for, too, but no longer than a second.
        """
        with self._settling:
            self._settle(hosts, timeout, None)

    def rejoin(self, remote: AttachedHost, timeout: float) -> None:
        """A host that was lost counts as there again, once all who are in touch have heard of it, and it of them."""
        self._tell_gone()  # that comes before
        for reclaim in self.reclaims:
            reclaim(remote.host)
        with self._settling:
            self._settle((remote.host,), timeout, remote)
            remote.lost = ""

    def _settle(self, hosts: Iterable[str], timeout: float, coming: AttachedHost | None) -> None:
        answers = self.announce(coming)
        for host in hosts:
            if host in answers:
                answers.pop(host).get(timeout)
        deadline = time.monotonic() + _PATIENCE_S
        for answer in answers.values():
            with contextlib.suppress(TimeoutError):  # another host may be out of touch: that is not the matter here
                answer.exception(max(0.0, deadline - time.monotonic()))

    def tell_lost(self, host: str, reason: str, incarnation: int, loss: int) -> None:
        """Tells all other agents, and through them all processes, that a host is gone; `incarnation` is its agent's.
        `loss` is the number of that loss.

        In a moment: what is lost at once, as with the power of a rack, is told at once.
        """
        with self._telling:
            first = not self._gone
            self._gone[host] = (reason, incarnation, loss)
        if first:
            self._runtime.later(_TOGETHER_S, self._tell_gone)
        if self._gateway is not None and self._gateway.remote.host == host:
            for remote in tuple(self.attached.values()):
                if remote.behind:
                    remote.cut()

    def _tell_gone(self) -> None:
        with self._telling:
            gone, self._gone = self._gone, {}
        if not gone or self._runtime.closed:
            return
        lost = p.Lost(
            {host: reason for host, (reason, _, _) in gone.items()},
            {host: incarnation for host, (_, incarnation, _) in gone.items()},
            {host: loss for host, (_, _, loss) in gone.items()},
        )
        attached = tuple(self.attached.values())
        for other in (*self.local, *(remote.host for remote in attached if not remote.lost)):
            if other not in gone:
                self._runtime.post(agent_of(other), verbs.LOST, lost)

    def _tell(self, host: str, hosts: p.Hosts) -> Future[Done]:
        return request(self._runtime, agent_of(host), verbs.HOSTS, hosts)


def is_loopback(endpoint: str) -> bool:
    """Whether an endpoint means this machine itself, wherever it is said."""
    name = split(endpoint)[0]
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"
