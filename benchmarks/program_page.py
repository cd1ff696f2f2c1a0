"""The latency of displays in a real JupyterLab, and their cost to the page and the kernel.

How long after it happens a rank is shown busy, or dead, in the cell's mesh, the panel and the status bar, while a cell
blocks; and 1,000 ranks with 1,000 events/s, which enter where messages of workers are decoded. The page's figures come
from the browser itself: its long tasks, and its heap after a collection. Without Chromium these rows stay empty, and it
says so.
"""

import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from measure import Plan, figure, leave, plan_of, times
from program_faces import DRIVER

# Real processes; `step` lasts until a file is there.
BEGIN = """
import os, time
os.environ["MONARCH_NB_PRELOAD"] = ""
%load_ext monarch
from monarch.actor import Actor, endpoint, heal_mesh
from monarch.config import configure
configure(heal_max_restarts=1000)

class Trainer(Actor):
    @endpoint
    def step(self, until):
        while not os.path.exists(until):
            time.sleep(0.02)

    @endpoint
    def pid(self):
        return os.getpid()

%mesh workers gpus=4
trainers = workers.spawn("trainers", Trainer)
trainers.pid.call().get()
print("ready")
"""
HEAL = "heal_mesh(workers)\nprint('pids', *trainers.pid.call().get().values())"
BLOCK = "print('at', time.time())\ntrainers.slice(gpus=1).step.call_one({flag!r}).get()\nprint('over')"

WARM = 0.25  # of the time, in which the page has not shown everything once

OBSERVE = """() => {
    window.tasks = [];
    new PerformanceObserver(list => {
        for (const entry of list.getEntries()) window.tasks.push(entry.duration);
    }).observe({type: "longtask"});
}"""


class Trace:
    """The processor time of the page's tasks; their length by the clock depends on other users of the machine."""

    def __init__(self, shown: Any) -> None:
        self._shown = shown
        self._session = shown.context.browser.new_browser_cdp_session()
        self._events: list[dict[str, Any]] = []
        self._over: list[Any] = []
        self._session.on("Tracing.dataCollected", lambda event: self._events.extend(event["value"]))
        self._session.on("Tracing.tracingComplete", lambda event: self._over.append(event))
        self._session.send("Tracing.start", {"traceConfig": {"includedCategories": ["toplevel"]}})

    def longest(self) -> float:
        """Milliseconds of the longest task of a page's thread; the browser collects garbage on others beside it."""
        self._session.send("Tracing.end")
        while not self._over:
            self._shown.wait_for_timeout(100)
        names = [event for event in self._events if event["name"] == "thread_name"]
        threads = {(name["pid"], name["tid"]) for name in names if name["args"]["name"] == "CrRendererMain"}
        tasks = [event for event in self._events if event["name"].endswith("RunTask")]
        return max((task.get("tdur", 0) / 1000 for task in tasks if (task["pid"], task["tid"]) in threads), default=0.0)


class Kernel:
    """The notebook in the page, and what its cells print."""

    def __init__(self, shown: Any) -> None:
        self.shown = shown

    def start(self, code: str) -> Any:
        from tests.browser.lab import run_cell

        return run_cell(self.shown, code)

    def run(self, code: str, until: str, timeout: float = 60) -> str:
        output = self.start(code)
        match = output.get_by_text(until).first
        match.wait_for(timeout=timeout * 1000)
        return str(output.inner_text())


def heap(session: Any) -> float:
    """Bytes in use after a collection."""
    session.send("HeapProfiler.collectGarbage")
    metrics = {metric["name"]: metric["value"] for metric in session.send("Performance.getMetrics")["metrics"]}
    return float(metrics["JSHeapUsedSize"])


def latencies(shown: Any, kernel: Kernel, rounds: int, folder: str) -> None:
    """From an event to its display, while a cell blocks."""
    from tests.browser.lab import PANEL
    from tests.browser.seen import Sighting, rank, row

    kernel.run(BEGIN, "ready")
    panel = (PANEL / "package.json").exists()
    if panel:
        shown.evaluate("() => void window.jupyterapp.commands.execute('monarch-nb:open')")
        shown.wait_for_selector(".mnb-panel .mnb-outline-row", timeout=30_000)
    else:
        print("labextension/built is not there: the panel is not measured", file=sys.stderr)
    kernel.run("workers", "4 procs")
    figures: dict[str, list[float]] = {}

    def add(event: str, sight: Sighting, began: float) -> None:
        for view, ms in sight.after(began).items():
            figures.setdefault(f"page: {event}, {view}", []).append(ms / 1000)

    for number in range(rounds):
        pid = int(kernel.run(HEAL, "pids").split()[3])
        flag = str(Path(folder) / f"over-{number}")
        sighting = Sighting(shown, {"mesh": rank(1, "busy"), **({"panel": row("gpus=1", "busy")} if panel else {})})
        output = kernel.start(BLOCK.format(flag=flag))
        output.get_by_text("at ").first.wait_for(timeout=30_000)
        add("busy", sighting, float(output.inner_text().split()[1]))
        everywhere = {"panel": row("gpus=2", "failed"), "status bar": (".mnb-status-item", "1 failed")} if panel else {}
        sighting = Sighting(shown, {"mesh": rank(2, "failed"), **everywhere})
        began = time.time()
        os.kill(pid, signal.SIGKILL)
        add("killed", sighting, began)
        Path(flag).touch()
        output.get_by_text("over").first.wait_for(timeout=30_000)
    for name, seconds in figures.items():
        times(name, seconds)


