"""Hosts that this process cannot dial, reached through a gateway: a host whose agent dials them."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from monarch_nb.connect.remote_host import RemoteHost
from monarch_nb.connect.routes import ExternalHost, HostRoutes, Tunnel
from monarch_nb.host import protocol as p
from monarch_nb.host import verbs
from monarch_nb.host.introduction import IntroductionResult
from monarch_nb.mesh.requests import request
from monarch_nb.runtime import Future, Runtime
from monarch_nb.transport import Keys, UnreachableError
from monarch_nb.wire import Asker, Done, agent_of

_MARGIN_S = 5.0  # for the gateway's reply, beyond the time-out of its own attempt
_ASK_S = 0.5  # for a connection; an answer on it may take longer


class Gateway:
    """A host whose agent dials others for this process."""

    def __init__(self, runtime: Runtime, remote: ExternalHost, address: str) -> None:
        self.remote = remote
        self.agent = agent_of(remote.host)
        self.address = address  # as given by the user
        self._runtime = runtime
        if verbs.HOST_CUT.name not in runtime.verbs:
            runtime.verbs.handle(verbs.HOST_CUT, self._cut)

    def _cut(self, lost: p.HostsLost, asker: Asker[None]) -> None:
        """Handles that the gateway has lost its connection to hosts; reading thread."""
        for host in lost.hosts:
            remote = self._runtime.part(HostRoutes).attached.get(host)
            if remote is not None and remote.via_gateway:
                remote.cut()

    @property
    def up(self) -> bool:
        """True while it is connected."""
        return not self.remote.lost and (self.remote.is_local or self._runtime.node.connected(self.agent))

    def ask(self, endpoint: str, timeout: float) -> p.IntroduceReply:
        """Has the gateway connect to an endpoint and returns its reply. Blocks."""
        question = p.Introduce(endpoint, timeout)
        try:
            return request(self._runtime, self.agent, verbs.INTRODUCE, question).get(timeout + _MARGIN_S)
        except (TimeoutError, RuntimeError) as error:
            return p.IntroduceReply(error=f"the gateway {self.address} cannot find out who is at {endpoint}: {error}")

    def introduce(self, endpoints: Sequence[str], timeout: float) -> list[IntroductionResult]:
        """Returns the host, or the error, at each endpoint; blocks."""
        if not endpoints:
            return []

        def ask(endpoint: str) -> IntroductionResult:
            answer = self.ask(endpoint, timeout)
            return answer.state or UnreachableError(f"{answer.error} (asked by the gateway {self.address})")

        with ThreadPoolExecutor(min(32, len(endpoints)), "monarch-gateway") as pool:
            return list(pool.map(ask, endpoints))


class GatewayHost(RemoteHost):
    """A host behind a gateway; `endpoint` is where the gateway dials it."""

    via_gateway = True

    def __init__(self, runtime: Runtime, endpoint: str, state: p.HostState, gateway: Gateway, lease: float | None,
                 ) -> None:  # fmt: skip
        super().__init__(runtime, endpoint, state, gateway.remote.keys, False, lease)
        self.gateway = gateway
        self._answer: p.IntroduceReply | None = None  # the gateway's last answer

    def is_still(self, endpoint: str, incarnation: int, keys: Keys | None) -> bool:
        """Returns whether it is the same healthy host; the key is the gateway's own."""
        return (
            super().is_still(endpoint, incarnation, self.keys) and self.runtime.part(HostRoutes).gateway is self.gateway
        )

    def dials(self, other: ExternalHost) -> bool:
        """Returns whether this host's agent can dial the other one: assumed for hosts behind the same gateway."""
        return isinstance(other, GatewayHost) and super().dials(other)

    def join(self) -> Future[Done]:
        """Makes it reachable from this process. Resolves when the agent has accepted the lease."""
        self.runtime.node.learn(self.host, via=self.gateway.agent, incarnation=self.incarnation)
        return request(self.runtime, self._agent, verbs.LEASE, p.OwnerLease(seconds=self.lease))

    @property
    def _tunnel(self) -> Tunnel | None:
        return None  # the gateway dials its endpoint

    def _connected(self) -> bool:
        return self.gateway.up

    @property
    def _vouched(self) -> bool:
        return False  # the gateway's presence proves nothing about the host

    def _knock(self) -> bool | None:
        if not self.gateway.up:
            return None
        answer = self._answer or self.gateway.ask(self.endpoint, _ASK_S)
        self._answer = None
        return True if answer.state is not None else False if answer.nobody else None

    def _ask(self) -> p.HostState | None:
        answer = self._answer = self.gateway.ask(self.endpoint, _ASK_S)
        return answer.state

    def _route_lost(self) -> str:
        return f"the gateway {self.gateway.address} to it is lost" if self.gateway.remote.lost else ""
