"""Section 1.5: futures.

Elsewhere: time-outs, awaiting, interrupts, loops (tests/memory_network/test_future.py), `returns_future`
(tests/unit/test_returns_future.py), lazy `recv` (tests/memory_network/test_ports.py).
"""

import asyncio
from typing import Any

import pytest

from monarch.actor import Actor, ActorError, Channel, Future, ProcMesh, endpoint, returns_future

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("faults")]


class Sleeper(Actor):
    def __init__(self) -> None:
        self.calls = 0

    @endpoint
    async def nap(self, seconds: float) -> int:
        await asyncio.sleep(seconds)
        self.calls += 1
        return self.calls

    @endpoint
    async def fail(self) -> None:
        raise ValueError("no")


@pytest.fixture(scope="module")
def sleeper(quad: ProcMesh) -> Any:
    return quad.slice(gpus=0).spawn("sleeper", Sleeper)


def test_result_is_an_alias_of_get(sleeper: Any) -> None:
    future = sleeper.nap.call_one(0)
    value = future.result(timeout=20)
    assert future.result() == future.get() == value


def test_a_timeout_is_the_builtin_error_and_the_call_goes_on(sleeper: Any) -> None:
    future = sleeper.nap.call_one(1.0)
    with pytest.raises(TimeoutError):
        future.get(timeout=0.01)
    with pytest.raises(TimeoutError):
        future.exception(timeout=0.01)
    assert isinstance(asyncio.run(_awaited(future)), int)


async def _awaited(future: Any) -> Any:
    return await future


def test_an_exception_is_an_object_or_none(sleeper: Any) -> None:
    assert isinstance(sleeper.fail.call_one().exception(timeout=20), ActorError)
    assert sleeper.nap.call_one(0).exception(20) is None


def test_a_call_that_is_not_looked_at_is_made_all_the_same(sleeper: Any) -> None:
    before = sleeper.nap.call_one(0).get(20)
    sleeper.nap.call_one(0)
    assert sleeper.nap.call_one(0).get(20) == before + 2


def test_asyncio_tools_take_futures(sleeper: Any) -> None:
    async def main() -> tuple[Any, ...]:
        gathered = await asyncio.gather(sleeper.nap.call_one(0), sleeper.nap.call_one(0))
        waited = await asyncio.wait_for(sleeper.nap.call_one(0).as_asyncio(), 20)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(sleeper.nap.call_one(1.0).as_asyncio(), 0.01)
        return (*gathered, waited)

    first, second, third = asyncio.run(main())
    assert (second, third) == (first + 1, first + 2)


def test_off_a_loop_there_is_no_asyncio_future(sleeper: Any) -> None:
    with pytest.raises(RuntimeError):
        sleeper.nap.call_one(0).as_asyncio()


def test_a_future_of_ones_own_is_refused() -> None:
    with pytest.raises(TypeError):
        Future()


def test_a_function_that_returns_a_future_is_got_and_awaited(sleeper: Any) -> None:
    @returns_future
    async def twice() -> int:
        return 2 * await sleeper.nap.call_one(0)  # type: ignore[no-any-return]

    first = twice().get(20)
    assert asyncio.run(_awaited(twice())) == first + 2


def test_many_futures_are_waited_for_in_any_order() -> None:
    port, receiver = Channel[int].open()
    first, second = receiver.recv(), receiver.recv()
    port.send(1)
    port.send(2)
    assert (second.get(20), first.get(20)) == (1, 2)  # served in the order in which they are looked at


def test_an_answer_that_is_there_can_be_asked_for_again_and_again(sleeper: Any) -> None:
    future = sleeper.nap.call_one(0)
    first = future.get(20)
    assert all(future.get(0) == first for _ in range(1000))