def crowd(plan: Plan) -> None:
    """A mesh view, failures, a timeline, a history and the panel, while ranks' states change 1,000 times a second."""
    from tests.browser.lab import PANEL, lab, page, write_notebook

    seconds = plan.face_s
    with tempfile.TemporaryDirectory() as folder:
        notebook = write_notebook(Path(folder) / "faces.ipynb", ["0"])
        with lab(Path(folder) / "lab", notebook, {}) as address, page(address) as shown:
            kernel = Kernel(shown)
            kernel.run(DRIVER.replace("RANKS", str(plan.face_ranks)), "ready")
            span = min(60.0, seconds / 3)
            idle = float(kernel.run(f"print('alone', tell({span}, nothing)[0])", "alone", span + 60).split()[-1])
            kernel.run("widgets.show('mesh', {'mesh': 'p'}, 'p')", "workers")
            shown.wait_for_selector(".mnb-cell, .mnb-canvas", state="attached", timeout=30_000)
            kernel.run("%failures", "Failures")
            kernel.run("timeline = Simulated(mesh, runtime)\nnumber = timeline._number\ntimeline", "Timeline of")
            kernel.run("history(mesh)", "History of")
            if (PANEL / "package.json").exists():
                shown.evaluate("() => void window.jupyterapp.commands.execute('monarch-nb:open')")
                shown.wait_for_selector(".mnb-panel .mnb-outline-row", timeout=30_000)
            session = shown.context.new_cdp_session(shown)
            session.send("Performance.enable")
            shown.evaluate(OBSERVE)
            kernel.run(f"watched({seconds}); print('begun')", "begun")
            # The part of the heap that is reused is allocated once ranks have done everything once.
            shown.wait_for_timeout(1000 * seconds * WARM)
            pieces, parts, cpu = [], max(2, round(seconds * (1 - WARM) / 60)), 0.0
            heaps = [heap(session)]
            for part in range(parts):
                shown.evaluate("window.tasks.length = 0")  # collections are ours
                trace = Trace(shown) if part == parts - 1 else None
                shown.wait_for_timeout(1000 * seconds * (1 - WARM) / parts)
                pieces += shown.evaluate("window.tasks")
                cpu = trace.longest() if trace else cpu
                heaps.append(heap(session))
            reply = kernel.run("while result is None: time.sleep(0.1)\nprint('told', *result)", "told").split()
            messages, share, rate = map(float, reply[-3:])
            bars = shown.locator(".jp-Notebook .mnb-tl-view .b").count()
            figure("faces: messages", rate=messages, bars=float(bars))
            figure("faces: kernel", share=100 * max(0.0, share - idle), rate=rate)
            longest, over = max(pieces, default=0.0), float(sum(1 for task in pieces if task > 50))
            figure("faces: page", longest=longest, cpu=cpu, over=over)
            grown = heaps[-1] - heaps[len(heaps) // 2]
            figure("faces: heap", begin=heaps[0] / 1e6, end=heaps[-1] / 1e6, grown=grown / 1e6, most=max(heaps) / 1e6)
            print("heap by minute, MB:", *(f"{size / 1e6:.2f}" for size in heaps), file=sys.stderr)


def shown_in_time(plan: Plan) -> None:
    """The latencies, in a page of their own."""
    from tests.browser.lab import lab, page, write_notebook

    with tempfile.TemporaryDirectory() as folder:
        notebook = write_notebook(Path(folder) / "shown.ipynb", ["0"])
        with lab(Path(folder) / "lab", notebook, {}) as address, page(address) as shown:
            latencies(shown, Kernel(shown), plan.face_rounds, folder)


def main() -> None:
    plan = plan_of(sys.argv)
    from tests.browser.lab import BROWSERS

    if not plan.face_s:
        leave()
    if any(shutil.which(name) for name in BROWSERS):
        shown_in_time(plan)
        crowd(plan)
    else:
        print("SKIP: no Chromium on PATH, the page is not measured", file=sys.stderr)
    leave()


if __name__ == "__main__":
    main()
