"""What the live displays cost without a page: the reducer at 10,000 ranks, watched and not."""

import json
import random
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

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
from monarch_nb.runtime import current_runtime
from monarch_nb.store import store_of, events as e
from monarch_nb.store.verbs import Activity, ActorActivity
from monarch_kernel import _loaded

runtime = current_runtime()
store = store_of(runtime)
count = RANKS
now = time.time()
hosts = tuple(f"node{i}" for i in range(count // 8))
shape = dict(ranks=range(count), labels=("hosts", "gpus"), sizes=(count // 8, 8), strides=(8, 1), ready=True, at=now)
store.put(e.Spawned(uid="p", name="workers", kind="procs", hosts=hosts, per_host=8, **shape))
store.put(e.Spawned(uid="a", name="trainers", kind="actors", actor_class="Trainer", on="p", **shape))
widgets = next(iter(_loaded.values()))._widgets

decoder = msgspec.msgpack.Decoder(Activity)

def bodies():
    made = []
    for _ in range(4 * count):
        rank, busy = random.randrange(count), random.random() < 0.5
        does = ("busy", now, "step") if busy else ("idle", now, "")
        made.append(msgspec.msgpack.encode(Activity((ActorActivity("a", rank, 0, *does, 0, 1, 1.0, 0),))))
    return made

ready = bodies()

def tell(seconds, take):
    "1,000 events a second in parts of a hundredth; gives the processor time of the whole kernel meanwhile."
    began, told, spent = time.monotonic(), 0, time.process_time()
    while (passed := time.monotonic() - began) < seconds:
        while told < passed * 1000:
            take(ready[told % len(ready)])
            told += 1
        time.sleep(0.01)
    return (time.process_time() - spent) / seconds, told / seconds

def watched(seconds):
    global result
    result = None
    def run():
        global result
        result = tell(seconds, lambda body: store.collector._activity(decoder.decode(body), None))
    threading.Thread(target=run).start()

def nothing(body):
    pass

print("ready", os.getpid())
"""


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


def main() -> None:
    reducer(plan_of(sys.argv))
    leave()


if __name__ == "__main__":
    main()
