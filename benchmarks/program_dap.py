"""JupyterLab's own debugger on ranks: a real kernel, driven as JupyterLab drives it, one request after the other.

The cost of a page is not included: it draws, and each request passes the server's socket on its way there and back.
"""

import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil
from measure import Plan, figure, leave, plan_of, times

from scripts.kernels import PATH
from tests.notebook.dap_client import Debugger
from tests.notebook.notebook import Notebook

ACTORS = """\
import os, time
import monarch
from monarch.actor import Actor, current_rank, endpoint

class Trainer(Actor):
    @endpoint
    def step(self, x):
        began = time.time()
        loss = x + current_rank().rank
        doubled = loss * 2
        tripled = loss * 3
        return doubled + tripled

    @endpoint
    def large(self, count):
        import torch
        weights = torch.zeros(count)
        pid = os.getpid()
        return pid

class Other(Actor):
    @endpoint
    def noop(self):
        return None
"""
CALLS = """
begun = time.perf_counter()
for done in range({count}):
    others.noop.call_one().get()
(time.perf_counter() - begun) / {count}
"""
FIRST = "loss = x + current_rank().rank"
SAMPLED = """
with monarch.profile(sampled) as found:
    until = time.monotonic() + {seconds}
    while time.monotonic() < until:
        sampled.step.call(1).get()
found.cost
"""


def stop_requests(debugger: Debugger) -> dict[str, Any]:
    """What a page asks for at each stop, one after the other; returns the variables."""
    variables = debugger.variables()
    debugger.do("source", source={"path": debugger.frames()[0]["source"]["path"]})
    return variables


def await_stops(debugger: Debugger, count: int) -> None:
    def stopped() -> bool:
        return sum(len(row["ranks"]) for row in debugger.do("monarchThreads")["threads"]) == count

    debugger.until(stopped, timeout=60)


def stops(debugger: Debugger, size: int, rounds: int) -> None:
    """From the gutter to armed; from the line before a breakpoint, on the rank that is shown, to its variables, and to
    all ranks listed; from a step of all to the variables there.
    """
    armed: list[float] = []
    shown: list[float] = []
    listed: list[float] = []
    stepped: list[float] = []
    for _ in range(rounds):
        debugger.mark(ACTORS)
        began = time.perf_counter()
        debugger.mark(ACTORS, FIRST)
        armed.append(time.perf_counter() - began)
        cell = debugger.start("found = trainers.step.call(1).get()")
        debugger.event("stopped", timeout=60)
        hit = float(stop_requests(debugger)["began"]["value"])
        shown.append(time.time() - hit)
        await_stops(debugger, size)
        listed.append(time.time() - hit)
        for _ in range(2):
            began = time.perf_counter()
            debugger.do("next", threadId=1)
            debugger.event("stopped")
            stop_requests(debugger)
            stepped.append(time.perf_counter() - began)
            await_stops(debugger, size)
        debugger.events.clear()
        debugger.do("continue", threadId=1)
        debugger.finish(cell, timeout=60).ok()
    times(f"dap: {size} ranks armed", armed)
    times(f"dap: {size} ranks stop", shown)
    times(f"dap: {size} ranks listed", listed)
    times(f"dap: {size} ranks step", stepped)


def large(debugger: Debugger, count: int, rounds: int) -> None:
    """The variables of a frame that has a tensor of so many floats, and by how much its process grows meanwhile."""
    debugger.mark(ACTORS, "return pid")
    seconds: list[float] = []
    grown = 0.0
    for _ in range(rounds):
        cell = debugger.start(f"trainers.slice(gpus=0).large.call_one({count}).get()")
        debugger.event("stopped", timeout=60)
        process = psutil.Process(int(debugger.variables()["pid"]["value"]))
        before = process.memory_info().rss
        for _ in range(3):
            began = time.perf_counter()
            assert f"float32[{count}]" in debugger.variables()["weights"]["value"]
            seconds.append(time.perf_counter() - began)
        grown = max(grown, (process.memory_info().rss - before) / 1e6)
        debugger.do("continue", threadId=1)
        debugger.finish(cell).ok()
    debugger.mark(ACTORS)
    times("dap: variables beside 1 GB", seconds)
    figure("dap: memory beside 1 GB", grown=grown)


def calls(notebook: Notebook, count: int, rounds: int) -> None:
    """Calls to a class without a breakpoint, with the debugger on and one in another class; off before and after."""

    def seconds() -> float:
        return float(notebook.run(CALLS.format(count=count)).ok().text)

    ratios = []
    seconds()
    before = seconds()
    for _ in range(rounds):
        debugger = Debugger(notebook).on()
        debugger.mark(ACTORS, FIRST)
        on = seconds()
        debugger.off()
        after = seconds()
        ratios.append(2 * on / (before + after))
        before = after
    figure("dap: calls beside it", ratio=statistics.median(ratios))


def sampled(notebook: Notebook, seconds: float) -> None:
    """The share of a processor that sampling takes in each busy process, the largest of all."""
    notebook.run("sampled = trainers").ok()
    cost = float(notebook.run(SAMPLED.format(seconds=seconds), timeout=120).ok().text)
    figure("dap: sampling", percent=100 * cost)


def measured(plan: Plan, size: int, rounds: int, *, more: bool) -> None:
    notebook = Notebook()
    try:
        notebook.run(ACTORS).ok()
        notebook.run(f"%mesh w gpus={size}", timeout=120).ok()
        notebook.run("trainers = w.spawn('trainers', Trainer)\ntrainers.initialized.get()", timeout=120).ok()
        notebook.run("others = w.slice(gpus=0).spawn('others', Other)\nothers.noop.call_one().get()").ok()
        if more:
            calls(notebook, max(10, plan.calls // 3), max(2, plan.kills // 4))
        debugger = Debugger(notebook).on()
        stops(debugger, size, rounds)
        if more:
            large(debugger, 1 << (28 if plan.calls > 100 else 20), 2)
        debugger.off()
        if not more:
            sampled(notebook, plan.idle_s)
    finally:
        notebook.close()


def main() -> None:
    plan = plan_of(sys.argv)
    os.environ["PYTHONPATH"] = PATH
    measured(plan, 8, max(2, plan.kills // 2), more=True)
    measured(plan, plan.scale, max(2, plan.kills // 4), more=False)
    leave()


if __name__ == "__main__":
    main()
