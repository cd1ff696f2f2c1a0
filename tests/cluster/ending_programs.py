"""Programs that end in the middle of something; run as `python -m tests.cluster.ending_programs <scenario> <seed>`."""

import asyncio
import contextlib
import random
import sys
import threading
import time
from collections.abc import Callable
from os import _exit
from typing import Any

import monarch_nb.actor
from monarch_nb.actor import Actor, ProcMesh, endpoint, heal_mesh, shutdown_context, this_host


class Worker(Actor):
    def __init__(self, procs: ProcMesh | None = None) -> None:
        self.child = procs.spawn("child", Worker) if procs is not None else None

    @endpoint
    def nap(self, seconds: float = 0.01) -> int:
        time.sleep(seconds)
        return 1

    @endpoint
    def die(self) -> None:
        _exit(7)

    @endpoint
    def fail(self) -> None:
        raise ValueError("on purpose")

    @endpoint
    def use(self, mesh: Any) -> int:
        return len(list(mesh.nap.call(0.01).get(20).values()))


class Sleeper(Actor):
    @endpoint
    async def nap(self, seconds: float = 0.01) -> int:
        await asyncio.sleep(seconds)
        return 1

    @endpoint
    async def use(self, mesh: Any) -> int:
        return len(list((await mesh.nap.call(0.01)).values()))

    async def __cleanup__(self, error: Exception | None) -> None:
        await asyncio.sleep(0.01)


class Program:
    """Two procs with a mesh of actors of each kind; each method leaves something running."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.procs = this_host().spawn_procs(per_host={"gpus": 2}, name="procs")
        self.workers: Any = self.procs.spawn("workers", Worker)
        self.sleepers: Any = self.procs.spawn("sleepers", Sleeper)

    def pause(self, limit: float) -> None:
        time.sleep(self.chance.random() * limit)

    def repeat(self, step: Callable[[int], None], count: int = 1) -> None:
        def run() -> None:
            for number in range(10**9):
                step(number)

        for _ in range(count):
            threading.Thread(target=run, daemon=True).start()

    def spawning(self) -> None:
        self.pause(0.3)

    def at_once(self) -> None:
        self.workers.nap.call()
        self.sleepers.nap.call()

    def calls(self) -> None:
        self.workers.nap.call().get()
        self.pending = [mesh.nap.call(0.2) for mesh in (self.workers, self.sleepers) for _ in range(10)]
        self.pause(0.2)

    def threads(self) -> None:
        self.repeat(lambda _: self.workers.nap.call(0.001).get(), 3)
        self.repeat(lambda _: self.sleepers.nap.call(5).get())
        self.workers.nap.call().get()
        self.pause(0.2)

    def spawns_in_threads(self) -> None:
        def step(number: int) -> None:
            procs = this_host().spawn_procs(per_host={"gpus": 1}, name=f"more{number}")
            procs.spawn("workers", Worker).nap.call().get()  # type: ignore[attr-defined]
            procs.stop().get()

        self.repeat(step, 2)
        self.pause(0.8)

    def stops(self) -> None:
        for number in range(6):
            self.procs.spawn(f"more{number}", Worker).stop()  # type: ignore[attr-defined]
        this_host().spawn_procs(per_host={"gpus": 2}, name="more").stop()
        self.procs.stop()
        self.pause(0.1)

    def nested(self) -> None:
        procs = this_host().spawn_procs(per_host={"gpus": 1}, name="more")
        owner: Any = self.procs.spawn("owner", Worker, procs)
        owner.nap.call().get()
        if self.chance.random() < 0.5:
            owner.stop()
        self.pause(0.1)

    def peers(self) -> None:
        for _ in range(5):
            self.workers.use.call(self.sleepers)
            self.sleepers.use.call(self.workers)
        self.pause(0.1)

    def failures(self) -> None:
        monarch_nb.actor.unhandled_fault_hook = lambda failure: None
        self.workers.slice(gpus=0).die.broadcast()
        self.workers.slice(gpus=1).fail.broadcast()
        self.pause(0.1)

    def heals(self) -> None:
        monarch_nb.actor.unhandled_fault_hook = lambda failure: None
        self.workers.slice(gpus=0).die.broadcast()
        with contextlib.suppress(RuntimeError):
            self.workers.nap.call(0.5).get(5)
        self.repeat(lambda _: heal_mesh(self.workers, kill=True))
        self.pause(0.2)

    def exits(self) -> None:
        self.pending = [self.workers.nap.call(0.3)]
        sys.exit(0)

    def leaves(self) -> None:
        self.pending = [self.workers.nap.call(0.2)]
        shutdown_context().get()


SCENARIOS = [name for name in vars(Program) if not name.startswith("_") and name not in ("pause", "repeat")]


if __name__ == "__main__":
    getattr(Program(int(sys.argv[2])), sys.argv[1])()
