"""Section 1.5: futures.

Elsewhere: time-outs, awaiting, interrupts, loops (tests/memory_network/test_future.py), `returns_future`
(tests/unit/test_returns_future.py), lazy `recv` (tests/memory_network/test_ports.py).
"""

import asyncio
from typing import Any

import pytest

from monarch.actor import Actor, ProcMesh, endpoint, returns_future

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("faults")]


class Sleeper(Actor):
    def __init__(self) -> None:
        self.calls = 0

    @endpoint
    async def nap(self, seconds: float) -> int:
        await asyncio.sleep(seconds)
        self.calls += 1
        return self.calls


@pytest.fixture(scope="module")
def sleeper(quad: ProcMesh) -> Any:
    return quad.slice(gpus=0).spawn("sleeper", Sleeper)


async def _awaited(future: Any) -> Any:
    return await future


def test_asyncio_tools_take_futures(sleeper: Any) -> None:
    async def main() -> tuple[Any, ...]:
        gathered = await asyncio.gather(sleeper.nap.call_one(0), sleeper.nap.call_one(0))
        waited = await asyncio.wait_for(sleeper.nap.call_one(0).as_asyncio(), 20)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(sleeper.nap.call_one(1.0).as_asyncio(), 0.01)
        return (*gathered, waited)

    first, second, third = asyncio.run(main())
    assert (second, third) == (first + 1, first + 2)


def test_a_function_that_returns_a_future_is_got_and_awaited(sleeper: Any) -> None:
    @returns_future
    async def twice() -> int:
        return 2 * await sleeper.nap.call_one(0)  # type: ignore[no-any-return]

    first = twice().get(20)
    assert asyncio.run(_awaited(twice())) == first + 2


def test_an_answer_can_be_read_again_and_again(sleeper: Any) -> None:
    future = sleeper.nap.call_one(0)
    first = future.get(20)
    assert all(future.get(0) == first for _ in range(1000))
