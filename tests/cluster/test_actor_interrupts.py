"""Interrupts of endpoints: what they end, what is reported of the rest, and that they lose no answer."""

import asyncio
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from monarch_nb.actor import Actor, ActorError, Channel, ProcMesh, endpoint
from monarch_nb.lifecycle import interrupt, interrupts
from monarch_nb.lifecycle.interrupts import doing, interrupted
from tests.cluster.actor_tools import SECONDS, spawned

pytestmark = pytest.mark.timeout(120)


class Blocking(Actor):
    """Blocks in a chosen place."""

    def __init__(self) -> None:
        self.ends = os.pipe()

    @endpoint
    def sleep(self, began: Any) -> None:
        began.send(None)
        time.sleep(600)

    @endpoint
    def wait_for(self, peers: Any, began: Any) -> None:
        call = peers.sleep.call(began)
        began.send(None)
        call.get()

    @endpoint
    def read(self, began: Any) -> None:
        began.send(None)
        os.read(self.ends[0], 1)

    @endpoint
    def quick(self) -> int:
        return 1


class BlockingAsync(Blocking):
    @endpoint
    async def read(self, began: Any) -> None:  # type: ignore[override]
        began.send(None)
        os.read(self.ends[0], 1)

    @endpoint
    async def sleep(self, began: Any) -> None:  # type: ignore[override]
        raise NotImplementedError

    @endpoint
    async def wait_for(self, peers: Any, began: Any) -> None:  # type: ignore[override]
        raise NotImplementedError

    @endpoint
    async def quick(self) -> int:  # type: ignore[override]
        return 1


