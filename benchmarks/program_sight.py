"""How soon faces know: from what happens on a rank to the message that reports it, while a cell blocks in `.get()`.

Kernels of several versions, driven as JupyterLab drives them: cells on the shell, the face's comm on a subshell. The
clock of an event is the rank's own, or that of who kills it; the other end is the message as a front end reads it.
"""

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from measure import leave, plan_of, times

from scripts.kernels import PATH, interpreter
from tests.notebook.notebook import Notebook
from tests.notebook.view_client import ViewClient

ACTORS = """
import os, random, threading, time
from monarch.actor import Actor, current_rank, endpoint, this_host

class Worker(Actor):
    @endpoint
    def wait(self):
        while True:
            time.sleep(0.02)

    @endpoint
    def note(self, file, stop):
        with open(file, "a", buffering=1) as events:
            print(time.time(), file=events)
        if stop:
            breakpoint()
        else:
            time.sleep(0.3)

%mesh w gpus=8
a = w.spawn('a', Worker)

def often(count, file, stop):
    for _ in range(count):
        time.sleep(0.4 + random.random() / 10)
        a.slice(gpus=1).note.call_one(file, stop).get()

def beside(count, file, stop):
    threading.Thread(target=often, args=(count, file, stop), daemon=True).start()
"""
BLOCKS = "a.slice(gpus=0).wait.call_one().get()"


class Watched:
    """A kernel one of whose cells blocks, and a face that receives events meanwhile."""

    def __init__(self, python: str, folder: Path) -> None:
        self.notebook = Notebook(python=python)
        self.notebook.run(ACTORS, timeout=60).ok()
        self.face = ViewClient(self.notebook)
        self.face.watch()
        self.face.send(type="watch", topic="debug", id="D")
        self.face.until(lambda face: bool(face.of("debug")) and self._all_idle(face))
        self._folder = folder

    @staticmethod
    def _all_idle(face: ViewClient) -> bool:
        return bool(face.mesh("a")) and all(face.rank("a", rank)["state"] == "idle" for rank in range(8))

    def close(self) -> None:
        self.face.close()
        self.notebook.close()

    def killed(self, count: int) -> list[float]:
        """Seconds from SIGKILL to a face that knows that the rank has failed; healed each time by the face."""
        self._block()
        seconds = []
        for turn in range(count):
            victim = 2 + turn % 6
            pid = self.face.rank("w", victim)["pid"]
            began = time.time()
            os.kill(pid, signal.SIGKILL)
            seconds.append(self._time_when(lambda rank=victim: self.face.rank("a", rank)["state"] == "failed") - began)
            reply = self.face.ask("heal", mesh=self.face.mesh("w"))
            assert reply["ok"], reply
            self.face.until(lambda face, rank=victim: face.rank("a", rank)["state"] == "idle")  # type: ignore[misc]
            time.sleep(random.random() / 10)
        self._unblock()
        return seconds

    def busy(self, count: int) -> list[float]:
        """Seconds from the first line of an endpoint to a face that knows that the rank is busy."""

        def busy() -> bool:
            return bool(self.face.rank("a", 1)["state"] == "busy")

        def next_time() -> float:
            moment = self._time_when(busy)
            self.face.until(lambda face: not busy())
            return moment

        return self._noted(count, False, next_time)

    def stopped(self, count: int) -> list[float]:
        """Seconds from the line before a breakpoint to a face that has the table of what is stopped there."""

        def stopped() -> bool:
            return bool(self.face.of("debug")[-1]["stopped"] == 1)

        def next_time() -> float:
            moment = self._time_when(stopped)
            assert self.face.ask("debug", do="continue")["ok"]
            self.face.until(lambda face: not stopped())
            return moment

        return self._noted(count, True, next_time)

    def _noted(self, count: int, stop: bool, next_time: Callable[[], float]) -> list[float]:
        with tempfile.NamedTemporaryFile("r", dir=self._folder) as events:
            self.notebook.run(f"beside({count}, {events.name!r}, {stop})").ok()
            self._block()
            moments = [next_time() for _ in range(count)]
            happened = [float(line) for line in events]
        self._unblock()
        return [after - before for before, after in zip(happened, moments, strict=True)]

    def _time_when(self, condition: Callable[[], bool]) -> float:
        self.face.until(lambda face: condition())
        return time.time()

    def _block(self) -> None:
        self._request = self.notebook.start(BLOCKS)
        self.face.until(lambda face: face.rank("a", 0)["state"] == "busy")

    def _unblock(self) -> None:
        assert self.face.ask("interrupt", mesh=self.face.mesh("a"), ranks=[0])["ok"]
        assert self.notebook.finish(self._request).error is not None, "it has not blocked"
        self.face.until(self._all_idle)


def main() -> None:
    plan = plan_of(sys.argv)
    os.environ["MONARCH_NB_HEAL_MAX_RESTARTS"] = "1000"
    os.environ["PYTHONPATH"] = PATH
    for name in plan.kernels:
        try:
            python = str(interpreter(name)) if name != "installed" else sys.executable
        except subprocess.CalledProcessError as error:
            print(f"{name}: its environment cannot be made: {error.stderr[-500:]}", file=sys.stderr)
            continue
        with tempfile.TemporaryDirectory() as folder:
            watched = Watched(python, Path(folder))
            try:
                times(f"sight: killed, {name}", watched.killed(plan.kills))
                times(f"sight: busy, {name}", watched.busy(plan.kills))
                times(f"sight: stopped, {name}", watched.stopped(plan.kills))
            finally:
                watched.close()
    leave()


if __name__ == "__main__":
    main()
