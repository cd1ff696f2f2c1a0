"""Messages of one sender to one actor arrive in the order they were sent, between processes too."""

import threading
from typing import Any

import pytest

from monarch_nb.actor import Actor, ProcMesh, endpoint

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


@pytest.fixture(scope="module")
def logs(quad: ProcMesh) -> Any:
    return quad.spawn("logs", Log)


@pytest.mark.parametrize("count", [500, pytest.param(2500, marks=pytest.mark.slow)])
def test_messages_of_several_threads(logs: Any, count: int) -> None:
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


def test_large_and_small_messages_do_not_overtake_each_other(logs: Any) -> None:
    logs.take.call().get(20)
    sizes = [10, 3 << 20, 0, 300_000, 1, 1 << 20] * 5
    for size in sizes:
        logs.size_of.broadcast(bytes(size))
    assert logs.take.call().get(20).values() == [sizes] * 4
