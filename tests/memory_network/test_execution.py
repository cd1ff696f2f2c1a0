"""How an actor runs its endpoints: on which thread, in which order, how many at a time."""

import asyncio
import contextlib
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from monarch_nb.actor import Actor, ActorError, Channel, Port, ProcMesh, concurrent_endpoint, endpoint, this_proc
from monarch_nb.runtime import CallRecorder, current_runtime

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("faults")]


class Sync(Actor):
    def __init__(self) -> None:
        self.local = threading.local()
        self.local.count = 0
        self.thread_id = threading.get_ident()
        self.open = threading.Event()

    @endpoint
    def where(self) -> tuple[str, bool, int]:
        try:
            asyncio.get_running_loop()
            loop = True
        except RuntimeError:
            loop = False
        self.local.count += 1
        return threading.current_thread().name, loop, self.local.count

    @endpoint
    def same_thread(self) -> bool:
        return threading.get_ident() == self.thread_id


class Async(Actor):
    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.background = asyncio.create_task(self._count())
        self.beats = 0
        self.events: list[str] = []

    async def _count(self) -> None:
        while True:
            self.beats += 1
            await asyncio.sleep(0.001)

    @endpoint
    async def on_its_loop(self) -> bool:
        return asyncio.get_running_loop() is self.loop

    @endpoint
    async def until_beats(self, count: int) -> int:
        while self.beats < count:  # noqa: ASYNC110 - what is tested is that the loop runs other things meanwhile
            await asyncio.sleep(0.001)
        return self.beats

    @endpoint
    async def nap(self, name: str, seconds: float) -> None:
        self.events.append(f"{name} begins")
        await asyncio.sleep(seconds)
        self.events.append(f"{name} ends")

    @endpoint
    async def log(self) -> list[str]:
        return self.events


class Concurrent(Actor):
    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.events: list[Any] = []

    @concurrent_endpoint
    async def wait(self, name: str) -> str:
        self.events.append(name)
        await self.gate.wait()
        return name

    @endpoint
    async def open(self) -> list[Any]:
        self.gate.set()
        return list(self.events)

    @concurrent_endpoint
    async def fail(self) -> None:
        raise ValueError("from a task")

    @endpoint
    async def ping(self) -> str:
        return "pong"


class Cancelled(Actor):
    def __init__(self, port: Port[str]) -> None:
        self.port = port

    @concurrent_endpoint
    async def forever(self) -> None:
        self.port.send("started")
        try:
            await asyncio.Event().wait()
        finally:
            self.port.send("cancelled")

    async def __cleanup__(self, exc: Exception | None) -> None:
        self.port.send("cleanup")


class Blocked(Actor):
    @endpoint
    def hold(self, port: Port[Port[None]]) -> None:
        key, receiver = Channel[None].open()
        port.send(key)
        receiver.recv().get(30)

    @endpoint
    def ping(self) -> str:
        return "pong"


def test_a_sync_actor_has_its_own_thread_without_a_loop(quad: ProcMesh) -> None:
    actor = quad.slice(gpus=0).spawn("sync", Sync)
    assert [actor.where.call_one().get(20) for _ in range(3)] == [("monarch-actor-driver", False, n) for n in (1, 2, 3)]
    assert actor.same_thread.call_one().get(20)


def test_an_async_actor_has_its_own_loop_that_runs_between_messages(quad: ProcMesh) -> None:
    actor = quad.slice(gpus=0).spawn("async", Async)
    assert actor.on_its_loop.call_one().get(20)
    assert actor.until_beats.call_one(5).get(20) >= 5


def test_async_endpoints_of_one_actor_are_serialized(quad: ProcMesh) -> None:
    actor = quad.slice(gpus=0).spawn("async", Async)
    naps = [actor.nap.call_one(name, 0.02) for name in "ab"]
    for nap in naps:
        nap.get(20)
    assert actor.log.call_one().get(20) == ["a begins", "a ends", "b begins", "b ends"]


def test_concurrent_endpoints_start_in_order_and_let_others_in(quad: ProcMesh) -> None:
    actor = quad.slice(gpus=0).spawn("concurrent", Concurrent)
    waits = [actor.wait.call_one(str(n)) for n in range(10)]
    assert actor.open.call_one().get(20) == [str(n) for n in range(10)]
    assert [wait.get(20) for wait in waits] == [str(n) for n in range(10)]


def test_an_exception_in_a_concurrent_endpoint_goes_to_the_caller(quad: ProcMesh) -> None:
    actor = quad.slice(gpus=0).spawn("concurrent", Concurrent)
    with pytest.raises(Exception, match="from a task"):
        actor.fail.call_one().get(20)
    assert actor.ping.call_one().get(20) == "pong"


def test_outstanding_concurrent_endpoints_are_cancelled_before_the_clean_up(quad: ProcMesh) -> None:
    port, receiver = Channel[str].open()
    actor = quad.slice(gpus=0).spawn("cancelled", Cancelled, port)
    call = actor.forever.call_one()
    assert receiver.recv().get(20) == "started"
    actor.stop().get(20)
    assert [receiver.recv().get(20) for _ in range(2)] == ["cancelled", "cleanup"]
    with pytest.raises(RuntimeError, match="stopped"):
        call.get(20)


def test_actors_of_one_process_run_side_by_side(quad: ProcMesh) -> None:
    procs = quad.slice(gpus=0)
    slow, quick = procs.spawn("slow", Blocked), procs.spawn("quick", Blocked)
    port, receiver = Channel[Port[None]].open()
    call = slow.hold.call_one(port)
    key = receiver.recv().get(20)
    assert quick.ping.call_one().get(20) == "pong"
    assert not call.done()
    key.send(None)
    call.get(20)


def test_spawn_does_not_wait_for_the_constructor(quad: ProcMesh, tmp_path: Path) -> None:
    gate = tmp_path / "spawned"

    class Slow(Actor):
        def __init__(self) -> None:
            while not gate.exists():
                time.sleep(0.01)

        @endpoint
        def done(self) -> bool:
            return True

    actor = quad.slice(gpus=0).spawn("slow", Slow)
    gate.touch()
    assert actor.done.call_one().get(20)
    assert actor.initialized.get(20) is None


class Raises(Actor):
    @endpoint
    def bad(self) -> None:
        raise ValueError("on purpose")


class RaisesAsync(Actor):
    @endpoint
    async def bad(self) -> None:
        raise ValueError("on purpose")


@pytest.mark.parametrize(("kind", "failed"), [(Sync, False), (Async, False), (Raises, True), (RaisesAsync, True)])
def test_a_call_is_recorded_before_its_answer_is_sent(
    kind: type[Actor], failed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh: Any = this_proc().spawn("here", kind)
    mesh.initialized.get(20)
    runtime, recorder, recorded = current_runtime(), CallRecorder(), []
    reply = runtime.reply
    monkeypatch.setattr(runtime, "recorder", recorder)
    monkeypatch.setattr(runtime, "reply", lambda *args: (recorded.append(recorder.take()[0]), reply(*args)))
    with contextlib.suppress(ActorError):
        (mesh.bad if failed else mesh.where if kind is Sync else mesh.on_its_loop).call_one().get(20)
    monkeypatch.undo()
    mesh.stop().get(20)
    assert [[run.failed for run in runs] for runs in recorded] == [[failed]]
    assert not recorder.take()[0]
