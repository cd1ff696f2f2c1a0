"""Section 1.3: concurrency rules.

Elsewhere: threads, loops, serialized and concurrent endpoints (tests/memory_network/test_execution.py), order
(test_ordering.py), circles of calls, which are told instead of hanging (test_deadlock.py), copies of
arguments (test_values.py).
"""

import asyncio
import threading
import warnings
from typing import Any

import pytest

from monarch.actor import Actor, Channel, Port, ProcMesh, concurrent_endpoint, context, endpoint, this_proc

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("faults")]


class Threads(Actor):
    def __init__(self, port: Port[Any]) -> None:
        self.port = port
        self.seen = [threading.get_ident()]
        self.children = 0

    @endpoint
    def note(self) -> list[int]:
        self.seen.append(threading.get_ident())
        return self.seen

    @endpoint
    def ask(self) -> tuple[list[int], int]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            other = context().actor_instance.proc.spawn("other", Answer)
            answers = [other.answer.call_one(n).get(20) for n in range(3)]
        return answers, len(caught)

    def __cleanup__(self, exc: Exception | None) -> None:
        self.port.send([*self.seen, threading.get_ident()])


class Answer(Actor):
    @endpoint
    def answer(self, n: int) -> int:
        return n


class Order(Actor):
    """What begins when: concurrent endpoints run to their first await in order."""

    def __init__(self) -> None:
        self.events: list[str] = []

    @concurrent_endpoint
    async def task(self, name: str) -> None:
        self.events.append(f"{name} before")
        await asyncio.sleep(0)
        self.events.append(f"{name} after")

    @endpoint
    async def seen(self) -> list[str]:
        return self.events


class Mutable(Actor):
    @endpoint
    def change(self, items: list[int]) -> list[int]:
        items.append(1)
        return items


class Burst(Actor):
    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.beats = 0
        self.task: asyncio.Task[None] | None = None

    @endpoint
    async def begin(self) -> None:
        self.task = asyncio.get_running_loop().create_task(self._beat())

    async def _beat(self) -> None:
        while True:
            self.beats += 1
            await asyncio.sleep(0)

    @endpoint
    async def take(self, n: int) -> None:
        self.numbers.append(n)

    @endpoint
    async def told(self) -> tuple[list[int], int]:
        return self.numbers, self.beats


def test_all_of_a_sync_actor_runs_on_one_thread(quad: ProcMesh) -> None:
    port, receiver = Channel[list[int]].open()
    actor: Any = quad.slice(gpus=0).spawn("threads", Threads, port)
    for _ in range(3):
        actor.note.call_one().get(20)
    actor.stop().get(20)
    seen = receiver.recv().get(20)
    assert len(seen) == 5
    assert len(set(seen)) == 1


def test_a_sync_endpoint_may_wait_for_another_actor_without_a_warning(quad: ProcMesh) -> None:
    port, _ = Channel[list[int]].open()
    actor = quad.slice(gpus=0).spawn("threads", Threads, port)
    assert actor.ask.call_one().get(20) == ([0, 1, 2], 0)


def test_concurrent_endpoints_of_one_caller_start_in_order(quad: ProcMesh) -> None:
    actor = quad.slice(gpus=0).spawn("order", Order)
    calls = [actor.task.call_one(str(n)) for n in range(20)]
    for call in calls:
        call.get(20)
    events = actor.seen.call_one().get(20)
    assert [event for event in events if event.endswith("before")] == [f"{n} before" for n in range(20)]


def test_messages_are_copies_even_within_one_process() -> None:
    items: list[int] = []
    actor = this_proc().spawn("mutable", Mutable)
    assert actor.change.call_one(items).get(20) == [1]
    assert items == []
    actor.stop().get(20)  # type: ignore[attr-defined]


def test_a_backlog_stays_in_order_and_lets_tasks_of_the_actor_run(quad: ProcMesh) -> None:
    actor = quad.slice(gpus=0).spawn("burst", Burst)
    actor.begin.call_one().get(20)
    for n in range(300):
        actor.take.broadcast(n)
    numbers, beats = actor.told.call_one().get(20)
    assert numbers == list(range(300))
    assert beats >= 300 // 64
