"""Channels: ports that travel, receivers that stay."""

import asyncio
import signal
import threading
import time
from itertools import starmap
from typing import Any

import pytest

from monarch_nb.actor import Actor, ActorError, Channel, Port, ProcMesh, SupervisionError, endpoint, send
from monarch_nb.runtime import current_runtime, waiting
from monarch_nb.wire import Folded, Header, Kind, encode, fold
from tests.cluster.actor_tools import SECONDS, Faults

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("faults")]


class Sender(Actor):
    def __init__(self) -> None:
        self.undelivered: list[str] = []

    @endpoint
    def send(self, port: Port[Any], values: list[Any]) -> None:
        for value in values:
            port.send(value)

    @endpoint
    def hand_on(self, peer: Any, port: Port[Any]) -> None:
        peer.send.call_one(port, ["by another"]).get(20)

    @endpoint
    def hold(self, started: Port[None]) -> None:
        started.send(None)
        Channel[None].open()[1].recv().get(60)

    @endpoint(explicit_response_port=True)
    def forward(self, port: Port[Any], peer: Any, started: Port[None]) -> None:
        send(peer.hold, (started,), {}, port)

    @endpoint
    def seen(self) -> list[str]:
        return self.undelivered

    def _handle_undeliverable_message(self, message: Any) -> bool:
        self.undelivered.append(message.destination)
        return True


@pytest.fixture(scope="module")
def senders(quad: ProcMesh) -> Any:
    return quad.spawn("senders", Sender)


def test_values_arrive_in_order_from_another_process(senders: Any) -> None:
    port, receiver = Channel[int].open()
    senders.slice(gpus=0).send.call_one(port, list(range(200))).get(20)
    assert [receiver.recv().get(20) for _ in range(200)] == list(range(200))


def test_a_receive_nobody_looks_at_claims_nothing(senders: Any) -> None:
    port, receiver = Channel[str].open()
    first, second, third = receiver.recv(), receiver.recv(), receiver.recv()
    for value in "abc":
        port.send(value)
    assert third.get(20) == "a"
    assert first.get(20) == "b"
    assert third.get(20) == "a"
    del second
    assert receiver.recv().get(20) == "c"


def test_receives_are_served_in_the_order_they_were_observed(senders: Any) -> None:
    port, receiver = Channel[str].open()
    first, second = receiver.recv(), receiver.recv()

    async def main() -> None:
        tasks = [asyncio.create_task(_await(future)) for future in (second, first)]
        await asyncio.sleep(0.01)
        port.send("a")
        port.send("b")
        assert await asyncio.gather(*tasks) == ["a", "b"]

    asyncio.run(main())


async def _await(future: Any) -> Any:
    return await future


def test_a_receive_that_was_given_up_does_not_eat_a_value() -> None:
    port, receiver = Channel[str].open()
    errors = []
    for wait in (receiver.recv().get, receiver.recv().exception):
        try:
            errors.append(wait(0.01))
        except TimeoutError as error:
            errors.append(error)  # its frames stay, as in an `except` block
        del wait
    assert [type(error) for error in errors] == [TimeoutError] * 2
    future = receiver.recv()
    with pytest.raises(TimeoutError):
        future.get(0.01)
    port.send("a")
    port.send("b")
    assert receiver.recv().get(20) == "b"
    assert future.get(20) == "a"


def test_a_receive_whose_only_waiter_was_ended_claims_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    port, receiver = Channel[str].open()
    stopped, cancelled = receiver.recv(), receiver.recv()
    with monkeypatch.context() as patch:
        patch.setattr(waiting.observers, "tick", (lambda *_: signal.raise_signal(signal.SIGINT),))
        with pytest.raises(KeyboardInterrupt):
            stopped.get()

    async def main() -> str:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(cancelled, 0.01)
        port.send("a")
        return await receiver.recv()

    assert asyncio.run(main()) == "a"
    port.send("b")
    port.send("c")
    assert [cancelled.get(20), stopped.get(20)] == ["b", "c"]


def test_receives_that_were_given_up_take_no_memory() -> None:
    _, receiver = Channel[str].open()
    for _ in range(200):
        with pytest.raises(TimeoutError):
            receiver.recv().get(0)
    assert len(receiver._queue._claims) < 40


def test_a_port_goes_from_hand_to_hand(senders: Any) -> None:
    port, receiver = Channel[str].open()
    senders.slice(gpus=0).hand_on.call_one(senders.slice(gpus=1), port).get(20)
    assert receiver.recv().get(20) == "by another"


def count_returned(sender: Any, count: int) -> int:
    """The number of values returned to their sender, once there are `count`; they take their own route."""
    deadline = time.monotonic() + SECONDS
    while len(values := sender.seen.call_one().get(20)) < count:
        assert time.monotonic() < deadline, values
        time.sleep(0.005)
    return len(values)