class Busy(Actor):
    def __init__(self) -> None:
        self.ends: list[str] = []

    @endpoint
    async def work(self, how: str, began: Any) -> None:
        try:
            began.send(None)
            if how == "sleeps":
                time.sleep(600)  # noqa: ASYNC251 - as users do
            await asyncio.sleep(0)
            while how == "computes":
                pass
            await asyncio.sleep(600)
        except BaseException as error:
            await asyncio.sleep(0)  # what ends an endpoint leaves its clean-up alone
            self.ends.append(type(error).__name__)
            raise

    @endpoint
    async def seen(self) -> list[str]:
        return self.ends


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may take a second to say anything."""
    monkeypatch.setattr(interrupts, "SILENT_AFTER", SECONDS)


@pytest.fixture(scope="module")
def duo() -> Iterator[ProcMesh]:
    yield from spawned(2, "duo")


def test_an_interrupt_ends_an_async_endpoint_that_never_awaits(duo: ProcMesh) -> None:
    busy = duo.spawn("busy", Busy)
    port, receiver = Channel[None].open()
    for how, error in (("computes", "KeyboardInterrupt"), ("sleeps", "KeyboardInterrupt"), ("waits", "CancelledError")):
        call = busy.work.call(how, port)
        for _ in range(2):
            receiver.recv().get(SECONDS)
        interrupt(busy)
        with pytest.raises(ActorError, match=error):
            call.get(SECONDS)
    assert (
        list(busy.seen.call().get(SECONDS).values())
        == [["KeyboardInterrupt", "KeyboardInterrupt", "CancelledError"]] * 2
    )


def test_an_interrupt_ends_a_sleep_and_a_wait_for_another_actor(duo: ProcMesh) -> None:
    sleepers = duo.spawn("sleepers", Blocking)
    waiters = duo.spawn("waiters", Blocking)
    port, receiver = Channel[None].open()
    waits = waiters.wait_for.call(sleepers, port)
    for _ in range(4):
        receiver.recv().get(SECONDS)
    begin = time.monotonic()
    reactions = interrupted(waiters._state, [0, 1])
    assert {rank: (did is not None and did.ended, did and did.endpoint) for rank, did in reactions.items()} == {
        0: (True, "wait_for"),
        1: (True, "wait_for"),
    }
    with pytest.raises(ActorError, match="KeyboardInterrupt"):
        waits.get(SECONDS)
    interrupt(sleepers)
    assert waiters.quick.call().get(SECONDS).values() == [1, 1]
    for _ in range(2):  # both called each of the two, so it sleeps again
        receiver.recv().get(SECONDS)
    interrupt(sleepers)
    assert sleepers.quick.call().get(SECONDS).values() == [1, 1]
    assert time.monotonic() - begin < 20


@pytest.mark.parametrize("kind", [Blocking, BlockingAsync])
def test_an_endpoint_that_no_interrupt_ends_is_named_within_a_second(impatient: None, kind: Any) -> None:
    for procs in spawned(2, "held"):
        actors = procs.spawn("actors", kind)
        port, receiver = Channel[None].open()
        read = actors.slice(gpus=1).read.call_one(port)
        receiver.recv().get(SECONDS)
        reactions = interrupted(actors._state, [0, 1])
        idle, busy = reactions[0], reactions[1]
        assert idle is not None
        assert idle.call == ""
        assert busy is not None
        assert not busy.ended
        assert busy.endpoint == "read"
        assert busy.source == "os.read(self.ends[0], 1)"
        assert not read.done()
        assert doing(actors._state, [1]).get(SECONDS)[1].seconds > 0.5


def test_calls_that_have_not_begun_are_dropped_on_request(duo: ProcMesh) -> None:
    actors = duo.spawn("queued", Blocking)
    port, receiver = Channel[None].open()
    first, *rest = [actors.sleep.call(port) for _ in range(4)]
    receiver.recv().get(SECONDS)
    receiver.recv().get(SECONDS)
    interrupted(actors._state, [0, 1], [future.wait_id for future in (first, *rest)])
    with pytest.raises(ActorError, match="KeyboardInterrupt"):
        first.get(SECONDS)
    for future in rest:
        with pytest.raises(ActorError, match="cancelled before it ran"):
            future.get(SECONDS)


def test_interrupts_at_any_moment_lose_no_answer(duo: ProcMesh) -> None:
    actors = duo.spawn("quick", Blocking)
    actors.quick.call().get(SECONDS)
    until = time.monotonic() + 1.0
    cuts = 0
    while time.monotonic() < until:
        futures = [actors.quick.call() for _ in range(20)]
        for _ in range(5):
            interrupt(actors)
        cuts += sum(future.exception(SECONDS) is not None for future in futures)
    assert actors.quick.call().get(SECONDS).values() == [1, 1]


class Sharding(Actor):
    """Works on PyTorch's sharded tensors, each of whose operations enters modes of its thread."""

    def __init__(self) -> None:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        self.mesh = init_device_mesh("cpu", (1,))

    @endpoint
    def work(self, began: Any) -> None:
        from torch.distributed.tensor import Shard, distribute_tensor

        tensor = distribute_tensor(torch.ones(8, 8), self.mesh, [Shard(0)])
        began.send(None)
        size = 0
        while True:
            size = size % 60 + 1
            tensor[:size].sum().add(1)  # sharding rules run again for each size

    @endpoint
    def is_as_it_was(self) -> bool:
        from torch.utils._python_dispatch import _len_torch_dispatch_stack

        plain = torch.randn(3) + 1
        return type(plain) is torch.Tensor and not _len_torch_dispatch_stack()


def test_interrupting_endpoints_that_use_pytorch_leaves_its_modes_unchanged(duo: ProcMesh) -> None:
    actors = duo.spawn("sharding", Sharding)
    for _ in range(4):
        began, begins = Channel[None].open()
        call = actors.work.call(began)
        for _ in range(2):
            begins.recv().get(SECONDS)
        interrupt(actors)
        with pytest.raises(ActorError, match="KeyboardInterrupt"):
            call.get(SECONDS)
        assert actors.is_as_it_was.call().get(SECONDS).values() == [True, True]
