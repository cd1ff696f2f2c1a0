"""What the live displays cost: the reducer at 10,000 ranks, and 1,000 ranks with 1,000 events/s in a real JupyterLab.

Events enter where messages of workers are decoded. The page's figures come of the browser itself: its long tasks, and
its heap after a collection. Without Chromium those rows stay empty.
"""

import json
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from measure import Plan, figure, leave, plan_of

from monarch_nb.store import Store, apply
from monarch_nb.store import events as e

EVENTS_S = 1000
TAKEN_S = 0.05  # the state is told that often

# Runs in the kernel: ranks that the store is told of, and a thread that tells what they do.
DRIVER = """
%load_ext monarch
import os, random, resource, threading, time
import msgspec
from monarch_nb.runtime import runtime
from monarch_nb.store import store_of, events as e
from monarch_nb.store.activity import Activity, Doing
from monarch_kernel import _loaded

engine = runtime()
store = store_of(engine)
count = RANKS
now = time.time()
hosts = tuple(f"node{i}" for i in range(count // 8))
shape = dict(ranks=range(count), labels=("hosts", "gpus"), sizes=(count // 8, 8), strides=(8, 1), ready=True, at=now)
store.put(e.Spawned(uid="p", name="workers", kind="procs", hosts=hosts, per_host=8, **shape))
store.put(e.Spawned(uid="a", name="trainers", kind="actors", actor_class="Trainer", on="p", **shape))
widgets = next(iter(_loaded.values()))._widgets

class Parcel:
    def __init__(self, told):
        self.frames = [msgspec.msgpack.encode(told)]

def parcels():
    made = []
    for _ in range(4 * count):
        rank, busy = random.randrange(count), random.random() < 0.5
        does = ("busy", now, "step") if busy else ("idle", now, "")
        made.append(Parcel(Activity((Doing("a", rank, 0, *does, 0, 1, 1.0, 0),))))
    return made

ready = parcels()

def tell(seconds, take):
    "1,000 events a second in parts of a hundredth; gives the processor time of the whole kernel meanwhile."
    began, told, spent = time.monotonic(), 0, time.process_time()
    while (passed := time.monotonic() - began) < seconds:
        while told < passed * 1000:
            take(None, ready[told % len(ready)])
            told += 1
        time.sleep(0.01)
    return (time.process_time() - spent) / seconds, told / seconds

def watched(seconds):
    global result
    result = None
    def run():
        global result
        result = tell(seconds, store.collector._activity)
    threading.Thread(target=run).start()

def nothing(header, parcel):
    pass

print("ready", os.getpid())
"""

OBSERVE = """() => {
    window.tasks = [];
    new PerformanceObserver(list => {
        for (const entry of list.getEntries()) window.tasks.push(entry.duration);
    }).observe({type: "longtask"});
}"""


def reducer(plan: Plan) -> None:
    """The store by itself: so many ranks, one face that reads everything."""
    count = plan.face_ranks * 10
    for watching in (True, False):
        store = Store()
        spawned = e.Spawned(
            uid="p", name="w", kind="procs", ranks=range(count), hosts=("h",), per_host=count, ready=True, at=1.0
        )
        store.put(spawned)
        state: dict[str, Any] = {}
        size = 0

        def listen(message: dict[str, Any], state: dict[str, Any] = state) -> None:
            nonlocal size
            text = json.dumps(message)
            size += len(text)
            if message["type"] == "snapshot":
                state.update(json.loads(text)["state"])
            else:
                apply(state, json.loads(text)["patch"])

        chance = random.Random(7)
        events = [
            e.Doings("p", chance.randrange(count), 0, chance.choice(("busy", "idle")), float(i), "step")
            for i in range(plan.face_events)
        ]
        if watching:
            store._watchers.append(listen)
            listen({"type": "snapshot", "state": store.document()})
        each = int(EVENTS_S * TAKEN_S)
        began = time.process_time()
        for at, event in enumerate(events):
            store._events.append(event) if watching else store.put(event)
            if watching and at % each == each - 1:
                store._flush()
        seconds = time.process_time() - began
        if watching:
            store._flush()
            assert state == json.loads(json.dumps(store.document()))
            figure("faces: reducer", share=100 * seconds * EVENTS_S / len(events), bytes=size / len(events))
        else:
            figure("faces: nobody looks", us=1e6 * seconds / len(events))
        store.close()


