"""The cost of the debugger: how soon a stop is shown, a command to many ranks, and nothing while nobody debugs."""

import os
import statistics
import sys
import time
from typing import Any

from measure import figure, leave, plan_of, repeat, times

from monarch.actor import Actor, endpoint, this_host
from monarch.config import configured
from monarch_nb import debug
from monarch_nb.debug.prompt.conversation import NoPrompt
from monarch_nb.debug.prompt.waits import WaitPrompt
from monarch_nb.runtime.waiting import WaitObserver, join
from monarch_nb.runtime.waiting import leave as leave_waits


class Worker(Actor):
    @endpoint
    def noop(self) -> None:
        return None

    @endpoint
    def pause(self) -> int:
        x = os.getpid()
        breakpoint()
        return x

    @endpoint
    def fail(self) -> None:
        self.deeper(list(range(100)), 3)

    def deeper(self, numbers: list[int], levels: int) -> None:
        if levels:
            self.deeper([*numbers], levels - 1)
        raise ValueError(len(numbers))


class Shown:
    """Stands for a front end: notes when the table comes, and continues all when it is asked."""

    can_ask = True

    def __init__(self) -> None:
        self.shown_at = 0.0
        self.after: list[float] = []
        self.answered: list[float] = []

    echoes = True

    def write(self, text: str) -> None:
        pass

    def table(self, text: str, *, again: bool) -> bool:
        if not again:
            self.shown_at = time.time()
            self.after.append(self.shown_at - max(session.since for session in debug.sessions()))
        return True

    def question_withdrawn(self) -> None:
        pass

    def beside(self) -> None:
        pass

    def ask(self, prompt: str, useless: Any = None) -> str:
        if not debug.sessions():
            raise NoPrompt
        for _ in range(10):
            began = time.perf_counter()
            debug.eval("x")
            self.answered.append(time.perf_counter() - began)
        return "c all"


def stops(workers: Any, shown: Shown, row: str, count: int) -> None:
    shown.after.clear()
    shown.answered.clear()
    for _ in range(count):
        workers.pause.call().get()
    times(f"{row} shown", shown.after)
    times(f"{row} answered", shown.answered)


def failing(count: int) -> None:
    """Calls that fail, with and without their frames being kept, in turns: a busy machine affects both alike. Two
    processes of each: the order in which they are spawned matters as much as what is measured.
    """
    runs = []
    for limit in (0, 3, 3, 0):
        with configured(debug_keep_failures=limit):
            procs = this_host().spawn_procs(per_host={"gpus": 1})
            runs.append((limit, procs.spawn("workers", Worker), []))
            runs[-1][1].noop.call().get()
    for _ in range(20 * count):
        for _, workers, seconds in runs:
            seconds += repeat(1, lambda fails=workers.fail: fails.call_one().exception(), warm=0)
    without, with_s = (
        statistics.fmean(statistics.median(seconds) for limit, _, seconds in runs if limit == top) for top in (0, 3)
    )
    figure("debug: frames kept", above=(with_s / without - 1) * 100, p50=with_s * 1000)


def unattached(count: int) -> None:
    """Calls to an actor that had a breakpoint once, and to one that never had, in turns."""
    procs = this_host().spawn_procs(per_host={"gpus": 2})
    workers: Any = procs.spawn("workers", Worker)
    plain, once = workers.slice(gpus=0), workers.slice(gpus=1)
    workers.noop.call().get()
    debug.clear_breakpoint(debug.set_breakpoint("Worker.deeper", once))
    ratios = []
    for _ in range(count):
        before, after = (
            statistics.median(repeat(50, lambda calls=actor.noop: calls.call_one().get(), warm=2))
            for actor in (plain, once)
        )
        ratios.append(after / before)
    figure("debug: unattached", above=(statistics.median(ratios) - 1) * 100)


def main() -> None:
    plan = plan_of(sys.argv)
    debug.on_change(lambda kind, record: None)
    shown = Shown()
    waiting = WaitPrompt(debug.controller(), shown, lambda: True)
    debug.controller().mark_attended()

    class Tick(WaitObserver):
        def tick(self, future: Any, seconds: float) -> None:
            waiting.check(future)

    tick = Tick()
    join(tick)
    for row, size in (("debug: 8 stops", 8), ("debug: 64 stops", plan.scale)):
        procs = this_host().spawn_procs(per_host={"gpus": size})
        workers = procs.spawn("workers", Worker)
        workers.noop.call().get()
        stops(workers, shown, row, max(2, plan.kills // 2))
        procs.stop().get()
    leave_waits(tick)
    unattached(max(2, plan.calls // 100))
    failing(max(2, plan.calls // 100))
    leave()


if __name__ == "__main__":
    main()
