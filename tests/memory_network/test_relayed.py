"""Calls between hosts whose messages were lost with a relay."""

import functools
from typing import Any

import pytest

from monarch_nb.actor import Actor, Channel, Port, ProcMesh, endpoint
from monarch_nb.host import protocol as p
from monarch_nb.host import verbs
from monarch_nb.mesh.handle import state_of
from monarch_nb.routing import BROKEN_EARLY, plan_cast
from monarch_nb.runtime import current_runtime
from monarch_nb.supervision import SupervisionError
from monarch_nb.testing import Cluster
from monarch_nb.wire import agent_of
from monarch_nb.wire.header import Kind

pytestmark = pytest.mark.timeout(60)
HOSTS = 3
SOON = 20.0


def lose(node: Any, kind: Kind, *, to: str = "") -> None:
    """Makes a process lose its next incoming call or cast, or the next answer that it sends `to` an address."""
    handler, send = node._handler, node.send

    def take(header: Any, parcel: Any) -> None:
        if header.kind == kind and kind in (Kind.CALL, Kind.CAST):
            node._handler = handler
            return
        handler(header, parcel)

    def give(header: Any, parcel: Any, **options: Any) -> None:
        if header.kind in (kind, Kind.REPLY) and kind in (Kind.REPLY, Kind.FOLDED) and to in header.dst and header.call:
            node.send = send
            return
        send(header, parcel, **options)

    node._handler, node.send = take, give


class Other(Actor):
    """Is called; loses messages in either direction."""

    def __init__(self) -> None:
        self.ran = 0

    @endpoint
    def lose(self, kind: int) -> None:
        """Loses the next call or the next answer."""
        if kind == Kind.REPLY:
            current_runtime().later(0.0, lambda: lose(current_runtime().node, Kind.REPLY))  # not the answer to this
        else:
            lose(current_runtime().node, Kind.CALL)

    @endpoint
    def step(self) -> int:
        self.ran += 1
        return self.ran

    @endpoint(explicit_response_port=True)
    def later(self, port: Port[int]) -> None:
        self.port = port

    @endpoint
    def now(self) -> None:
        self.port.send(7)


class Caller(Actor):
    """Calls, and sends the outcome to a port."""

    @endpoint
    async def casts(self, peers: Any, outcome: Port[str]) -> None:
        try:
            outcome.send(f"{list((await peers.step.call()).values())}")
        except SupervisionError as error:
            outcome.send(str(error))

    @endpoint
    async def calls(self, peer: Any, name: str, outcome: Port[str]) -> None:
        try:
            outcome.send(f"{await getattr(peer, name).call_one()}")
        except SupervisionError as error:
            outcome.send(str(error))


@pytest.fixture
def procs(simulated: Cluster) -> ProcMesh:
    return simulated.hosts().spawn_procs(name="procs")


@pytest.fixture
def pair(procs: ProcMesh) -> tuple[Any, Any]:
    return procs.slice(hosts=1).spawn("caller", Caller), procs.slice(hosts=2).spawn("other", Other)


def relay_changes(caller: Any) -> None:
    state: Any = state_of(caller).procs
    current_runtime().post(state.address(1), verbs.RELAY_CHANGED, p.RelayChanged("here/gone"))


@pytest.mark.parametrize(("kind", "text", "ran"), [(Kind.CALL, "it has not run", 1), (Kind.REPLY, "it has run", 2)])
def test_a_call_that_is_lost_with_a_relay_is_an_error(
    pair: tuple[Any, Any], simulated: Cluster, kind: Kind, text: str, ran: int
) -> None:
    caller, peer = pair
    port, outcome = Channel[str].open()
    peer.lose.call_one(int(kind)).get(SOON)
    caller.calls.call_one(peer, "step", port)
    simulated.advance(60)  # the loss is not known yet
    relay_changes(caller)
    assert text in outcome.recv().get(SOON)
    assert peer.step.call_one().get(SOON) == ran
    caller.calls.call_one(peer, "step", port)  # nothing waits for the lost message
    assert outcome.recv().get(SOON) == str(ran + 1)


def test_a_call_that_is_answered_later_survives_a_change_of_relays(pair: tuple[Any, Any], simulated: Cluster) -> None:
    caller, peer = pair
    port, outcome = Channel[str].open()
    caller.calls.call_one(peer, "later", port)
    simulated.advance(1)
    relay_changes(caller)
    simulated.advance(30)
    peer.now.call_one().get(SOON)
    assert outcome.recv().get(SOON) == "7"


@pytest.mark.parametrize("below", [False, True])  # whether the agent to which the caller sends waits for another
@pytest.mark.parametrize(("kind", "text", "ran"), [(Kind.CAST, "it has not run", 1), (Kind.FOLDED, "it has run", 2)])
def test_a_cast_that_is_lost_with_a_relay_fails(
    simulated: Cluster, monkeypatch: pytest.MonkeyPatch, below: bool, kind: Kind, text: str, ran: int
) -> None:
    if below:
        monkeypatch.setattr("monarch_nb.mesh.sending.plan_cast", functools.partial(plan_cast, fanout=1))
    procs = simulated.hosts().spawn_procs(name="procs")
    caller, peers = procs.slice(hosts=0).spawn("caller", Caller), procs.slice(hosts=slice(1, 3)).spawn("others", Other)
    port, outcome = Channel[str].open()
    assert list(peers.step.call().get(SOON).values()) == [1, 1]
    state: Any = state_of(procs)
    agents = {host: simulated._hosts[host] for host in state.layout.hosts}
    agent = agents[state.layout.hosts[2]]
    lose(agent.node, kind)
    caller.casts.call_one(peers, port)
    simulated.advance(60)
    for host in agents:
        current_runtime().post(agent_of(host), verbs.RELAY_CHANGED, p.RelayChanged("here/gone"))
    assert text in outcome.recv().get(SOON)
    assert list(peers.step.call().get(SOON).values()) == [3, ran + 1]
    caller.casts.call_one(peers, port)
    assert outcome.recv().get(SOON) == str([4, ran + 2])


@pytest.mark.parametrize("dies", [True, False])
def test_a_message_that_ended_its_receiver_fails_with_the_end(simulated: Cluster, dies: bool) -> None:
    procs = simulated.hosts().spawn_procs(name="procs").slice(hosts=1)
    peer = procs.spawn("other", Other)
    assert peer.step.call_one().get(SOON) == 1
    future = peer.later.call_one()
    simulated.advance(1)
    runtime: Any = current_runtime()
    [call] = [call for call in runtime.calls.values() if call.title == "other.later"]
    runtime.undelivered(call.sent[0], BROKEN_EARLY)
    simulated.advance(0.5)
    assert not future.done()
    if dies:
        simulated.kill(procs)
    simulated.advance(2)
    with pytest.raises(SupervisionError, match="SIGKILL|sig=9" if dies else BROKEN_EARLY):
        future.get(SOON)
