"""Section 1.3: concurrency rules.

Elsewhere: threads, loops, serialized and concurrent endpoints (tests/memory_network/test_execution.py), order
(test_ordering.py), circles of calls, which raise instead of hanging (test_deadlock.py), copies of
arguments (test_values.py).
"""

import asyncio
import warnings

import pytest

from monarch.actor import Actor, ProcMesh, context, endpoint

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("faults")]


class Asker(Actor):
    @endpoint
    def ask(self) -> tuple[list[int], int]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            answerer = context().actor_instance.proc.spawn("other", Answer)
            answers = [answerer.answer.call_one(n).get(20) for n in range(3)]
        return answers, len(caught)


class Answer(Actor):
    @endpoint
    def answer(self, n: int) -> int:
        return n


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
    async def state(self) -> tuple[list[int], int]:
        return self.numbers, self.beats


def test_a_sync_endpoint_may_wait_for_another_actor_without_a_warning(quad: ProcMesh) -> None:
    actor = quad.slice(gpus=0).spawn("asker", Asker)
    assert actor.ask.call_one().get(20) == ([0, 1, 2], 0)


def test_a_backlog_stays_in_order_beside_the_actors_own_tasks(quad: ProcMesh) -> None:
    actor = quad.slice(gpus=0).spawn("burst", Burst)
    actor.begin.call_one().get(20)
    for n in range(300):
        actor.take.broadcast(n)
    numbers, beats = actor.state.call_one().get(20)
    assert numbers == list(range(300))
    assert beats >= 300 // 64
