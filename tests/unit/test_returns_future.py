"""Functions that are written as `async def` and give a Future."""

import asyncio
import contextlib
import contextvars
import gc
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from monarch_nb.runtime import Future, WouldBlockRuntime, returns_future

pytestmark = pytest.mark.timeout(30)
name: contextvars.ContextVar[str] = contextvars.ContextVar("name", default="nobody")


@returns_future
async def double(value: int) -> int:
    await asyncio.sleep(0)
    return 2 * value


@returns_future
async def forever(events: list[str]) -> None:
    events.append("begun")
    try:
        await asyncio.Event().wait()
    finally:
        events.append("ended")


def test_get_runs_the_body_on_the_calling_thread() -> None:
    @returns_future
    async def thread_id() -> int:
        return threading.get_ident()

    assert thread_id().get() == threading.get_ident()


def test_the_threads_loop_is_used_again() -> None:
    @returns_future
    async def loop() -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    assert loop().get() is loop().get()


def test_await_runs_the_body_on_the_awaiting_loop() -> None:
    @returns_future
    async def loop() -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    async def main() -> None:
        assert await loop() is asyncio.get_running_loop()
        assert await loop().as_asyncio() is asyncio.get_running_loop()

    asyncio.run(main())


def test_nothing_runs_before_somebody_looks_and_then_once() -> None:
    ran = []

    @returns_future
    async def body() -> int:
        ran.append(1)
        return len(ran)

    future = body()
    assert ran == []
    assert not future.done()
    assert future.get() == future.get() == future.result() == 1
    assert future.exception() is None


def test_a_body_nobody_looks_at_is_dropped_without_a_word(recwarn: pytest.WarningsRecorder) -> None:
    double(1)
    gc.collect()
    assert list(recwarn) == []


def test_arguments_are_checked_at_the_call() -> None:
    with pytest.raises(TypeError, match="value"):
        double()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="async def"):
        returns_future(lambda: 1)  # type: ignore[arg-type, return-value]


def test_an_error_is_told_to_everybody_who_looks() -> None:
    @returns_future
    async def fail() -> None:
        raise LookupError("gone")

    future = fail()
    with pytest.raises(LookupError, match="gone"):
        future.get()
    assert isinstance(future.exception(), LookupError)

    async def main() -> None:
        with pytest.raises(LookupError):
            await future

    asyncio.run(main())


def test_a_time_out_cancels_the_body_and_stays_its_outcome() -> None:
    events: list[str] = []
    future = forever(events)
    with pytest.raises(TimeoutError, match=r"0\.05 s"):
        future.get(0.05)
    assert events == ["begun", "ended"]
    with pytest.raises(TimeoutError):
        future.get()


def test_a_body_that_refuses_to_be_cancelled_cannot_change_the_outcome() -> None:
    @returns_future
    async def stubborn() -> int:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return 7
        return 0

    with pytest.raises(TimeoutError):
        stubborn().get(0.05)


def test_get_inside_a_body_that_get_runs_would_block() -> None:
    @returns_future
    async def nested() -> int:
        return double(2).get()

    with pytest.raises(WouldBlockRuntime, match="await"):
        nested().get()


def test_a_plain_future_that_is_not_resolved_would_block_there_too() -> None:
    pending: Future[int] = Future._make()

    @returns_future
    async def nested() -> int:
        return pending.get()

    with pytest.raises(WouldBlockRuntime):
        nested().get()
    pending._set(3)
    assert nested().get() == 3


def test_await_inside_a_body_works() -> None:
    @returns_future
    async def nested() -> int:
        return await double(await double(2))

    assert nested().get() == 8


def test_get_for_a_body_on_this_threads_loop_is_refused() -> None:
    async def main() -> None:
        events: list[str] = []
        future = forever(events)
        waiting = asyncio.ensure_future(future)
        await asyncio.sleep(0)  # the first observer starts
        await asyncio.sleep(0)  # and its body
        assert events
        with pytest.raises(WouldBlockRuntime, match="event loop"):
            future.get()
        waiting.cancel()

    asyncio.run(main())


