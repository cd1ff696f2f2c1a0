"""Section 1.6: ports and channels. The rest: tests/memory_network/test_ports.py."""

import asyncio
import pickle
from typing import Any

import pytest

from monarch.actor import (
    Actor,
    ActorError,
    Channel,
    Port,
    PortReceiver,
    ProcMesh,
    UndeliverableMessageEnvelope,
    current_rank,
    endpoint,
    send,
)

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("faults")]


class Sender(Actor):
    @endpoint
    async def send_rank(self, port: Port[Any]) -> None:
        port.send(current_rank().rank)

    @endpoint
    async def rank(self) -> int:
        return current_rank().rank + 10

    @endpoint
    async def fail(self) -> None:
        raise ValueError("no")

    @endpoint
    async def relay(self, port: Port[Any], failing: Any) -> None:
        try:
            await failing.fail.call_one()
        except ActorError as error:
            port.exception(error)


class Minder(Actor):
    """Reports its undeliverable messages."""

    def __init__(self, reports: Port[tuple[str, str, str]]) -> None:
        self.reports = reports

    @endpoint
    async def fill(self, port: Port[int]) -> None:
        port.send(1)

    async def _handle_undeliverable_message(self, message: UndeliverableMessageEnvelope) -> bool:
        self.reports.send((str(message.sender()), str(message.dest()), message.error_msg()))
        return True


class Proxy(Actor):
    """Lets other actors answer in its place."""

    @endpoint(explicit_response_port=True)
    async def ask(self, port: Port[Any], sender: Any) -> None:
        send(sender.rank, (), {}, port=port)

    @endpoint(explicit_response_port=True)
    async def ask_for_trouble(self, port: Port[Any], sender: Any) -> None:
        send(sender.fail, (), {}, port=port)

    @endpoint
    async def answer_to(self, port: Port[Any], senders: Any) -> None:
        send(senders.rank, (), {}, port=port)


def test_a_channel_is_a_port_and_its_receiver() -> None:
    port, receiver = Channel[int].open()
    assert isinstance(port, Port)
    assert isinstance(receiver, PortReceiver)
    assert port.return_undeliverable is True
    port.send(1)
    assert asyncio.run(_receive(receiver)) == 1


async def _receive(receiver: Any) -> Any:
    return await receiver.recv()


def test_any_receiver_can_be_made_ranked(quad: ProcMesh) -> None:
    port, receiver = Channel[int].open()
    quad.spawn("senders", Sender).send_rank.broadcast(port)
    ranked = receiver.ranked()
    assert sorted(ranked.recv().get(20) for _ in range(4)) == [(rank, rank) for rank in range(4)]


def test_an_error_that_is_sent_on_is_raised_as_it_is(quad: ProcMesh) -> None:
    port, receiver = Channel[Any].open(once=True)
    actors = quad.spawn("senders", Sender)
    actors.slice(gpus=0).relay.broadcast(port, actors.slice(gpus=1))
    with pytest.raises(ActorError, match="no"):
        receiver.recv().get(20)


def test_a_port_is_pickled_with_what_it_was_told() -> None:
    port, receiver = Channel[int].open()
    port.return_undeliverable = False
    copy = pickle.loads(pickle.dumps(port))
    assert copy.return_undeliverable is False
    copy.send(3)
    assert receiver.recv().get(20) == 3


def test_an_undeliverable_message_names_sender_destination_and_reason(quad: ProcMesh) -> None:
    reports, receiver = Channel[tuple[str, str, str]].open()
    orphan, _ = Channel[int].open()
    del _
    quad.slice(gpus=1).spawn("minder", Minder, reports).fill.call_one(orphan).get(20)
    sender, dest, error = receiver.recv().get(20)
    assert "minder" in sender
    assert repr(orphan).endswith(f" of {dest}>")
    assert "nothing receives" in error


def test_another_actor_may_answer_a_call(quad: ProcMesh) -> None:
    senders, proxies = quad.spawn("senders", Sender), quad.spawn("proxies", Proxy)
    assert list(proxies.ask.call(senders.slice(gpus=2)).get(20).values()) == [10] * 4
    with pytest.raises(ActorError, match="no"):
        proxies.slice(gpus=1).ask_for_trouble.call_one(senders.slice(gpus=3)).get(20)
    assert senders.slice(gpus=3).rank.call_one().get(20) == 10


def test_the_port_of_another_process_takes_answers(quad: ProcMesh) -> None:
    port, receiver = Channel[int].open_ranked()
    proxy = quad.slice(gpus=0).spawn("proxy", Proxy)
    proxy.answer_to.broadcast(port, quad.spawn("senders", Sender))
    assert sorted(receiver.recv().get(20) for _ in range(4)) == [(rank, rank + 10) for rank in range(4)]
