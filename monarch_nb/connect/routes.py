"""Routes between hosts: messages to host agents about other hosts, and about lost ones."""

import contextlib
import ipaddress
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from monarch_nb.host import protocol as p
from monarch_nb.host import verbs
from monarch_nb.host.folders import run_folder_for
from monarch_nb.mesh.requests import request
from monarch_nb.runtime import Future, Runtime
from monarch_nb.supervision import hosts_text
from monarch_nb.transport import Keys, TransportError, split
from monarch_nb.wire import Done, agent_of, host_name

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from monarch_nb.connect.remote_host import Gateway

_PATIENCE_S = 1.0
GATHER_S = 2.0  # at most, from the first loss on
_QUOTED = 4  # of different reasons
_TOGETHER_S = 0.02  # losses within this time are sent in one message


@dataclass(frozen=True)
class Tunnel:
    """A tunnel that a job has opened from an endpoint of this machine, which does not reveal its far end."""

    to: str  # its far end for people: the port, the machine, and the carrier
    knock: Callable[[float], bool | None] | None = None  # whether the far end listens, as `transport.knock` returns it
    trouble: Callable[[], str] = lambda: ""  # the reason why nothing passes at present
    written: str = ""  # the recipe with which another process opens such a tunnel

    def wrong(self, error: object, seconds: float) -> str:
        """Returns why there is no answer through it; `error` is the error at this end. Blocks up to `seconds`."""
        listens = True if self.knock is None else self.knock(seconds)
        return f"{self.to}: {self.trouble() or (error if listens is not False else 'nobody listens there')}"


class ExternalHost(Protocol):
    """A host whose agent this process has not started, as routes see it."""

    host: str
    incarnation: int
    endpoint: str
    lost: str  # the reason, while it is lost

    @property
    def keys(self) -> Keys | None:
        """The keys to dial it with."""

    @property
    def is_local(self) -> bool:
        """True if all processes of this machine reach it directly."""

    @property
    def via_gateway(self) -> bool:
        """True if it is reached through a gateway."""

    @property
    def dials_only_controller(self) -> bool:
        """True if its agent reaches all other hosts through this process."""

    def dials(self, other: "ExternalHost") -> bool:
        """Returns whether its agent can dial the other one."""

    def cut(self) -> None:
        """Called when a connection to it breaks."""

    def outage(self) -> str:
        """Returns the time and reason of an outage; "" if it can be reached."""

    def await_return(self, seconds: float) -> None:
        """Blocks while it is still marked as lost although its restarted agent runs."""

    def leave(self) -> Future[Done]:
        """Has the agent stop this process's meshes there, at once."""

    def shutdown(self) -> Future[p.StopReply]:
        """Ends the agent and all processes there."""

    def give_up(self, reason: str) -> None:
        """Called when its agent is about to be killed by its starter, which is no failure."""

    def end(self) -> None:
        """Stops watching it."""


