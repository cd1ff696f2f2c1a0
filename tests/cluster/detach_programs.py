"""Programs of the tests of detach: each is one controller, which does one thing and says what it saw.

`python detach_programs.py NAME [ARGUMENT]`.
"""

import os
import signal
import sys
import time
from typing import Any

import monarch_nb as monarch
from monarch_nb.actor import Actor, endpoint, this_host
from monarch_nb.connect.hosts import AttachError


class Counter(Actor):
    """Has state."""

    def __init__(self, start: int) -> None:
        self.n = start

    @endpoint
    def add(self, more: int = 1) -> int:
        self.n += more
        print(f"now {self.n}", flush=True)
        return self.n

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def wait_for(self, path: str) -> str:
        while not os.path.exists(path):
            time.sleep(0.02)
        return path


def say(*words: object) -> None:
    """One line for the test, which waits for it."""
    print(*words, flush=True)


def spawn() -> tuple[Any, Any]:
    """Two procs with a counter each, that has begun to count."""
    procs = this_host().spawn_procs(per_host={"gpus": 2}, name="trainers")
    counter: Any = procs.spawn("counter", Counter, 10)
    say("pids", *counter.pid.call().get().values())
    say("counts", *counter.add.call(5).get().values())
    return procs, counter


def leave(lease: str = "60s") -> None:
    """Spawns, and leaves it with a call under way, that ends once the test has made a file."""
    procs, counter = spawn()
    under_way = counter.wait_for.call(os.environ["GATE"])
    procs.detach(lease=lease)
    for call in (under_way.get, counter.add.call(1).get):
        try:
            call()
        except RuntimeError as error:
            say("error", str(error).splitlines()[0])


def hold(_: str = "") -> None:
    """Spawns, and waits to be killed."""
    spawn()
    say("holds")
    signal.pause()


def take(how: str = "") -> None:
    """Attaches; counts on; stops it."""
    began = time.monotonic()
    try:
        procs: Any = monarch.attach("trainers", steal=how == "steal")
    except AttachError as error:
        say("refused", error)
        return
    say("attached", round(time.monotonic() - began, 3))
    counter: Any = monarch.attach("counter")
    say("pids", *counter.pid.call().get().values())
    say("counts", *counter.add.call(1).get().values())
    say("slice", counter.slice(gpus=1).add.call_one(1).get())
    if how == "hold":
        say("holds")
        signal.sigtimedwait({signal.SIGUSR1}, 30)
        try:
            counter.add.call(1).get()
        except RuntimeError as error:
            say("error", str(error).splitlines()[0])
        return
    procs.stop().get()
    say("stopped")


def again(_: str = "") -> None:
    """Leaves, and comes back in the same program: handles that were held work again."""
    procs, counter = spawn()
    procs.detach(lease="60s")
    back = monarch.attach("trainers")
    say("counts", *counter.add.call(1).get().values())
    say("same", back == procs)
    monarch.heal_mesh(procs, kill=True)
    say("counts", *counter.add.call(1).get().values())
    procs.stop().get()


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    {"leave": leave, "hold": hold, "take": take, "again": again}[sys.argv[1]](*sys.argv[2:])
