"""Actors that stop, and how tests wait for that: never by sleeping."""

import contextlib
import faulthandler
import multiprocessing
import threading
import time
import weakref
from pathlib import Path
from typing import Any

from monarch_nb import debug
from monarch_nb.actor import Actor, MeshFailure, breakpoint_if, current_rank, endpoint
from monarch_nb.debug import DebugError, Stopped

SECONDS = 20.0


class Trainer(Actor):
    def __init__(self, stop_in_init: bool = False) -> None:
        self.steps = 0
        if stop_in_init:
            breakpoint()

    @endpoint
    def step(self, x: float) -> float:
        rank = current_rank().rank
        loss = x + rank
        breakpoint()
        doubled = loss * 2
        self.steps += 1
        return doubled

    @endpoint
    def steps_done(self) -> int:
        return self.steps

    @endpoint
    def take(self, data: bytes) -> None:
        self.last = len(data)

    @endpoint
    def pdb_step(self) -> str:
        import pdb

        where = "pdb"
        pdb.set_trace()
        return where

    @endpoint
    def stop_if(self, ranks: list[int]) -> int:
        breakpoint_if(current_rank().rank in ranks, "asked for")
        return current_rank().rank

    @endpoint
    def quiet(self, values: list[float]) -> float:
        total = 0.0
        for value in values:
            total = self.add(total, value)
        return total

    def add(self, total: float, value: float) -> float:
        result = total + value
        return result

    @endpoint
    def divide(self, x: float) -> float:
        numbers = [1.0, x]
        return numbers[0] / numbers[1]

    @endpoint
    def hold(self, size: int) -> None:
        big = bytearray(size)
        raise ValueError(len(big))

    @endpoint
    def awkward(self) -> int:
        loud, endless, huge = Loud(), Endless(), list(range(300_000))
        breakpoint()
        return len(huge) + len([loud, endless])

    @endpoint
    def in_thread(self) -> str:
        done: list[str] = []

        def work() -> None:
            inside = "thread"
            breakpoint()
            done.append(inside)

        thread = threading.Thread(target=work, name="loader")
        thread.start()
        thread.join()
        return done[0]

    @endpoint
    def run_file(self, path: str, text: str) -> int:
        """Runs `run` of a file whose text has changed to `text`."""
        import importlib.util

        spec = importlib.util.spec_from_file_location("edited", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        Path(path).write_text(text)
        return int(module.run())

    @endpoint
    def wait_long(self) -> str:
        until = time.monotonic() + 30
        while time.monotonic() < until:
            time.sleep(0.01)
        return "waited"


class Loud:
    def __repr__(self) -> str:
        raise ValueError("this repr raises")


class Endless:
    def __repr__(self) -> str:
        while True:
            pass


def doubled(x: int) -> int:
    twice = 2 * x
    return twice


class Looper(Actor):
    """An async actor: one loop, several endpoints at a time."""

    @endpoint
    async def step(self, x: int) -> int:
        import asyncio

        await asyncio.sleep(0)
        breakpoint()
        y = x + 1
        await asyncio.sleep(0)
        z = y + 1
        return z

    @endpoint
    async def ping(self) -> str:
        return "pong"

    @endpoint
    async def nested(self, x: int) -> int:
        more = await self.later(x)
        return more + 1

    async def later(self, x: int) -> int:
        import asyncio

        await asyncio.sleep(0.01)
        return 2 * x

    @endpoint
    async def gathered(self) -> object:
        import asyncio

        return await asyncio.gather(self.later(1), self.stop())

    async def stop(self) -> None:
        breakpoint()


class Owner(Actor):
    """Owns an actor that fails, and stops in `__supervise__`."""

    @endpoint
    def start(self) -> None:
        from monarch_nb.actor import this_proc

        child: Any = this_proc().spawn("child", Child)
        child.fail.broadcast()

    def __supervise__(self, failure: MeshFailure) -> bool:
        told = str(failure)
        breakpoint()
        return bool(told)


class Child(Actor):
    @endpoint
    def fail(self) -> None:
        raise RuntimeError("on purpose")


class Caller(Actor):
    """Waits for another actor, which stops."""

    @endpoint
    def ask(self, peer: Any, x: float) -> float:
        return float(peer.step.call_one(x).get())


def stopped(count: int, mesh: Any = None) -> list[Stopped]:
    try:
        return debug.wait(count, mesh, SECONDS)
    except TimeoutError:
        faulthandler.dump_traceback()  # actors may be threads of this process
        raise


def resume_all() -> None:
    """Resumes everything that a test has left stopped."""
    debug.clear_breakpoint()
    deadline = time.monotonic() + SECONDS
    while debug.sessions():
        assert time.monotonic() < deadline, f"still stopped: {debug.sessions()}"
        with contextlib.suppress(DebugError):  # the last session may have ended
            debug.resume()
        time.sleep(0.01)


def line(text: str, nth: int = 1) -> int:
    """The number of the nth line of this file with this text."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return [number for number, source in enumerate(lines, 1) if source.strip() == text][nth - 1]


class Big(bytearray):
    """Memory that can be referenced weakly."""


class OutOfMemoryError(RuntimeError):
    """Has the name of torch's own class."""


class Holder(Actor):
    """Fails with objects in its frames that must be released."""

    @endpoint
    def run_out(self, how: str) -> None:
        big = Big(1000)
        self.memory = weakref.ref(big)
        if how == "device":
            raise OutOfMemoryError("on the device")
        try:
            if how != "nothing":
                raise MemoryError(f"no more than {len(big)}")
        except MemoryError as error:
            if how == "memory":
                raise
            raise ValueError("it led to this") from error
        raise ValueError("something else")

    @endpoint
    def holds(self) -> bool:
        """Whether the memory of the last failure is still used; another message has come in between."""
        return self.memory() is not None

    @endpoint
    def load(self) -> None:
        from torch.utils.data import DataLoader

        numbers: Any = list(range(100))
        batches = iter(DataLoader(numbers, num_workers=1))
        raise ValueError(int(next(batches)))

    @endpoint
    def children(self) -> int:
        return len(multiprocessing.active_children())

    @endpoint
    def write(self, path: str) -> None:
        unfinished = open(path, "w")  # noqa: SIM115
        count = unfinished.write("all of it")
        raise ValueError(count)

    @endpoint
    def connect(self, port: int) -> None:
        import socket

        connection = socket.create_connection(("127.0.0.1", port))
        raise ValueError(connection.fileno())

    @endpoint
    def generate(self, path: str) -> None:
        def lines() -> Any:
            try:
                yield 1
            finally:
                Path(path).write_text("ended")

        running = lines()
        raise ValueError(next(running))

    @endpoint
    def backward(self) -> None:
        import torch

        inputs = torch.ones(3, requires_grad=True)
        loss = (inputs * 2).sum()
        raise ValueError(float(loss.detach()))

    @endpoint
    def join(self) -> int:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        return int(dist.get_world_size())

    @endpoint
    def fail_in_group(self) -> None:
        import torch
        import torch.distributed as dist

        group = dist.group.WORLD
        dist.all_reduce(torch.ones(1), group=group, op=None)  # wrong, and noticed inside of torch.distributed

    @endpoint
    def wait_for_the_other(self) -> str:
        import torch
        import torch.distributed as dist

        try:
            dist.all_reduce(torch.ones(1))
        except RuntimeError as error:
            return str(error)
        return "nothing happened"

    @endpoint
    def leave(self) -> None:
        import torch.distributed as dist

        dist.destroy_process_group()
