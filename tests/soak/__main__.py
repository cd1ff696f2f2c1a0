"""`make soak`: calls, broadcasts, large bodies, floods of output, kills and heals, in an order drawn by a seed.

Ends with status 1 if an answer was wrong or anything grew. Output of the ranks goes where ours goes; the verdict goes
to stderr.
"""

import argparse
import gc
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import monarch.actor
from monarch.actor import Actor, SupervisionError, endpoint, heal_mesh, this_host
from monarch_nb import configure
from monarch_nb.connect.own_hosts import LocalAgents
from monarch_nb.runtime import current_runtime
from tests.soak.samples import MEGABYTE, Samples

RANKS = 4
VICTIMS = (2, 3)  # the others live all the time, and are watched
FLOOD = 2000  # lines of a rank
WARM_UP = 12  # rounds before any is counted, after which the store of output is full


class Worker(Actor):
    def __init__(self) -> None:
        self.heard = 0

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def add(self, number: int) -> int:
        return number + 1

    @endpoint
    def hear(self) -> None:
        self.heard += 1

    @endpoint
    def take_heard(self) -> int:
        heard, self.heard = self.heard, 0
        return heard

    @endpoint
    def echo(self, body: bytes) -> bytes:
        return body

    @endpoint
    def flood(self, lines: int) -> None:
        for line in range(lines):
            print(f"line {line} of a flood, as a chatty library would write it")

    @endpoint
    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class Soak:
    """One mesh, and the work on it."""

    def __init__(self, seed: int, body: int) -> None:
        self.random = random.Random(seed)
        self.procs = this_host().spawn_procs(per_host={"gpus": RANKS}, name="soaked")
        self.workers: Any = self.procs.spawn("workers", Worker)
        self.pids = self.workers.pid.call().get().values()
        self.done: dict[str, int] = {}
        self.body = bytes(self.random.randbytes(MEGABYTE)) * body

    def calls(self) -> None:
        """One by one, all at once, and to a slice."""
        rank = self.workers.slice(gpus=self.random.randrange(RANKS))
        assert [rank.add.call_one(n).get() for n in range(50)] == list(range(1, 51))
        assert [future.get() for future in [rank.add.call_one(n) for n in range(200)]] == list(range(1, 201))
        for n in range(20):
            assert self.workers.add.call(n).get().values() == [n + 1] * RANKS

    def broadcasts(self) -> None:
        for _ in range(100):
            self.workers.hear.broadcast()
        assert self.workers.take_heard.call().get().values() == [100] * RANKS

    def bodies(self) -> None:
        """There and back."""
        rank = self.workers.slice(gpus=self.random.randrange(RANKS))
        assert rank.echo.call_one(self.body).get() == self.body

    def shared(self) -> None:
        assert all(len(body) == len(self.body) for body in self.workers.echo.call(self.body).get().values())

    def floods(self) -> None:
        """From all ranks."""
        self.workers.flood.call(FLOOD).get()

    def spawns(self) -> None:
        """Processes and actors come and go."""
        procs = self.procs.host_mesh if RANKS == 1 else this_host().spawn_procs(per_host={"gpus": 1}, name="passing")
        assert procs.spawn("passing", Worker).add.call_one(1).get() == 2
        procs.stop().get()

    def kills(self) -> None:
        """In the middle of a call; then all is as before."""
        victim = self.random.choice(VICTIMS)
        under_way = self.workers.slice(gpus=victim).sleep.call_one(60)
        os.kill(self.pids[victim], signal.SIGKILL)
        try:
            under_way.get(30)
        except SupervisionError:
            pass
        else:
            raise AssertionError("a call to a killed rank was answered")
        heal_mesh(self.workers, timeout=60)
        self.pids = self.workers.pid.call().get().values()
        assert len(set(self.pids)) == RANKS

    def round(self) -> None:
        """Everything once, in some order."""
        works: list[Callable[[], None]] = [self.calls, self.broadcasts, self.bodies, self.shared, self.floods]
        works += [self.spawns, self.kills]
        self.random.shuffle(works)
        for work in works:
            work()
            self.done[work.__name__] = self.done.get(work.__name__, 0) + 1

    def look(self, samples: Samples) -> None:
        """At the controller, the agent and the ranks that are never killed."""
        gc.collect()
        samples.look("controller", os.getpid())
        (agent,) = current_runtime().part(LocalAgents).running.values()
        samples.look("agent", agent.pid)
        for rank, pid in enumerate(self.pids):
            if rank not in VICTIMS:
                samples.look(f"rank {rank}", pid)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--pause", type=float, default=0.0, help="seconds between rounds, to leave others the processor"
    )
    parser.add_argument("--body", type=int, default=64, help="megabytes of a large body")
    options = parser.parse_args()
    monarch.actor.unhandled_fault_hook = lambda failure: None  # type: ignore[attr-defined]
    configure(heal_max_restarts=1_000_000)
    soak, samples = Soak(options.seed, options.body), Samples()
    began = time.monotonic()
    for _ in range(WARM_UP):
        soak.round()
    rounds = 0
    while rounds < 8 or time.monotonic() - began < options.seconds:
        soak.round()
        rounds += 1
        soak.look(samples)
        time.sleep(options.pause)
    grown = samples.grown()
    print(f"{rounds} rounds in {time.monotonic() - began:.0f} s, seed {options.seed}: {soak.done}", file=sys.stderr)
    print(samples.table(), file=sys.stderr)
    for line in grown:
        print(f"GREW {line}", file=sys.stderr)
    soak.procs.stop().get()
    return 1 if grown else 0


if __name__ == "__main__":
    sys.exit(main())