class Trace:
    """The processor time of the page's tasks; their length by the clock says as much of who else uses the machine."""

    def __init__(self, shown: Any) -> None:
        self._shown = shown
        self._session = shown.context.browser.new_browser_cdp_session()
        self._events: list[dict[str, Any]] = []
        self._over: list[Any] = []
        self._session.on("Tracing.dataCollected", lambda told: self._events.extend(told["value"]))
        self._session.on("Tracing.tracingComplete", lambda told: self._over.append(told))
        self._session.send("Tracing.start", {"traceConfig": {"includedCategories": ["toplevel"]}})

    def longest(self) -> float:
        """Milliseconds of the longest task."""
        self._session.send("Tracing.end")
        while not self._over:
            self._shown.wait_for_timeout(100)
        return max((one.get("tdur", 0) / 1000 for one in self._events if one["name"].endswith("RunTask")), default=0.0)


class Kernel:
    """The notebook in the page, and what its cells print."""

    def __init__(self, shown: Any) -> None:
        self.shown = shown

    def run(self, code: str, until: str, timeout: float = 60) -> str:
        from tests.browser.lab import run_cell

        output = run_cell(self.shown, code)
        found = output.get_by_text(until).first
        found.wait_for(timeout=timeout * 1000)
        return str(output.inner_text())


def heap(session: Any) -> float:
    """Bytes in use after a collection."""
    session.send("HeapProfiler.collectGarbage")
    found = {one["name"]: one["value"] for one in session.send("Performance.getMetrics")["metrics"]}
    return float(found["JSHeapUsedSize"])


def page_figures(plan: Plan) -> None:
    """A mesh view and the failures in a page, while the ranks' states change 1,000 times a second."""
    from tests.browser.lab import lab, page, write_notebook

    seconds = plan.face_s
    with tempfile.TemporaryDirectory() as folder:
        notebook = write_notebook(Path(folder) / "faces.ipynb", ["0"])
        with lab(Path(folder) / "lab", notebook, {}) as address, page(address) as shown:
            kernel = Kernel(shown)
            kernel.run(DRIVER.replace("RANKS", str(plan.face_ranks)), "ready")
            idle = float(kernel.run(f"print('alone', tell({seconds / 3}, nothing)[0])", "alone").split()[-1])
            kernel.run("widgets.show('mesh', {'mesh': 'p'}, 'p')", "workers")
            shown.wait_for_selector(".mnb-cell, .mnb-canvas", state="attached", timeout=30_000)
            kernel.run("%failures", "Failures")
            session = shown.context.new_cdp_session(shown)
            session.send("Performance.enable")
            shown.wait_for_timeout(1000 * min(5.0, seconds))  # what the page itself does at first
            shown.evaluate(OBSERVE)
            before = heap(session)
            kernel.run(f"watched({seconds}); print('begun')", "begun")
            shown.wait_for_timeout(1000 * seconds / 2)
            middle = heap(session)
            shown.evaluate("window.tasks.length = 0")  # collections are ours
            trace = Trace(shown)
            shown.wait_for_timeout(1000 * seconds / 2)
            tasks = shown.evaluate("window.tasks")
            cpu = trace.longest()
            after = heap(session)
            told = kernel.run("while result is None: time.sleep(0.1)\nprint('told', *result)", "told").split()
            share, rate = float(told[-2]), float(told[-1])
            figure("faces: kernel", share=100 * max(0.0, share - idle), rate=rate)
            figure(
                "faces: page", longest=max(tasks, default=0.0), cpu=cpu, over=float(sum(1 for t in tasks if t > 100))
            )
            figure(
                "faces: heap", begin=before / 1e6, middle=middle / 1e6, end=after / 1e6, grown=(after - middle) / 1e6
            )


def main() -> None:
    plan = plan_of(sys.argv)
    reducer(plan)
    from tests.browser.lab import BROWSERS

    if not plan.face_s:
        leave()
    if any(shutil.which(name) for name in BROWSERS):
        page_figures(plan)
    else:
        print("no Chromium: the page is not measured", file=sys.stderr)
    leave()


if __name__ == "__main__":
    main()
