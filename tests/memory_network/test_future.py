"""Futures: wait, wait again, give up, await; from any thread."""

import asyncio
import contextlib
import math
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from monarch_nb.actor import Actor, ActorError, Channel, Future, Port, ProcMesh, endpoint

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("faults")]


class Gate(Actor):
    def __init__(self) -> None:
        self.gate = threading.Event()

    @endpoint
    def echo(self, x: Any) -> Any:
        return x

    @endpoint
    def fail(self) -> None:
        raise ValueError("no")

    @endpoint
    def after(self, port: Port[Port[int]], x: int) -> int:
        key, receiver = Channel[int].open()
        port.send(key)
        return x + receiver.recv().get(20)


@pytest.fixture(scope="module")
def gate(quad: ProcMesh) -> Any:
    return quad.slice(gpus=0).spawn("gate", Gate)


@pytest.fixture
def gated_call(gate: Any) -> tuple[Future[int], Callable[[], None]]:
    """A call that answers 42 once the function is called."""
    port, receiver = Channel[Port[int]].open()
    future = gate.after.call_one(port, 40)
    key = receiver.recv().get(20)
    return future, lambda: key.send(2)


def test_a_future_cannot_be_made_by_hand() -> None:
    with pytest.raises(TypeError, match="by hand"):
        Future()


def test_a_time_out_leaves_the_call_running(gated_call: Any) -> None:
    future, open_gate = gated_call
    for _ in range(3):
        with pytest.raises(TimeoutError, match=r"gate.after\(\) has not answered yet"):
            future.get(timeout=0.01)
    assert isinstance(future.exception(0), TimeoutError)  # returned, as by torchmonarch's
    assert not future.done()
    open_gate()
    assert future.get(timeout=20) == 42
    assert future.get() == future.result() == 42
    assert future.exception() is None


@pytest.mark.parametrize("timeout", [-1, math.nan, math.inf, "1", True, [1]])
def test_a_timeout_is_a_finite_number_of_seconds(gated_call: Any, timeout: Any) -> None:
    future, open_gate = gated_call
    for kind in (ValueError,) if type(timeout) in (int, float) else (ValueError, TypeError):
        with pytest.raises(kind, match="timeout must be"):
            future.get(timeout)
    open_gate()
    assert future.get(1e20) == 42


def test_an_error_is_raised_at_each_get_and_available_as_object(gate: Any) -> None:
    future = gate.fail.call_one()
    for _ in range(2):
        with pytest.raises(ActorError, match="no"):
            future.get(20)
    error = future.exception(20)
    assert isinstance(error, ActorError)
    assert isinstance(error.exception, ValueError)


def test_many_may_await_one_future(gated_call: Any) -> None:
    future, open_gate = gated_call

    async def main() -> list[int]:
        async def wait() -> int:
            return await future

        tasks = [asyncio.create_task(wait()) for _ in range(10)]
        mirror = future.as_asyncio()
        await asyncio.sleep(0)
        open_gate()
        return [*await asyncio.gather(*tasks), await mirror, await future]

    assert asyncio.run(main()) == [42] * 12


def test_an_await_that_is_cancelled_leaves_the_call_running(gated_call: Any) -> None:
    future, open_gate = gated_call

    async def main() -> int:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(future.as_asyncio(), 0.01)
        open_gate()
        return await asyncio.wait_for(future.as_asyncio(), 20)

    assert asyncio.run(main()) == 42


def test_gather_takes_futures_as_they_are(gate: Any) -> None:
    async def main() -> list[int]:
        return await asyncio.gather(*[gate.echo.call_one(n) for n in range(5)])

    assert asyncio.run(main()) == [0, 1, 2, 3, 4]


def test_get_is_legal_and_silent_inside_a_running_loop(gate: Any, recwarn: pytest.WarningsRecorder) -> None:
    async def main() -> int:
        return gate.echo.call_one(5).get(20)

    assert asyncio.run(main()) == 5
    assert not recwarn.list


def test_as_asyncio_needs_a_loop(gate: Any) -> None:
    future = gate.echo.call_one(1)
    with pytest.raises(RuntimeError, match="no running event loop"):
        future.as_asyncio()
    assert future.get(20) == 1


def test_an_await_raises_what_the_endpoint_raised(gate: Any) -> None:
    async def main() -> None:
        await gate.fail.call_one()

    with pytest.raises(ActorError, match="ValueError: no"):
        asyncio.run(main())


def test_many_threads_may_wait_for_one_future(gated_call: Any) -> None:
    future, open_gate = gated_call
    values: list[int] = []
    threads = [threading.Thread(target=lambda: values.append(future.get(20))) for _ in range(20)]
    for thread in threads:
        thread.start()
    open_gate()
    for thread in threads:
        thread.join(20)
    assert values == [42] * 20


def test_calls_from_many_threads_get_their_own_answers(gate: Any) -> None:
    wrong: list[int] = []

    def work(base: int) -> None:
        wrong.extend(n for n in range(base, base + 200) if gate.echo.call_one(n).get(20) != n)

    threads = [threading.Thread(target=work, args=(1000 * n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    assert not wrong


def test_an_interrupt_stops_the_waiting_and_not_the_call(gated_call: Any) -> None:
    future, open_gate = gated_call
    main = threading.main_thread().ident

    def interrupt() -> None:
        deadline = time.monotonic() + 20
        while not future.watched and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.02)
        signal.pthread_kill(main or 0, signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt) as caught:
            future.get()
    finally:
        signal.signal(signal.SIGINT, before)
    assert any("gate.after() has not answered yet" in note and "stays valid" in note for note in caught.value.__notes__)
    open_gate()
    assert future.get(20) == 42


def test_a_future_resolves_though_the_loop_that_awaited_it_is_gone(gated_call: Any) -> None:
    future, open_gate = gated_call

    async def give_up() -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(future.as_asyncio(), 0.01)

    asyncio.run(give_up())
    open_gate()
    assert future.get(20) == 42
