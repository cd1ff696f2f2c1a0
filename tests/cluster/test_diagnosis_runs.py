"""Ranks that hang in `__init__`, at an `await`, or in an earlier call: a diagnosis names the line of each."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

import monarch_nb
from monarch_nb.actor import Actor, ProcMesh, concurrent_endpoint, current_rank, endpoint
from monarch_nb.diagnosis import Finding
from tests.cluster.actor_tools import SECONDS, line_of
from tests.polling import until

pytestmark = pytest.mark.timeout(120)


class Constructed(Actor):
    def __init__(self, hangs: bool = True) -> None:
        if hangs and current_rank().rank == 1:
            threading.Event().wait(SECONDS)

    @endpoint
    def answer(self) -> int:
        return 1


class Held(Constructed):
    def __init__(self) -> None:
        super().__init__(hangs=False)

    @endpoint
    def hold(self) -> None:
        if current_rank().rank == 1:
            threading.Event().wait(2 * SECONDS)


class Suspended(Actor):
    @endpoint
    async def hold(self) -> None:
        if current_rank().rank == 1:
            await self._nothing()

    async def _nothing(self) -> None:
        await asyncio.get_running_loop().create_future()


class Concurrent(Actor):
    @concurrent_endpoint
    async def hold(self) -> None:
        if current_rank().rank == 1:
            await asyncio.Event().wait()

    @concurrent_endpoint
    async def answer(self) -> int:
        return 1


def in_init(procs: ProcMesh) -> Any:
    return procs.spawn("held", Constructed).answer.call()


def in_queue(procs: ProcMesh) -> Any:
    held = procs.spawn("held", Held)
    held.hold.broadcast()
    return held.answer.call()


def in_await(procs: ProcMesh) -> Any:
    return procs.spawn("held", Suspended).hold.call()


def in_concurrent(procs: ProcMesh) -> Any:
    held = procs.spawn("held", Concurrent)
    call = held.hold.call()
    held.answer.call().get()  # the newest run, which has ended
    return call


@pytest.mark.parametrize(
    ("begin", "line"),
    [
        (in_init, "Event().wait(SECONDS)"),
        (in_queue, "Event().wait(2 * SECONDS)"),
        (in_await, "create_future()"),
        (in_concurrent, "await asyncio.Event().wait()"),
    ],
)
def test_a_rank_that_hangs_is_named_with_its_line(
    own_procs: ProcMesh, begin: Callable[[ProcMesh], Any], line: str
) -> None:
    call = begin(own_procs)
    findings: list[Finding] = []

    def is_found() -> bool:
        findings[:] = monarch_nb.diagnose(own_procs).findings
        return bool(findings)

    until(is_found, "a finding", SECONDS)
    assert (findings[0].ranks, findings[0].source) == ((1,), line_of(__file__, line))
    assert not call.done()