def test_a_port_for_one_value_takes_one_value(senders: Any) -> None:
    port, receiver = Channel[int].open(once=True)
    sender = senders.slice(gpus=0)
    sender.send.call_one(port, [1]).get(20)
    assert receiver.recv().get(20) == 1
    before = len(sender.seen.call_one().get(20))
    sender.send.call_one(port, [2]).get(20)  # another copy of it, unused
    with pytest.raises(ValueError, match="received already"):
        receiver.recv().get(20)
    assert count_returned(sender, before + 1) == before + 1
    with pytest.raises(ActorError, match="has been used"):
        sender.send.call_one(port, [3, 4]).get(20)


def test_a_used_port_for_one_value_refuses_more_wherever_it_goes(senders: Any) -> None:
    port, receiver = Channel[int].open(once=True)
    futures = [receiver.recv(), receiver.recv()]
    with pytest.raises(TimeoutError):
        futures[0].get(0)
    with pytest.raises(TimeoutError):
        futures[1].get(0)
    with pytest.raises(TypeError, match=r"the `value` for a port cannot be sent: .*cannot pickle"):
        port.send(threading.Lock())  # type: ignore[arg-type]
    port.send(1)
    for use in (port.send, lambda value: port.exception(ValueError(value))):
        with pytest.raises(RuntimeError, match="takes one value"):
            use(2)
    with pytest.raises(ActorError, match="takes one value"):
        senders.slice(gpus=0).send.call_one(port, [3]).get(20)
    assert futures[0].get(20) == 1
    with pytest.raises(ValueError, match="takes one value"):
        futures[1].get(20)


def test_only_an_exception_is_sent_as_one() -> None:
    port, receiver = Channel[int].open()
    with pytest.raises(TypeError, match="not str"):
        port.exception("x")  # type: ignore[arg-type]
    port.exception(ValueError("boom"))
    with pytest.raises(ValueError, match="boom"):
        receiver.recv().get(20)


def test_a_value_for_a_closed_receiver_returns_to_its_sender(senders: Any) -> None:
    port, receiver = Channel[int].open()
    del receiver
    sender = senders.slice(gpus=1)
    before = len(sender.seen.call_one().get(20))
    sender.send.call_one(port, [1]).get(20)
    sender.send.call_one(port, [1]).get(20)
    assert count_returned(sender, before + 2) == before + 2
    port.return_undeliverable = False
    sender.send.call_one(port, [1]).get(20)
    sender.send.call_one(port, [1]).get(20)
    assert len(sender.seen.call_one().get(20)) == before + 2


def test_many_threads_may_send_and_receive() -> None:
    port, receiver = Channel[int].open()
    values: list[int] = []
    senders = [threading.Thread(target=lambda n=n: [port.send(n) for _ in range(100)]) for n in range(4)]
    takers = [
        threading.Thread(target=lambda: values.extend(receiver.recv().get(20) for _ in range(100))) for _ in range(4)
    ]
    for thread in (*senders, *takers):
        thread.start()
    for thread in (*senders, *takers):
        thread.join(30)
    assert sorted(values) == sorted(n for n in range(4) for _ in range(100))


def test_a_receiver_does_not_travel(senders: Any) -> None:
    _, receiver = Channel[int].open()
    with pytest.raises(TypeError, match="send its Port"):
        senders.send.call(receiver, [])


def test_answers_that_an_agent_folded_arrive_one_by_one() -> None:
    port, receiver = Channel[str].open_ranked()
    runtime = current_runtime()
    answers = [(Header(Kind.REPLY, "", "", index=rank), encode(f"of {rank}", runtime)) for rank in range(3)]
    handler = runtime.ports.get(port._number)
    assert handler is not None
    header = Header(Kind.FOLDED, runtime.address, "", port=port._number)
    handler.arrive(header, runtime.node.snapshot(fold(starmap(Folded.of, answers))))
    assert [receiver.recv().get(20) for _ in range(3)] == [(rank, f"of {rank}") for rank in range(3)]


def test_a_port_gets_the_error_of_a_rank_that_dies(own_procs: ProcMesh, kill: Any, faults: Faults) -> None:
    peers: Any = own_procs.spawn("peers", Sender)
    forwarder: Any = own_procs.slice(gpus=0).spawn("forwarder", Sender)
    port, receiver = Channel[None].open_ranked()
    begun, started = Channel[None].open()
    send(peers.hold, (begun,), {}, port)
    forwarded = forwarder.forward.call_one(peers.slice(gpus=1), begun)
    for _ in range(2):
        started.recv().get(20)
    kill(own_procs.slice(gpus=1))
    with pytest.raises(SupervisionError, match="gpus=1"):
        receiver.recv().get(20)
    with pytest.raises(ActorError, match="gpus=1"):
        forwarded.get(20)
    faults.next()
