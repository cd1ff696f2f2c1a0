"""An agent as a gateway: it leads controllers to hosts that only it can dial, and those back to them."""

import threading
from collections.abc import Callable

from monarch_nb.host import protocol as p
from monarch_nb.host import verbs
from monarch_nb.host.introduction import introduce
from monarch_nb.host.sender import AgentSender
from monarch_nb.transport import Keys, Node, TransportError, knock
from monarch_nb.wire import Asker, agent_of, host_of

_KNOCK_S = 1.0


class Gateway:
    """Which hosts each controller reaches through this agent. On the loop's thread, unless said otherwise."""

    def __init__(self, node: Node, sender: AgentSender, keys: Keys | None, insecure_loopback: bool,
                 soon: Callable[[Callable[[], None]], None]) -> None:  # fmt: skip
        self._node = node
        self._sender = sender
        self._keys = keys
        self._insecure = insecure_loopback
        self._soon = soon
        self._behind: dict[str, set[str]] = {}

    def introduce(self, request: p.Introduce, asker: Asker[p.Introduced]) -> None:
        """Finds out who answers at an endpoint, on a thread of its own; who asked is answered then."""

        def look() -> None:
            introduced = self._look(asker.src, request)
            self._soon(lambda: self._found(asker, request.endpoint, introduced))

        threading.Thread(target=look, name="monarch-introduce", daemon=True).start()

    def _look(self, asker: str, request: p.Introduce) -> p.Introduced:
        back = p.Hosts({}, {asker: self._sender.address})
        try:
            [answer] = introduce([request.endpoint], self._keys, insecure_loopback=self._insecure,
                                timeout=request.timeout_s, ways=back)  # fmt: skip
        except (TransportError, ValueError) as error:
            return p.Introduced(error=str(error))
        if isinstance(answer, p.HostState):
            return p.Introduced(answer)
        return p.Introduced(error=str(answer), nobody=knock(request.endpoint, _KNOCK_S) is False)

    def _found(self, asker: Asker[p.Introduced], endpoint: str, introduced: p.Introduced) -> None:
        if introduced.state is not None:
            self._node.learn(introduced.state.host, endpoint, incarnation=introduced.state.incarnation)
            self._behind.setdefault(asker.src, set()).add(introduced.state.host)
        asker.reply(introduced)

    def cut(self, host: str, word: str) -> None:
        """The connection to a host is gone: who reaches it through here may want to know."""
        for controller, hosts in self._behind.items():
            if host in hosts:
                self._sender.post(controller, verbs.HOST_CUT, p.Lost({host: word}))

    def gone(self, controller: str, why: str) -> None:
        """A controller has left or is gone: to the hosts behind, this agent still is there, so they must be told."""
        for host in self._behind.pop(controller, ()):
            self._sender.post(agent_of(host), verbs.LOST, p.Lost({host_of(controller): why}))