def test_get_under_a_running_loop_runs_the_body_aside() -> None:
    async def main() -> None:
        assert double(4).get() == 8
        events: list[str] = []
        with pytest.raises(TimeoutError):
            forever(events).get(0.1)
        assert events[-1:] != ["begun"]

    asyncio.run(main())


def test_cancelling_one_who_waits_leaves_the_body_running() -> None:
    async def main() -> None:
        go = asyncio.Event()

        @returns_future
        async def body() -> int:
            await go.wait()
            return 5

        future = body()
        first = asyncio.ensure_future(future)
        second = asyncio.ensure_future(future)
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.sleep(0)
        go.set()
        assert await second == 5
        assert first.cancelled()

    asyncio.run(main())


def test_two_threads_share_one_body() -> None:
    begun, go = threading.Event(), threading.Event()

    @returns_future
    async def body() -> int:
        begun.set()
        await asyncio.to_thread(go.wait)
        return threading.get_ident()

    future = body()
    results: list[int] = []
    owner = threading.Thread(target=lambda: results.append(future.get()))
    owner.start()
    assert begun.wait(10)
    with pytest.raises(TimeoutError):
        future.get(0.01)  # not the owner: the body goes on
    go.set()
    owner.join(10)
    assert results == [owner.ident] == [future.get()]


def test_the_body_sees_the_callers_context_and_leaks_nothing_back() -> None:
    @returns_future
    async def body() -> str:
        before = name.get()
        name.set("body")
        return before

    token = name.set("caller")
    future = body()
    name.reset(token)
    assert future.get() == "caller"
    assert name.get() == "nobody"


def test_tasks_that_the_body_leaves_behind_are_ended() -> None:
    events: list[str] = []

    async def leftover() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            events.append("ended")

    @returns_future
    async def body() -> None:
        events.append(repr(bool(asyncio.ensure_future(leftover()))))
        await asyncio.sleep(0)

    body().get()
    assert events == ["True", "ended"]


@contextlib.contextmanager
def interrupted(events: list[str]) -> Iterator[None]:
    """Ctrl-C comes after the first event, and ends this block."""

    def strike() -> None:
        while not events:
            time.sleep(0.01)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    striker = threading.Thread(target=strike)
    striker.start()
    with pytest.raises(KeyboardInterrupt):
        yield
    striker.join()


@pytest.mark.parametrize("under_a_loop", [False, True])
def test_an_interrupt_cancels_the_body_and_is_raised(under_a_loop: bool) -> None:
    events: list[str] = []

    def wait() -> None:
        with interrupted(events):
            forever(events).get(20)

    async def main() -> None:
        handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a notebook cell
        try:
            wait()
        finally:
            signal.signal(signal.SIGINT, handler)

    if under_a_loop:
        asyncio.run(main())
    else:
        wait()
    assert double(1).get() == 2


def test_an_interrupt_is_raised_at_once_and_ends_a_blocking_body() -> None:
    events: list[str] = []

    @returns_future
    async def blocking() -> None:
        events.append("begun")
        time.sleep(20)  # noqa: ASYNC251 - what is tested
        events.append("not reached")

    future = blocking()
    with interrupted(events):
        future.get(25)
    assert events == ["begun"]
    for _ in range(2):
        with pytest.raises(asyncio.CancelledError):
            future.get(1)
    assert double(1).get() == 2


def test_an_interrupted_body_may_clean_up_and_get_then_says_cancelled() -> None:
    events: list[str] = []

    @returns_future
    async def tidy() -> int:
        events.append("begun")
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            events.append("tidied up")
        return 0

    future = tidy()
    with interrupted(events):
        future.get()
    assert events == ["begun", "tidied up"]
    with pytest.raises(asyncio.CancelledError):
        future.get(1)
