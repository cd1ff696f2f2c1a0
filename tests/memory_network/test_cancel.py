"""Ending calls early: cancel, a limit for one call, and calls that nobody will answer."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import Any

import msgspec
import pytest

import monarch_nb.actor
from monarch_nb.actor import (
    Actor,
    ActorError,
    ActorMesh,
    Channel,
    Port,
    ProcMesh,
    SupervisionError,
    concurrent_endpoint,
    current_rank,
    endpoint,
    returns_future,
    this_host,
)
from monarch_nb.config import configured
from monarch_nb.mesh import sending
from monarch_nb.runtime import current_runtime
from monarch_nb.wire import Layout

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("faults")]


class Async(Actor):
    def __init__(self) -> None:
        self.events: list[str] = []

    @endpoint
    async def hang(self, started: Port[int], ranks: tuple[int, ...] = (0, 1, 2, 3)) -> int:
        if current_rank().rank not in ranks:
            return current_rank().rank
        started.send(current_rank().rank)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.events.append("cancelled")
            raise
        return -1

    @endpoint
    async def note(self, event: str) -> None:
        self.events.append(event)

    @endpoint
    async def seen(self) -> list[str]:
        return self.events

    @endpoint(explicit_response_port=True)
    async def by_port(self, port: Port[int], started: Port[int]) -> None:
        started.send(0)
        await asyncio.Event().wait()


class Together(Actor):
    @concurrent_endpoint
    async def hang(self, name: str, started: Port[int], ended: Port[str]) -> None:
        started.send(0)
        try:
            await asyncio.Event().wait()
        finally:
            ended.send(name)


class Sync(Actor):
    def __init__(self) -> None:
        self.events: list[str] = []

    @endpoint
    def hold(self, port: Port[Port[int]]) -> int:
        key, receiver = Channel[int].open()
        port.send(key)
        self.events.append("held")
        return receiver.recv().get(20)

    @endpoint
    def note(self, event: str) -> None:
        self.events.append(event)

    @endpoint
    def seen(self) -> list[str]:
        return self.events

    @endpoint
    def end(self) -> None:
        monarch_nb.actor.context().actor_instance.stop()


class Beside(Actor):
    @endpoint
    async def hears_of(self, call: str) -> None:
        while call not in current_runtime().cancelled:  # noqa: ASYNC110 - no event reports it
            await asyncio.sleep(0.001)


def begin(count: int, call: Callable[[Port[int]], Any]) -> Any:
    """The result of `call`, once `count` ranks have begun."""
    port, receiver = Channel[int].open()
    future = call(port)
    for _ in range(count):
        receiver.recv().get(20)
    return future


@pytest.fixture
def workers(quad: ProcMesh) -> Any:
    workers: Any = quad.spawn("workers", Async)
    workers.initialized.get(20)
    return workers


@pytest.fixture
def keeper(quad: ProcMesh) -> Any:
    return quad.slice(gpus=0).spawn("keeper", Sync)


def test_a_cancelled_call_ends_here_and_on_every_rank(workers: Any) -> None:
    future = begin(4, workers.hang.call)
    assert not future.cancelled()
    assert future.cancel()
    assert future.done()
    assert future.cancelled()
    with pytest.raises(CancelledError, match=r"workers.hang\(\) was cancelled; 0 of 4 ranks have answered"):
        future.get()
    assert not future.cancel()
    assert workers.seen.call().get(20).values() == [["cancelled"]] * 4


def test_only_what_has_not_answered_is_cancelled(workers: Any) -> None:
    future = begin(2, lambda port: workers.hang.call(port, (1, 3)))
    future.cancel()
    assert workers.seen.call().get(20).values() == [[], ["cancelled"], [], ["cancelled"]]


def test_a_queued_call_is_dropped_and_those_behind_it_run(workers: Any) -> None:
    first = begin(4, workers.hang.call)
    second, third = workers.note.call("second"), workers.note.call("third")
    assert second.cancel()
    assert first.cancel()
    third.get(20)
    assert workers.seen.call().get(20).values() == [["cancelled", "third"]] * 4


def test_a_running_sync_endpoint_finishes_and_queued_calls_are_dropped(quad: ProcMesh, keeper: Any) -> None:
    port, receiver = Channel[Port[int]].open()
    running = keeper.hold.call_one(port)
    key = receiver.recv().get(20)
    waiting = keeper.note.call_one("waiting")
    assert running.cancel()
    assert waiting.cancel()
    with pytest.raises(CancelledError, match="`def` endpoint that runs already is left to finish"):
        running.get()
    listener: Any = quad.slice(gpus=0).spawn("beside", Beside)
    listener.hears_of.call_one(waiting.wait_id).get(20)  # the cancellation and the key take different ways
    key.send(1)
    assert keeper.seen.call_one().get(20) == ["held"]


def test_one_of_several_concurrent_calls_is_cancelled(quad: ProcMesh) -> None:
    actor: Any = quad.slice(gpus=0).spawn("together", Together)
    ended, receiver = Channel[str].open()
    calls = {name: begin(1, lambda port, name=name: actor.hang.call_one(name, port, ended)) for name in "abc"}
    for name in "bac":
        assert not calls[name].done()
        assert calls[name].cancel()
        assert receiver.recv().get(20) == name


def test_cancelling_a_call_with_an_explicit_port_spares_the_actor(workers: Any) -> None:
    begin(4, workers.by_port.call).cancel()
    assert workers.seen.call().get(20).values() == [[]] * 4


def test_cancelling_a_stream_keeps_the_answers_that_came(workers: Any) -> None:
    stream = list(begin(1, lambda port: workers.hang.stream(port, (2,))))
    assert sorted(future.get(20) for future in stream[:3]) == [0, 1, 3]
    assert not stream[0].cancel()
    assert stream[3].cancel()
    with pytest.raises(CancelledError, match="3 of 4 ranks"):
        stream[3].get()
    assert workers.seen.call().get(20).values() == [[], [], ["cancelled"], []]


def test_a_call_that_went_along_agents_is_cancelled_as_well(workers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "DIRECT", 1)
    future = begin(4, workers.hang.call)
    second = workers.note.call("behind")
    assert second.cancel()
    assert future.cancel()
    assert workers.seen.call().get(20).values() == [["cancelled"]] * 4


def test_an_await_of_a_cancelled_call_raises(workers: Any) -> None:
    future = begin(4, workers.hang.call)

    async def main() -> None:
        asyncio.get_running_loop().call_later(0.01, future.cancel)
        with pytest.raises(CancelledError):
            await future

    asyncio.run(main())


def test_a_thread_that_waits_learns_that_the_call_was_cancelled(workers: Any) -> None:
    future = begin(4, workers.hang.call)
    threading.Timer(0.05, future.cancel).start()
    with pytest.raises(CancelledError):
        future.get(20)


def test_an_answered_call_cannot_be_cancelled(workers: Any) -> None:
    future = workers.seen.call()
    future.get(20)
    assert not future.cancel()
    assert not future.cancelled()
    assert future.get().values() == [[]] * 4


def test_calls_that_others_rely_on_cannot_be_cancelled(workers: Any) -> None:
    assert not workers.initialized.cancel()
    stop = workers.stop()
    assert not stop.cancel()
    stop.get(20)


def test_a_cancelled_receive_eats_no_value() -> None:
    port, receiver = Channel[int].open()
    first, second = receiver.recv(), receiver.recv()
    with pytest.raises(TimeoutError):
        first.get(0)
    assert first.cancel()
    assert second.cancel()
    port.send(1)
    assert receiver.recv().get(20) == 1
    with pytest.raises(CancelledError):
        first.get()


def test_a_body_that_has_not_begun_never_does_when_cancelled() -> None:
    begun = []

    @returns_future
    async def body() -> None:
        begun.append(1)

    future = body()
    assert future.cancel()
    with pytest.raises(CancelledError):
        future.get(20)
    assert not begun


def test_an_endpoint_whose_own_call_is_cancelled_raises_an_ordinary_error(quad: ProcMesh, workers: Any) -> None:
    class Outer(Actor):
        @endpoint
        async def call(self, workers: Any, port: Port[int]) -> None:
            begun, receiver = Channel[int].open()
            future = workers.hang.call(begun)
            for _ in range(4):
                port.send(await receiver.recv())
            future.cancel()
            await future

    outer: Any = quad.slice(gpus=0).spawn("outer", Outer)
    future = begin(4, lambda port: outer.call.call_one(workers, port))
    with pytest.raises(ActorError, match="CancelledError"):
        future.get(20)


# -- a limit for one call ----------------------------------------------------------------------------------------------


def test_a_late_call_names_silent_ranks_and_is_cancelled_there(workers: Any) -> None:
    port, _receiver = Channel[int].open()
    future = workers.hang.options(timeout=3).call(port, (1, 3))  # the others answer in time, even on a busy machine
    with pytest.raises(TimeoutError, match=r"workers.hang\(\) was not answered within 3 s by ranks 1, 3 of mesh wor"):
        future.get()
    assert not future.cancel()
    assert workers.seen.call().get(20).values() == [[], ["cancelled"], [], ["cancelled"]]


def test_a_call_in_time_is_unaffected_by_the_limit_of_another(workers: Any) -> None:
    quick = workers.seen.options(timeout=3)
    assert quick.call().get().values() == [[]] * 4
    assert quick.choose().get() == []
    future = begin(4, workers.hang.call)
    with pytest.raises(TimeoutError, match="4 of 4"):
        quick.call().get()
    assert not future.done()
    future.cancel()
    assert workers.seen.call().get(20).values() == [["cancelled"]] * 4


def test_a_late_stream_gives_what_came_and_fails_the_rest(workers: Any) -> None:
    port, _receiver = Channel[int].open()
    stream = list(workers.hang.options(timeout=3).stream(port, (2,)))
    outcomes = [future.exception() for future in stream]
    assert [type(outcome) for outcome in outcomes] == [type(None)] * 3 + [TimeoutError]
    assert "by rank 2 of mesh workers (1 of 4 asked)" in str(outcomes[3])


def test_the_limits_of_answered_calls_take_no_memory(workers: Any) -> None:
    for timeout in (1e11, 1e5):
        for _ in range(200):
            workers.seen.options(timeout=timeout).choose().get(20)
    limits = current_runtime().limit_call.__self__  # type: ignore[attr-defined]
    assert len(limits._limits) < 100
    with pytest.raises(TimeoutError, match="was not answered within 3 s"):
        workers.hang.options(timeout=3).call(Channel[int].open()[0]).get()


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), "1", True])
def test_a_limit_is_a_positive_number_of_seconds(workers: Any, timeout: Any) -> None:
    with pytest.raises(ValueError, match="timeout must be"):
        workers.seen.options(timeout=timeout)


def test_a_broadcast_has_no_limit(workers: Any) -> None:
    with pytest.raises(ValueError, match="does not wait for answers"):
        workers.note.options(timeout=1).broadcast("x")
    assert workers.seen.options(timeout=None).call().get(20).values() == [[]] * 4


# -- calls that nobody will answer -------------------------------------------------------------------------------------


def rank_one(mesh: Any, **changes: Any) -> Any:
    """A reference to rank 1 of a mesh that does not exist."""
    return ActorMesh(msgspec.structs.replace(mesh._state, **changes), mesh._region).slice(gpus=1)


def test_a_call_to_an_actor_that_stopped_itself_names_it(quad: ProcMesh) -> None:
    actors: Any = quad.spawn("brief", Sync)
    actors.slice(gpus=2).end.call_one().get(20)
    with pytest.raises(SupervisionError) as caught:
        actors.seen.call().get(20)
    for part in ("brief.seen()", "stopped: it stopped itself", "brief, gpus=2", "host      ", "spawn a new one"):
        assert part in str(caught.value)


def test_a_call_to_an_actor_that_never_came_names_it() -> None:
    with configured(message_delivery_timeout="300ms"):
        procs = this_host().spawn_procs(per_host={"gpus": 2}, name="lonely")
        actors: Any = procs.spawn("absent", Sync)
        with pytest.raises(SupervisionError) as caught:
            rank_one(actors, incarnations={1: 3}).seen.call_one().get(20)
        for part in (
            "absent.seen()",
            "no such actor was spawned",
            "within 0.3 s",
            "absent, gpus=1",
            "host      ",
            "next",
        ):
            assert part in str(caught.value)
        procs.stop().get(20)


def test_a_call_to_a_host_that_is_not_known_says_which() -> None:
    procs = this_host().spawn_procs(per_host={"gpus": 2}, name="lost")
    actors: Any = procs.spawn("lost", Sync)
    state = msgspec.structs.replace(procs._state, layout=Layout(procs._state.uid, ("hnowhere",), 2))
    with pytest.raises(SupervisionError) as caught:
        rank_one(actors, procs=state).seen.call_one().get(20)
    for part in ("lost.seen()", "no route from", f"to hnowhere/{procs._state.uid}.1.0", "lost, gpus=1", "next"):
        assert part in str(caught.value)
    procs.stop().get(20)
