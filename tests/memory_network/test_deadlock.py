"""A circle of actors that wait for each other ends with an error that names them."""

import time
from typing import Any

import pytest

from monarch_nb.actor import Actor, ActorError, Channel, Port, ProcMesh, concurrent_endpoint, endpoint

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("faults")]


class Caller(Actor):
    def __init__(self) -> None:
        self.future: Any = None

    @endpoint
    def through(self, callers: list[Any], target: Any) -> str:
        """Calls the first of `callers` with the rest; the last one calls `target`."""
        if callers:
            return str(callers[0].through.call_one(callers[1:], target).get())
        return str(target.ping.call_one().get())

    @endpoint
    def ping(self) -> str:
        return "pong"

    @endpoint
    def begin(self, peer: Any) -> None:
        """Sends and does not wait."""
        self.future = peer.ping.call_one()

    @endpoint
    def finish(self) -> str:
        return str(self.future.get())

    @endpoint
    def begin_at_and_nap(self, peer: Any, caller: Any, seconds: float, begun: Port[None]) -> str:
        peer.begin.call_one(caller).get()
        begun.send(None)
        time.sleep(seconds)
        return "rested"

    @endpoint
    def ask_when_told(self, port: Port[Port[None]], peer: Any) -> str:
        """Asks once all participants have begun."""
        key, receiver = Channel[None].open()
        port.send(key)
        receiver.recv().get(20)
        return str(peer.ping.call_one().get())

    @endpoint
    def patiently(self, peer: Any, caller: Any) -> str:
        return str(peer.with_timeout.call_one(caller).get())

    @endpoint
    def with_timeout(self, peer: Any) -> str:
        try:
            return str(peer.ping.call_one().get(0.3))
        except TimeoutError:
            return "gave up"


class AsyncCaller(Actor):
    @endpoint
    async def through(self, callers: list[Any], target: Any) -> str:
        if callers:
            return str(await callers[0].through.call_one(callers[1:], target))
        return str(await target.ping.call_one())

    @endpoint
    async def ping(self) -> str:
        return "pong"


class ConcurrentCaller(AsyncCaller):
    through = concurrent_endpoint(AsyncCaller.through._method)  # type: ignore[attr-defined]


@pytest.mark.parametrize("cls", [Caller, AsyncCaller])
@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_circle_is_told_and_names_those_in_it(quad: ProcMesh, cls: Any, length: int) -> None:
    names = ["alice", "bob", "carol"][:length]
    actors: list[Any] = [quad.slice(gpus=n).spawn(name, cls) for n, name in enumerate(names)]
    with pytest.raises(ActorError) as caught:
        actors[0].through.call_one(actors[1:], actors[0]).get(20)
    text = str(caught.value)
    assert "DeadlockError" in text
    assert all(name in text for name in names)
    for actor in actors:
        assert actor.ping.call_one().get(20) == "pong"


def test_concurrent_endpoints_may_go_in_circles(quad: ProcMesh) -> None:
    actors: list[Any] = [quad.slice(gpus=n).spawn(f"c{n}", ConcurrentCaller) for n in range(2)]
    assert actors[0].through.call_one(actors[1:], actors[0]).get(20) == "pong"


def test_a_call_that_is_not_waited_for_makes_no_circle(quad: ProcMesh) -> None:
    alice, bob = (quad.slice(gpus=n).spawn(name, Caller) for n, name in enumerate(("alice", "bob")))
    a: Any = alice
    b: Any = bob
    begun, receiver = Channel[None].open()
    call = a.begin_at_and_nap.call_one(b, a, 0.5, begun)  # bob's call to alice waits while she rests
    receiver.recv().get(20)
    assert b.finish.call_one().get(20) == "pong"
    assert call.get(20) == "rested"


def test_a_wait_with_a_time_limit_is_no_deadlock(quad: ProcMesh) -> None:
    a: Any = quad.slice(gpus=0).spawn("alice", Caller)
    b: Any = quad.slice(gpus=1).spawn("bob", Caller)
    assert a.patiently.call_one(b, a).get(20) == "gave up"


def test_actors_that_wait_for_themselves_fail_at_once_despite_a_timeout(quad: ProcMesh) -> None:
    a: Any = quad.slice(gpus=0).spawn("alice", Caller)
    with pytest.raises(ActorError) as caught:  # with_timeout would have caught a TimeoutError
        a.with_timeout.call_one(a).get(20)
    text = str(caught.value)
    assert "DeadlockError: deadlock: alice.with_timeout waits for alice.ping, which cannot run before" in text
    assert a.ping.call_one().get(20) == "pong"
    many: Any = quad.spawn("many", Caller)
    with pytest.raises(ActorError, match="DeadlockError"):
        many.slice(gpus=2).with_timeout.call_one(many.slice(gpus=2)).get(20)


def test_a_circle_through_actors_of_one_process_is_told(quad: ProcMesh) -> None:
    procs = quad.slice(gpus=3)
    actors: list[Any] = [procs.spawn(name, Caller) for name in ("alice", "bob")]
    with pytest.raises(ActorError, match="DeadlockError"):
        actors[0].through.call_one(actors[1:], actors[0]).get(20)


def call_at_once(pairs: list[tuple[Any, Any]]) -> list[Any]:
    """Each first actor asks its second, when all are busy."""
    port, receiver = Channel[Port[None]].open()
    calls = [caller.ask_when_told.call_one(port, target) for caller, target in pairs]
    for go in [receiver.recv().get(20) for _ in pairs]:
        go.send(None)
    return [call.exception(20) for call in calls]


def test_neighbours_that_all_call_each_other_are_told(quad: ProcMesh) -> None:
    ring: Any = quad.spawn("ring", Caller)
    outcomes = call_at_once([(ring.slice(gpus=n), ring.slice(gpus=(n + 1) % 4)) for n in range(4)])
    errors = [outcome for outcome in outcomes if outcome is not None]
    assert len(errors) == 1
    assert "DeadlockError" in str(errors[0])
    assert str(errors[0]).count(" waits for ring.ping") >= 4
    assert ring.ping.call().get(20).values() == ["pong"] * 4


def test_two_independent_calls_can_make_a_circle(quad: ProcMesh) -> None:
    a: Any = quad.slice(gpus=0).spawn("alice", Caller)
    b: Any = quad.slice(gpus=1).spawn("bob", Caller)
    outcomes = call_at_once([(a, b), (b, a)])
    assert sum("DeadlockError" in str(outcome) for outcome in outcomes) == 1
    assert outcomes.count(None) == 1
