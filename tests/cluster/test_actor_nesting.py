"""Actors that spawn processes and actors of their own; they end with their owner."""

import os
import time
from typing import Any

import pytest

from monarch_nb.actor import Actor, Channel, Port, ProcMesh, endpoint, this_host, this_proc

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("faults")]


Message = tuple[float, str]  # time, on the clock that all processes share, and text


class Child(Actor):
    def __init__(self, port: Port[Message] | None = None, name: str = "child") -> None:
        self.port = port
        self.name = name

    @endpoint
    def pid(self) -> tuple[int, int]:
        return os.getpid(), os.getppid()

    def __cleanup__(self, exc: Exception | None) -> None:
        if self.port is not None:
            self.port.send((time.monotonic(), f"{self.name} cleaned up, {exc!r}"))


class Parent(Actor):
    def __init__(self, port: Port[Message] | None = None) -> None:
        self.port = port
        self.procs: Any = None

    @endpoint
    def spawn_processes(self, count: int) -> list[tuple[int, int]]:
        self.procs = this_host().spawn_procs(per_host={"gpus": count}, name="nested")
        self.children = self.procs.spawn("children", Child, self.port, "far child")
        return self.children.pid.call().get(20).values()

    @endpoint
    def spawn_here(self) -> Any:
        self.child = this_proc().spawn("near", Child, self.port, "near child")
        return self.child

    @endpoint
    def grand(self) -> list[int]:
        self.middle = this_proc().spawn("middle", Parent, self.port)
        return [pid for pid, _ in self.middle.spawn_processes.call_one(1).get(20)]

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    def __cleanup__(self, exc: Exception | None) -> None:
        if self.port is not None:
            self.port.send((time.monotonic(), "parent cleaned up"))


class AsyncParent(Actor):
    def __init__(self, port: Port[Message]) -> None:
        self.port = port

    @endpoint
    async def spawn(self) -> int:
        procs = this_host().spawn_procs(per_host={"gpus": 1}, name="nested")
        self.child = procs.spawn("child", Child, self.port)
        return (await self.child.pid.call_one())[0] if len(self.child) == 1 else 0

    async def __cleanup__(self, exc: Exception | None) -> None:
        self.port.send((time.monotonic(), "parent cleaned up"))


def receive(receiver: Any, count: int) -> list[str]:
    """Texts in the order of sending; those of different processes may arrive in any order."""
    return [text for _, text in sorted(receiver.recv().get(20) for _ in range(count))]


def exited(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_an_actor_spawns_real_processes_on_its_host(quad: ProcMesh) -> None:
    parent: Any = quad.slice(gpus=0).spawn("parent", Parent)
    pids = parent.spawn_processes.call_one(2).get(30)
    parent_pid = parent.pid.call_one().get(20)
    assert len({pid for pid, _ in pids} | {parent_pid, os.getpid()}) == 4
    parent.stop().get(30)
    assert all(exited(pid) for pid, _ in pids)


def test_children_end_before_their_owner_cleans_up(quad: ProcMesh) -> None:
    port, receiver = Channel[Message].open()
    parent: Any = quad.slice(gpus=0).spawn("parent", Parent, port)
    parent.spawn_processes.call_one(2).get(30)
    parent.spawn_here.call_one().get(20)
    parent.stop().get(30)
    messages = receive(receiver, 4)
    assert sorted(messages[:3]) == ["far child cleaned up, None"] * 2 + ["near child cleaned up, None"]
    assert messages[3] == "parent cleaned up"


def test_children_of_an_async_actor_end_before_it_cleans_up(quad: ProcMesh) -> None:
    port, receiver = Channel[Message].open()
    parent: Any = quad.slice(gpus=1).spawn("parent", AsyncParent, port)
    pid = parent.spawn.call_one().get(30)
    parent.stop().get(30)
    assert receive(receiver, 2) == ["child cleaned up, None", "parent cleaned up"]
    assert exited(pid)


def test_a_whole_tree_ends_with_its_root(quad: ProcMesh) -> None:
    port, receiver = Channel[Message].open()
    parent: Any = quad.slice(gpus=2).spawn("parent", Parent, port)
    (pid,) = parent.grand.call_one().get(30)
    parent.stop().get(30)
    messages = receive(receiver, 3)
    assert messages == ["far child cleaned up, None", "parent cleaned up", "parent cleaned up"]
    assert exited(pid)
