"""Messages of one sender to one actor arrive in the order they were sent, whichever way they took."""

import threading
from typing import Any

import pytest

from monarch_nb.actor import Actor, Channel, Port, ProcMesh, endpoint, this_proc
from monarch_nb.runtime import current_runtime, future

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
        notes, self.seen = self.seen, []
        return notes

    @endpoint
    def size_of(self, x: bytes) -> None:
        self.seen.append(len(x))


@pytest.fixture(scope="module")
def logs(quad: ProcMesh) -> Any:
    return quad.spawn("logs", Log)


def test_large_and_small_messages_do_not_overtake_each_other(logs: Any) -> None:
    logs.take.call().get(20)
    sizes = [10, 3 << 20, 0, 300_000, 1, 1 << 20] * 5
    for size in sizes:
        logs.size_of.broadcast(bytes(size))
    assert logs.take.call().get(20).values() == [sizes] * 4


def test_an_actor_of_the_client_gets_its_messages_in_order_too() -> None:
    mesh: Any = this_proc().spawn("here", Log)
    for n in range(1000):
        mesh.note.broadcast(n)
    assert mesh.take.call_one().get(20) == list(range(1000))
    mesh.stop().get(20)


def test_answers_come_after_what_was_sent_to_ports_before() -> None:
    mesh: Any = this_proc().spawn("here", PortLog)
    port, receiver = Channel[int].open()
    mesh.count.call_one(port, 100).get(20)
    assert [receiver.recv().get(0.5) for _ in range(100)] == list(range(100))
    mesh.stop().get(20)


class PortLog(Actor):
    @endpoint
    def count(self, port: Port[int], limit: int) -> None:
        for n in range(limit):
            port.send(n)


@pytest.mark.parametrize("count", [500, pytest.param(2500, marks=pytest.mark.slow)])
def test_messages_of_each_of_several_threads_stay_in_order(logs: Any, count: int) -> None:
    logs.take.call().get(20)
    threads = [
        threading.Thread(target=lambda i=i: [logs.note.broadcast((i, n)) for n in range(count)]) for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
    for notes in logs.take.call().get(50).values():
        assert len(notes) == 4 * count
        for i in range(4):
            assert [n for origin, n in notes if origin == i] == list(range(count))


class CollectingLock:
    """A lock in which a collection of garbage begins, once: a finalizer makes a call."""

    def __init__(self, lock: Any, finalizers: list[Any]) -> None:
        self._lock, self._finalizers, self.release = lock, finalizers, lock.release

    def acquire(self, blocking: bool = True) -> bool:
        taken = bool(self._lock.acquire(blocking))
        if taken and self._finalizers:
            self._finalizers.pop()()
        return taken

    __enter__ = acquire

    def __exit__(self, *_: object) -> None:
        self.release()


@pytest.mark.timeout(20)
@pytest.mark.parametrize("place", ["numbering", "_lock", "_transitions"])
def test_a_finalizer_that_cuts_into_another_call_may_call(
    logs: Any, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime, calls = current_runtime(), []

    def finalize() -> None:
        calls.append(logs.note.call("last"))
        future.when_done(calls[0], lambda ended: None)
        if place == "numbering":
            with pytest.raises(future.WouldBlockRuntime, match="__del__"):
                calls[0].get(20)

    owners = {"numbering": runtime.context().actor_instance, "_lock": runtime.ports, "_transitions": future}
    lock = CollectingLock(getattr(owners[place], place), [finalize])
    monkeypatch.setattr(owners[place], place, lock)
    logs.note.call("first").get(20)
    calls[0].get(20)
    assert all(sorted(notes) == ["first", "last"] for notes in logs.take.call().get(20).values())


@pytest.mark.timeout(20)
def test_a_signal_handler_between_two_ranks_may_wait_for_both(logs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, answers = current_runtime(), []
    send = runtime.send

    def cut_into(*message: Any, **options: Any) -> None:
        send(*message, **options)
        if not answers:
            answers.append("begun")
            answers.append(logs.note.call("handler").get(10))

    monkeypatch.setattr(runtime, "send", cut_into)
    logs.note.call("program").get(10)
    assert len(answers) == 2
    assert all(sorted(notes) == ["handler", "program"] for notes in logs.take.call().get(10).values())
