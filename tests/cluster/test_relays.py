"""Agents tell their processes which agents relay messages between hosts."""

from typing import Any

import pytest

from monarch_nb.actor import Actor, Channel, Port, ProcMesh, endpoint
from monarch_nb.host import protocol as p
from monarch_nb.host import verbs
from monarch_nb.mesh.handle import state_of
from monarch_nb.mesh.requests import request
from monarch_nb.runtime import current_runtime
from monarch_nb.wire import agent_of
from tests.cluster.actor_tools import quad

__all__ = ["quad"]
pytestmark = pytest.mark.timeout(60)
SOON = 20.0


class Listener(Actor):
    @endpoint
    def listen(self, relays: Port[str]) -> None:
        registry = current_runtime().verbs
        registry.release(verbs.RELAY_CHANGED)
        registry.handle(verbs.RELAY_CHANGED, lambda changed, asker: relays.send(changed.relay))


def test_processes_hear_of_a_relay_that_another_replaces(quad: ProcMesh) -> None:
    port, relays = Channel[str].open()
    state: Any = state_of(quad)
    quad.spawn("listeners", Listener).listen.call(port).get(SOON)
    for relay in ("one/c1.0.0", "one/c1.0.0", "two/c2.0.0"):
        hosts = p.Hosts({}, {"elsewhere": relay})
        request(current_runtime(), agent_of(state.layout.hosts[0]), verbs.HOSTS, hosts).get(SOON)
    assert [relays.recv().get(SOON) for _ in range(4)] == ["one/c1.0.0"] * 4
    with pytest.raises(TimeoutError):
        relays.recv().get(0.1)
