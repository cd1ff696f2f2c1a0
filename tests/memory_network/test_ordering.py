"""Messages of one sender to one actor arrive in the order they were sent, whichever way they took."""

import threading
import time
from typing import Any

import pytest

from monarch_nb.actor import Actor, Channel, Port, ProcMesh, endpoint, this_proc
from tests.cluster.actor_tools import SECONDS

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("faults")]


class Log(Actor):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    @endpoint
    def note(self, x: Any) -> int:
        self.seen.append(x)
        return len(self.seen)

    @endpoint
    def take(self) -> list[Any]:
        seen, self.seen = self.seen, []
        return seen

    @endpoint
    def size_of(self, x: bytes) -> None:
        self.seen.append(len(x))

    @endpoint
    def flood(self, mesh: Any, me: int, count: int) -> None:
        for n in range(count):
            mesh.note.broadcast((me, n))


@pytest.fixture(scope="module")
def logs(quad: ProcMesh) -> Any:
    return quad.spawn("logs", Log)


def test_broadcasts_and_calls_of_one_sender_stay_in_order(logs: Any) -> None:
    logs.take.call().get(20)
    for n in range(0, 900, 3):
        logs.note.broadcast(n)
        logs.slice(gpus=n % 4).note.call_one(n + 1)
        logs.flatten("all").slice(all=slice(0, 4, 2)).note.broadcast(n + 2)
    for rank, seen in enumerate(logs.take.call().get(20).values()):
        expected = [
            x
            for n in range(0, 900, 3)
            for x in (n, *([n + 1] if n % 4 == rank else []), *([n + 2] if rank % 2 == 0 else []))
        ]
        assert seen == expected


def test_large_and_small_messages_do_not_overtake_each_other(logs: Any) -> None:
    logs.take.call().get(20)
    sizes = [10, 3 << 20, 0, 300_000, 1, 1 << 20] * 5
    for size in sizes:
        logs.size_of.broadcast(bytes(size))
    assert logs.take.call().get(20).values() == [sizes] * 4


def test_each_sender_has_an_order_of_its_own(quad: ProcMesh, logs: Any) -> None:
    logs.take.call().get(20)
    senders: Any = quad.spawn("senders", Log)
    done = [senders.slice(gpus=me).flood.call_one(logs, me, 300) for me in range(4)]
    for future in done:
        future.get(30)
    for log in (logs.slice(gpus=rank) for rank in range(4)):
        seen: list[Any] = []
        deadline = time.monotonic() + SECONDS
        while len(seen) < 1200:  # they come another way than the word that they were sent
            assert time.monotonic() < deadline, len(seen)
            seen += log.take.call_one().get(20)
        for me in range(4):
            assert [n for who, n in seen if who == me] == list(range(300))


def test_an_actor_of_the_client_gets_its_messages_in_order_too() -> None:
    here: Any = this_proc().spawn("here", Log)
    for n in range(1000):
        here.note.broadcast(n)
    assert here.take.call_one().get(20) == list(range(1000))
    here.stop().get(20)


def test_answers_come_after_what_was_sent_to_ports_before() -> None:
    here: Any = this_proc().spawn("here", PortLog)
    port, receiver = Channel[int].open()
    here.count.call_one(port, 100).get(20)
    assert [receiver.recv().get(0.5) for _ in range(100)] == list(range(100))
    here.stop().get(20)


class PortLog(Actor):
    @endpoint
    def count(self, port: Port[int], to: int) -> None:
        for n in range(to):
            port.send(n)


@pytest.mark.parametrize("count", [500, pytest.param(2500, marks=pytest.mark.slow)])
def test_messages_of_each_of_several_threads_stay_in_order(logs: Any, count: int) -> None:
    logs.take.call().get(20)
    threads = [
        threading.Thread(target=lambda me=me: [logs.note.broadcast((me, n)) for n in range(count)]) for me in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
    for seen in logs.take.call().get(50).values():
        assert len(seen) == 4 * count
        for me in range(4):
            assert [n for who, n in seen if who == me] == list(range(count))
