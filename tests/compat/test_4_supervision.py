"""Section 4: supervision.

Elsewhere: which owners are called (test_supervision.py), stops (test_stop.py), recursive stops
(test_actor_nesting.py), scripts and exit codes (test_actor_main.py), healing (memory_network/test_heal.py).
"""

import asyncio
import re
import threading
import time
from typing import Any

import pytest

from monarch.actor import (
    Actor,
    Channel,
    MeshFailure,
    Port,
    ProcMesh,
    SupervisionError,
    context,
    current_rank,
    endpoint,
    this_host,
    this_proc,
)

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("faults")]


class Worker(Actor):
    def __init__(self, port: "Port[Any] | None" = None) -> None:
        self.port = port

    @endpoint
    async def ping(self) -> int:
        return current_rank().rank

    @endpoint
    async def fail(self) -> None:
        raise ValueError("boom")

    async def __cleanup__(self, exc: Exception | None) -> None:
        if self.port is not None:
            self.port.send(("cleanup", None if exc is None else str(exc)))


class SyncOwner(Actor):
    def __init__(self, port: Port[Any]) -> None:
        self.port = port
        self.go = threading.Event()

    @endpoint
    def own(self, procs: Any) -> Any:
        self.workers = procs.spawn("workers", Worker)
        self.workers.initialized.get(20)
        return self.workers

    @endpoint
    def busy(self, worker: Any) -> None:
        """The worker fails while this runs; the supervise comes next, though other messages wait."""
        worker.fail.broadcast()
        try:
            while True:
                worker.ping.call_one().get(20)
        except SupervisionError:
            self.port.send("endpoint ends")

    @endpoint
    def next(self) -> None:
        self.port.send("next message")

    def __supervise__(self, failure: MeshFailure) -> bool:
        self.port.send("supervise")
        return True


class AsyncOwner(Actor):
    def __init__(self, port: Port[Any]) -> None:
        self.port = port
        self.supervised = asyncio.Event()

    @endpoint
    async def own(self, procs: Any) -> None:
        self.workers = procs.spawn("workers", Worker)
        await self.workers.initialized

    @endpoint
    async def wait_for_failure(self) -> list[int]:
        """The supervise runs at an await of this endpoint."""
        self.workers.slice(gpus=0).fail.broadcast()
        await self.supervised.wait()
        return [await self.workers.slice(gpus=rank).ping.call_one() for rank in (1, 2, 3)]

    @endpoint
    async def ping(self) -> str:
        return "pong"

    def __supervise__(self, failure: MeshFailure) -> bool:
        self.port.send((failure.mesh_name, failure.crashed_ranks))
        self.supervised.set()
        return True


class Handler(Actor):
    """Handles one failure at a time, each once it is released."""

    def __init__(self, port: Port[Any]) -> None:
        self.port = port
        self.active = 0
        self.gate = asyncio.Event()

    @endpoint
    async def own(self, procs: Any) -> Any:
        self.workers = procs.spawn("workers", Worker)
        await self.workers.initialized
        return self.workers

    @endpoint
    async def release(self) -> None:
        self.gate.set()

    @endpoint
    async def ping(self) -> str:
        return "pong"

    async def __supervise__(self, failure: MeshFailure) -> bool:
        self.active += 1
        self.port.send(("begins", self.active))
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.port.send(("cancelled", self.active))
            raise
        self.active -= 1
        return True

    async def __cleanup__(self, exc: Exception | None) -> None:
        self.port.send(("cleanup", exc))


class AwaitsWhatIsCancelled(Handler):
    async def __supervise__(self, failure: MeshFailure) -> bool:
        given_up = asyncio.get_running_loop().create_future()
        given_up.cancel("given up")
        return bool(await given_up)


class Exits(SyncOwner):
    def __supervise__(self, failure: MeshFailure) -> bool:
        raise SystemExit("given up")


def test_failures_are_supervised_one_at_a_time_beside_messages(quad: ProcMesh) -> None:
    port, receiver = Channel[Any].open()
    handler = quad.slice(gpus=0).spawn("handler", Handler, port)
    workers = handler.own.call_one(quad).get(20)
    for rank in range(3):
        workers.slice(gpus=rank).fail.broadcast()
    assert receiver.recv().get(20) == ("begins", 1)
    for rank in range(3):  # all have failed, and the messages of the handler go on
        with pytest.raises(SupervisionError):
            workers.slice(gpus=rank).ping.call_one().get(20)
    assert handler.ping.call_one().get(20) == "pong"
    handler.release.call_one().get(20)
    assert [receiver.recv().get(20) for _ in range(2)] == [("begins", 1)] * 2


@pytest.mark.parametrize("owner", [AwaitsWhatIsCancelled, Exits])
def test_a_supervise_that_raises_no_exception_has_failed_all_the_same(
    quad: ProcMesh, faults: Any, owner: type[Handler]
) -> None:
    port, _ = Channel[Any].open()
    owners: Any = quad.slice(gpus=0).spawn("owners", owner, port)
    owners.own.call_one(quad).get(20).slice(gpus=1).fail.broadcast()
    failure = faults.next()
    assert failure.mesh_name == "owners"
    report = failure.report()
    for words in ("given up", "This error occurred while handling another failure", "workers{'gpus': 1/4}"):
        assert words in report
    owners.stop().get(20)


