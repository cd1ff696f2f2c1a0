"""An agent as a gateway: it connects controllers with hosts that only it can dial."""

import threading
from collections.abc import Callable

from monarch_nb.host import protocol as p
from monarch_nb.host import verbs
from monarch_nb.host.introduction import introduce
from monarch_nb.host.key_change import AgentKeys
from monarch_nb.host.sender import AgentSender
from monarch_nb.transport import Node, TransportError, TrustError, knock
from monarch_nb.wire import Asker, agent_of, host_of

_KNOCK_S = 1.0


class GatewayService:
    """The hosts that each controller reaches through this agent. On the loop's thread, unless said otherwise."""

    def __init__(self, node: Node, sender: AgentSender, keys: AgentKeys, insecure_loopback: bool,
                 soon: Callable[[Callable[[], None]], None]) -> None:  # fmt: skip
        self._node = node
        self._sender = sender
        self._keys = keys
        self._insecure = insecure_loopback
        self._soon = soon
        self._hosts: dict[str, set[str]] = {}

    def introduce(self, request: p.Introduce, asker: Asker[p.IntroduceReply]) -> None:
        """Finds the host at an endpoint, on a separate thread, and replies then."""

        def run() -> None:
            introduced = self._introduce(asker.src, request)
            self._soon(lambda: self._reply(asker, request.endpoint, introduced))

        threading.Thread(target=run, name="monarch-introduce", daemon=True).start()

    def _introduce(self, asker: str, request: p.Introduce) -> p.IntroduceReply:
        routes = p.Hosts({}, {asker: self._sender.address})
        try:
            for keys in self._keys.candidates:
                [answer] = introduce([request.endpoint], keys, insecure_loopback=self._insecure,
                                    timeout=request.timeout_s, ways=routes)  # fmt: skip
                if not isinstance(answer, TrustError):
                    break
        except (TransportError, ValueError) as error:
            return p.IntroduceReply(error=str(error))
        if isinstance(answer, p.HostState):
            return p.IntroduceReply(answer)
        return p.IntroduceReply(error=str(answer), nobody=knock(request.endpoint, _KNOCK_S) is False)

    def _reply(self, asker: Asker[p.IntroduceReply], endpoint: str, introduced: p.IntroduceReply) -> None:
        if introduced.state is not None and introduced.state.host != self._node.host:
            self._node.learn(introduced.state.host, endpoint, incarnation=introduced.state.incarnation)
            self._hosts.setdefault(asker.src, set()).add(introduced.state.host)
        asker.reply(introduced)

    def cut(self, host: str, reason: str) -> None:
        """Reports a broken connection to a host to the controllers that reach it through this agent."""
        for controller, hosts in self._hosts.items():
            if host in hosts:
                self._sender.post(controller, verbs.HOST_CUT, p.HostsLost({host: reason}))

    def controller_ended(self, controller: str, reason: str) -> None:
        """Reports a controller's end to the hosts behind, for which this agent's connection hides it."""
        for host in self._hosts.pop(controller, ()):
            self._sender.post(agent_of(host), verbs.LOST, p.HostsLost({host_of(controller): reason}))