class HostRoutes:
    """The hosts that one process knows, and its announcements to their agents."""

    def __init__(self, runtime: Runtime, open_tunnel: Callable[[str], str]) -> None:
        """`open_tunnel` opens a tunnel that another process has recorded, and returns its end on this machine."""
        self.attached: dict[str, ExternalHost] = {}  # by id
        self.local: dict[str, int] = {}  # incarnations of the agents that this process has started, by host
        # Tunnels by their endpoint on this machine: others cannot dial it, but open their own.
        self.tunnels: dict[str, Tunnel] = {}
        self.open_tunnel = open_tunnel
        # Called, and may block, before a host that was lost is used again.
        self.reclaims: list[Callable[[str], None]] = []
        self._runtime = runtime
        self._gateway: Gateway | None = None
        # Hosts whose agents know that this process leads to all others, and the incarnations of these agents.
        self._announced: dict[str, int] = {}
        self._lost_hosts: dict[str, tuple[str, int, int]] = {}  # to be announced in one message
        self._losses_lock = threading.Lock()
        self._settle_lock = threading.Lock()  # else two hosts that return at once miss each other

    @property
    def gateway(self) -> "Gateway | None":
        """The host that dials, for this process, the hosts that it attaches; until it is shut down or given up."""
        return self._gateway if self._gateway is not None and self._gateway.remote.host in self.attached else None

    def set_gateway(self, gateway: "Gateway") -> None:
        """Has hosts that are attached from now on dialled by a gateway."""
        self._gateway = gateway

    def clear(self) -> list[ExternalHost]:
        """Removes all hosts; returns those that were attached."""
        attached = list(self.attached.values())
        self.attached.clear()
        self.local.clear()
        self._announced.clear()
        self._gateway = None
        return attached

    def announce(self, rejoining: ExternalHost | None = None) -> dict[str, Future[Done]]:
        """Sends every agent its routes to the others: direct where it can dial them, else through this process.

        `rejoining` is a lost host that is to be announced as present.
        """
        runtime, gateway = self._runtime, self.gateway
        living = [remote for remote in tuple(self.attached.values()) if not remote.lost or remote is rejoining]
        incarnations = {**self.local, **{remote.host: remote.incarnation for remote in living}}
        local = {host: f"ipc://{run_folder_for(host)}" for host in self.local}
        local.update({remote.host: remote.endpoint for remote in living if remote.is_local})
        through = {remote.host: runtime.address for remote in living if not remote.is_local}
        requests = {}
        if len(local) > 1 or through:
            gateway_hosts = {remote.host for remote in living if remote.via_gateway}  # it has connected these
            for host in local:
                is_gateway = gateway is not None and gateway.remote.host == host
                vias = {peer: via for peer, via in through.items() if not (is_gateway and peer in gateway_hosts)}
                requests[host] = self._send_hosts(host, p.Hosts(local, vias, incarnations))
        for remote in living:
            if remote.is_local:
                continue
            host = remote.host
            if remote.dials_only_controller:
                if host not in self._announced or self._announced[host] != remote.incarnation or rejoining is not None:
                    self._announced[host] = remote.incarnation
                    agents = {} if rejoining is None or rejoining is remote else {rejoining.host: rejoining.incarnation}
                    hosts = p.Hosts({}, dict.fromkeys(("", *agents), runtime.address), agents)
                    requests[host] = self._send_hosts(host, hosts)
                continue
            is_gateway = gateway is not None and gateway.remote is remote
            endpoints = {
                peer.host: peer.endpoint
                for peer in living
                if not peer.is_local and (remote.dials(peer) or (is_gateway and peer.via_gateway))
            }
            vias = {peer: runtime.address for peer in (*local, *through) if peer not in endpoints and peer != host}
            endpoints.pop(host, None)
            if gateway is not None and remote.via_gateway:
                vias[gateway.remote.host] = gateway.agent  # which has dialled it
            requests[host] = self._send_hosts(host, p.Hosts(endpoints, vias, incarnations))
        return requests

    def settle(self, hosts: Iterable[str], timeout: float) -> None:
        """Announces routes and waits until these hosts have confirmed, so that messages sent from now on reach them.

        Waits for the other hosts too, but at most a second.
        """
        with self._settle_lock:
            self._settle(hosts, timeout, None)

    def rejoin(self, remote: ExternalHost, timeout: float) -> None:
        """Marks a lost host as present, once it and all connected hosts have confirmed each other's routes."""
        self._send_losses()  # first
        for reclaim in self.reclaims:
            reclaim(remote.host)
        with self._settle_lock:
            self._settle((remote.host,), timeout, remote)
            remote.lost = ""

    def _settle(self, hosts: Iterable[str], timeout: float, rejoining: ExternalHost | None) -> None:
        answers = self.announce(rejoining)
        for host in hosts:
            if host in answers:
                answers.pop(host).get(timeout)
        deadline = time.monotonic() + _PATIENCE_S
        for answer in answers.values():
            answer.exception(max(0.0, deadline - time.monotonic()))  # another host may be unreachable: no matter here

    def announce_lost(self, host: str, reason: str, incarnation: int, loss: int) -> None:
        """Announces the loss of a host to all other agents, and through them to all processes.

        `incarnation` is that of its agent, `loss` the number of the loss. Hosts that are lost together, as with the
        power of a rack, are announced in one message.
        """
        with self._losses_lock:
            first = not self._lost_hosts
            self._lost_hosts[host] = (reason, incarnation, loss)
        if first:
            self._runtime.later(_TOGETHER_S, self._send_losses)
        if self._gateway is not None and self._gateway.remote.host == host:
            for remote in tuple(self.attached.values()):
                if remote.via_gateway:
                    remote.cut()

    def _send_losses(self) -> None:
        with self._losses_lock:
            losses, self._lost_hosts = self._lost_hosts, {}
        if not losses or self._runtime.closed:
            return
        lost = p.HostsLost(
            {host: reason for host, (reason, _, _) in losses.items()},
            {host: incarnation for host, (_, incarnation, _) in losses.items()},
            {host: loss for host, (_, _, loss) in losses.items()},
        )
        attached = tuple(self.attached.values())
        for host in (*self.local, *(remote.host for remote in attached if not remote.lost)):
            if host not in losses:
                with contextlib.suppress(TransportError):  # lost itself a moment ago: the others learn of both
                    self._runtime.post(agent_of(host), verbs.LOST, lost)

    def _send_hosts(self, host: str, hosts: p.Hosts) -> Future[Done]:
        return request(self._runtime, agent_of(host), verbs.HOSTS, hosts)