def test_a_stop_cancels_a_supervise_that_has_not_ended(quad: ProcMesh, faults: Any) -> None:
    port, receiver = Channel[Any].open()
    handler: Any = quad.slice(gpus=0).spawn("handler", Handler, port)
    workers = handler.own.call_one(quad).get(20)
    workers.slice(gpus=0).fail.broadcast()
    assert receiver.recv().get(20) == ("begins", 1)
    handler.stop().get(20)
    assert [receiver.recv().get(20) for _ in range(2)] == [("cancelled", 1), ("cleanup", None)]
    assert faults.left() == []


def test_a_sync_owner_is_told_before_its_next_message(quad: ProcMesh) -> None:
    port, receiver = Channel[str].open()
    owner = quad.slice(gpus=0).spawn("owner", SyncOwner, port)
    worker = owner.own.call_one(quad.slice(gpus=1)).get(20)
    owner.busy.broadcast(worker)
    owner.next.call_one().get(20)
    assert [receiver.recv().get(20) for _ in range(3)] == ["endpoint ends", "supervise", "next message"]


def test_an_async_owner_is_told_at_an_await_of_its_endpoint(quad: ProcMesh) -> None:
    port, receiver = Channel[Any].open()
    owner = quad.slice(gpus=0).spawn("owner", AsyncOwner, port)
    owner.own.call_one(quad).get(20)
    assert owner.wait_for_failure.call_one().get(20) == [0, 0, 0]
    assert receiver.recv().get(20) == ("workers", [0])
    assert owner.ping.call_one().get(20) == "pong"


def test_a_clean_up_is_told_why(quad: ProcMesh, faults: Any) -> None:
    port, receiver = Channel[Any].open()
    ended: Any = quad.slice(gpus=0).spawn("ended", Worker, port)
    ended.initialized.get(20)
    ended.stop("enough").get(20)
    assert receiver.recv().get(20) == ("cleanup", None)
    failed = quad.slice(gpus=0).spawn("failed", Worker, port)
    failed.fail.broadcast()
    word, reason = receiver.recv().get(20)
    assert word == "cleanup"
    assert "boom" in reason
    assert faults.next().mesh_name == "failed"


class Backlogged(Actor):
    """Fails its child during a message, and reports what it does."""

    def __init__(self, port: Port[Any]) -> None:
        self.port = port
        self.child: Any = this_proc().spawn("child", Worker)

    @endpoint
    def fail_child(self) -> None:
        self.child.fail.broadcast()
        cell: Any = context().actor_instance.cell
        while not cell.executor._control:  # the failure is queued
            time.sleep(0.01)
        self.port.send("queued")
        while cell.cause is None:  # it is to stop
            time.sleep(0.01)

    def __supervise__(self, failure: MeshFailure) -> bool:
        self.port.send("supervise")
        return True

    def __cleanup__(self, exc: Exception | None) -> None:
        self.port.send(("cleanup", exc))


class AsyncBacklogged(Backlogged):
    @endpoint
    async def fail_child(self) -> None:
        self.child.fail.broadcast()
        cell: Any = context().actor_instance.cell
        while not cell.executor._control:
            time.sleep(0.01)  # noqa: ASYNC251 - its loop is to stay blocked
        self.port.send("queued")
        while cell.cause is None:
            time.sleep(0.01)  # noqa: ASYNC251

    async def __cleanup__(self, exc: Exception | None) -> None:
        self.port.send(("cleanup", exc))


@pytest.mark.parametrize("kind", [Backlogged, AsyncBacklogged])
def test_a_failure_that_waits_when_a_stop_begins_is_not_supervised(quad: ProcMesh, faults: Any, kind: Any) -> None:
    port, receiver = Channel[Any].open()
    owner: Any = quad.slice(gpus=0).spawn("owner", kind, port)
    owner.fail_child.broadcast()
    assert receiver.recv().get(20) == "queued"
    owner.stop().get(20)
    assert receiver.recv().get(20) == ("cleanup", None)


class Nest(Actor):
    def __init__(self) -> None:
        self.inner: Any = this_host().spawn_procs(per_host={"a_dim": 2}).spawn("nested", Worker)

    @endpoint
    def fail(self) -> None:
        self.inner.slice(a_dim=1).fail.broadcast()


def test_a_nested_failure_names_its_actor_with_coordinates_then_its_owner(quad: ProcMesh, faults: Any) -> None:
    nest: Any = quad.slice(gpus=2).spawn("nest", Nest)
    nest.fail.call_one().get(30)
    failure = faults.next()
    first, *lines = failure.report().splitlines()
    owner = r"<root>\.<[\w.]*Nest nest>"
    assert re.fullmatch(rf"The actor {owner}\.<[\w.]*Worker nested{{'a_dim': 1/2}}> and all its .*failed:", first)
    assert "  ValueError: boom" in lines
    assert re.search(rf"actor {owner} failed because it did not handle a supervision event", failure.report())
    assert failure.crashed_ranks == [0]
    nest.stop().get(20)
