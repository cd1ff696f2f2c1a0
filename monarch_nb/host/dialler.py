"""An agent that dials its controller, where nobody can dial the agent."""

import logging
import threading
from collections.abc import Callable

from monarch_nb.host import protocol as p
from monarch_nb.host import verbs
from monarch_nb.host.introduction import ask_controller
from monarch_nb.host.sender import AgentSender
from monarch_nb.transport import Keys, Node, TransportError

log = logging.getLogger(__name__)

_PAUSE_S = 0.5  # between attempts; grows to
_PAUSE_MAX_S = 5.0
_ASK_S = 2.0


class Dialler:
    """Finds the controller at an endpoint and joins it; another one that takes its place is joined in turn."""

    def __init__(self, node: Node, sender: AgentSender, endpoint: str, keys: Keys | None, insecure_loopback: bool,
                 state: Callable[[], p.HostState], soon: Callable[[Callable[[], None]], None]) -> None:  # fmt: skip
        self._node = node
        self._sender = sender
        self._endpoint = endpoint
        self._keys = keys
        self._insecure = insecure_loopback
        self._state = state
        self._soon = soon
        self._controller = ""
        self._cut = threading.Event()

    def start(self) -> None:
        """Dials from now on, on a thread of its own."""
        threading.Thread(target=self._run, name="monarch-dial", daemon=True).start()

    def cut(self, address: str) -> None:
        """A connection is gone; any thread."""
        if address == self._controller:
            self._cut.set()

    def _run(self) -> None:
        pause = _PAUSE_S
        while True:
            try:
                controller = ask_controller(self._endpoint, self._keys, self._state(), insecure_loopback=self._insecure,
                                     timeout=_ASK_S)  # fmt: skip
                wrong = controller.error
            except TransportError as error:
                controller, wrong = p.Who(), str(error)
            if wrong:
                log.info("no controller to join: %s", wrong)
                self._cut.wait(pause)
                pause = min(_PAUSE_MAX_S, 1.5 * pause)
                continue
            pause = _PAUSE_S
            self._cut.clear()
            self._join(controller.address)
            self._cut.wait()

    def _join(self, address: str) -> None:
        if self._controller not in ("", address):
            self._node.forget(self._controller, "another controller has taken its place")
        self._controller = address
        self._node.learn(address, self._endpoint)
        self._soon(lambda: self._say(address))

    def _say(self, address: str) -> None:
        self._sender.tell(address, verbs.HOST_JOINS, self._state())
