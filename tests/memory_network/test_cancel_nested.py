"""Cancelling a call whose endpoint waits for calls of its own cancels those, too, down to the last."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import Any

import pytest

from monarch_nb.actor import Actor, Channel, Port, ProcMesh, concurrent_endpoint, endpoint

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("faults")]


class Last(Actor):
    @concurrent_endpoint
    async def hang(self, began: Port[str], ended: Port[str]) -> None:
        began.send("last")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.send("last")
            raise


class Async(Actor):
    def __init__(self) -> None:
        self.call: Any = None

    @endpoint
    async def ask(self, last: Any, began: Port[str], ended: Port[str]) -> None:
        try:
            await last.hang.call_one(began, ended)
        except asyncio.CancelledError:
            ended.send("async")
            raise

    @endpoint
    async def ask_slowly(self, last: Any, began: Port[str], ended: Port[str]) -> None:
        """Is cancelled after it has made a call, before it awaits it."""
        call = last.hang.call_one(began, ended)
        time.sleep(0.3)  # noqa: ASYNC251 - blocks its loop
        try:
            await call
        except asyncio.CancelledError:
            ended.send("async")
            raise

    @endpoint
    async def start(self, last: Any, began: Port[str], ended: Port[str]) -> None:
        """Begins a call without waiting."""
        self.call = last.hang.call_one(began, ended)

    @endpoint
    async def recover(self, last: Any, began: Port[str], ended: Port[str]) -> None:
        """Awaits a method of its own once it is cancelled."""
        try:
            await last.hang.call_one(began, ended)
        except asyncio.CancelledError:
            await self.after(ended)
            raise

    async def after(self, ended: Port[str]) -> None:
        ended.send("tidy")

    @endpoint
    async def done(self) -> bool:
        return bool(self.call.done())


class Sync(Actor):
    def __init__(self) -> None:
        self.ends: list[str] = []

    @endpoint
    def ask(self, last: Any, began: Port[str], ended: Port[str]) -> None:
        try:
            last.hang.call_one(began, ended).get(20)
        except CancelledError as error:
            self.ends.append(str(error))
            ended.send("sync")
            raise

    @endpoint
    def seen(self) -> list[str]:
        return self.ends

    @endpoint(explicit_response_port=True)
    def by_port(self, port: Port[int], last: Any, began: Port[str], ended: Port[str]) -> None:
        last.hang.call_one(began, ended).get(20)


Ask = Callable[[Port[str], Port[str]], Any]


def cancel(ask: Ask, count: int = 1) -> list[str]:
    """Cancels a call once the last actor waits; returns who noticed."""
    began, begun = Channel[str].open()
    ended, ends = Channel[str].open()
    future = ask(began, ended)
    assert begun.recv().get(20) == "last"
    assert future.cancel()
    with pytest.raises(CancelledError):
        future.get(20)
    return sorted(ends.recv().get(20) for _ in range(count))


@pytest.fixture
def last(quad: ProcMesh) -> Any:
    return quad.slice(gpus=3).spawn("last", Last)


def test_an_async_endpoint_and_what_it_waits_for_are_cancelled(quad: ProcMesh, last: Any) -> None:
    middle: Any = quad.slice(gpus=0).spawn("middle", Async)
    assert cancel(lambda *ports: middle.ask.call_one(last, *ports), 2) == ["async", "last"]


def test_an_async_endpoint_sees_its_cancellation_at_its_next_await(quad: ProcMesh, last: Any) -> None:
    middle: Any = quad.slice(gpus=0).spawn("middle", Async)
    assert cancel(lambda *ports: middle.ask_slowly.call_one(last, *ports), 2) == ["async", "last"]


def test_sync_endpoints_waiting_for_a_call_wake_when_it_is_cancelled(quad: ProcMesh, last: Any) -> None:
    middle: Any = quad.slice(gpus=0).spawn("middle", Sync)
    assert cancel(lambda *ports: middle.ask.call_one(last, *ports), 2) == ["last", "sync"]
    [message] = middle.seen.call_one().get(20)
    assert "last.hang() was cancelled" in message


def test_a_cancellation_passes_through_several_actors(quad: ProcMesh, last: Any) -> None:
    class Over(Actor):
        @endpoint
        async def ask(self, middle: Any, *args: Any) -> None:
            await middle.ask.call_one(*args)

    middle: Any = quad.slice(gpus=0).spawn("middle", Sync)
    over: Any = quad.slice(gpus=1).spawn("over", Over)
    assert cancel(lambda *ports: over.ask.call_one(middle, last, *ports), 2) == ["last", "sync"]


def test_a_call_that_times_out_cancels_the_calls_it_waits_for(quad: ProcMesh, last: Any) -> None:
    middle: Any = quad.slice(gpus=0).spawn("middle", Async)
    for actor in (middle, last):  # the limit is for the calls alone, which both have to begin in that time
        actor.initialized.get(20)
    began, begun = Channel[str].open()
    ended, ends = Channel[str].open()
    future = middle.ask.options(timeout=3).call_one(last, began, ended)
    assert begun.recv().get(20) == "last"
    with pytest.raises(TimeoutError, match="was cancelled there"):
        future.get(20)
    assert sorted(ends.recv().get(20) for _ in range(2)) == ["async", "last"]


def test_calls_of_other_messages_of_the_actor_go_on(quad: ProcMesh, last: Any) -> None:
    middle: Any = quad.slice(gpus=0).spawn("middle", Async)
    began, begun = Channel[str].open()
    ended, _ends = Channel[str].open()
    middle.start.call_one(last, began, ended).get(20)
    assert begun.recv().get(20) == "last"
    assert cancel(lambda *ports: middle.ask.call_one(last, *ports), 2) == ["async", "last"]
    assert middle.done.call_one().get(20) is False


def test_a_cancelled_endpoint_may_clean_up(quad: ProcMesh, last: Any) -> None:
    middle: Any = quad.slice(gpus=0).spawn("middle", Async)
    assert cancel(lambda *ports: middle.recover.call_one(last, *ports), 2) == ["last", "tidy"]


def test_an_endpoint_with_an_explicit_port_survives_it(quad: ProcMesh, last: Any) -> None:
    middle: Any = quad.slice(gpus=0).spawn("middle", Sync)
    assert cancel(lambda *ports: middle.by_port.call_one(last, *ports)) == ["last"]
    assert middle.seen.call_one().get(20) == []