def is_loopback(endpoint: str) -> bool:
    """Returns whether an endpoint is an address of the machine that dials it."""
    name = split(endpoint)[0]
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"


class HostLosses:
    """Gathers the losses of one job while other hosts of it may be lost too, and reports them together."""

    def __init__(
        self,
        job_of: Callable[[str], str],
        report: Callable[[Mapping[str, int], str], object],
        seconds: float = GATHER_S,
    ) -> None:
        """`job_of` names the job of a host, "" for none. `report` gets agents' incarnations by host, and the reason."""
        self._job_of = job_of
        self._report = report
        self._seconds = seconds
        self._changed = threading.Condition()
        self._uncertain: set[str] = set()
        self._unexplained: set[str] = set()
        self._events: dict[str, _Event] = {}  # by job

    def suspect(self, host: str) -> None:
        """Notes that the connection to a host is cut, or its engine reports its end: it may be lost."""
        with self._changed:
            self._uncertain.add(host)

    def clear(self, host: str) -> None:
        """Notes that a host has returned, or that its loss would be no failure."""
        with self._changed:
            self._uncertain.discard(host)
            self._unexplained.discard(host)
            for event in self._events.values():
                event.reasons.pop(host, None)
            self._changed.notify_all()

    def explain(self, host: str, reason: str) -> None:
        """Replaces the reason of an unreported loss with one from the engine of its job."""
        with self._changed:
            self._unexplained.discard(host)
            for event in self._events.values():
                if host in event.reasons:
                    event.reasons[host] = reason
            self._changed.notify_all()

    def awaits(self, host: str) -> bool:
        """Returns whether its job's engine must check a host: it is unreachable, or its loss is not explained."""
        return host in self._uncertain or host in self._unexplained

    def lost(self, host: str, reason: str, incarnation: int, *, explained: bool = True) -> None:
        """Blocks until the loss of a host is reported, with other losses of the same event.

        A reason that is not `explained` may be replaced meanwhile.
        """
        job = self._job_of(host)
        with self._changed:
            self._uncertain.discard(host)
            if not explained:
                self._unexplained.add(host)
            event = self._events.get(job)
            first = event is None
            if event is None:
                event = self._events[job] = _Event()
            event.reasons[host], event.agents[host] = reason, incarnation
            self._changed.notify_all()
            if first:
                self._changed.wait_for(lambda: not self._expects_more(job), self._seconds)
                del self._events[job]
                self._unexplained.difference_update(event.reasons)
        if not first:
            event.reported.wait()
            return
        try:
            if event.reasons:
                reason = _reason(event.reasons)
                logger.warning("%s lost: %s", hosts_text(tuple(event.reasons)), reason)
                self._report({host: event.agents[host] for host in event.reasons}, reason)
        finally:
            event.reported.set()

    def _expects_more(self, job: str) -> bool:
        return any(self._job_of(host) == job for host in self._uncertain | self._unexplained)


class _Event:
    def __init__(self) -> None:
        self.reasons: dict[str, str] = {}  # by host
        self.agents: dict[str, int] = {}  # their incarnations
        self.reported = threading.Event()


def _reason(reasons: Mapping[str, str]) -> str:
    """Returns the reason of several losses: one text if all are equal, else a line for each of the first few hosts."""
    if len(set(reasons.values())) == 1:
        return next(iter(reasons.values()))
    lines = [f"{host_name(host)}: {reason}" for host, reason in list(reasons.items())[:_QUOTED]]
    more = [f"and {len(reasons) - _QUOTED} more"] if len(reasons) > _QUOTED else []
    return "\n".join(["for several reasons", *(f"  {line}" for line in (*lines, *more))])
