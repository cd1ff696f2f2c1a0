"""The cost of the live displays without a page: the reducer at 10,000 ranks, watched and not."""

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
FLUSH_S = 0.05  # the state is sent that often

# Runs in the kernel: ranks that the store is told of, and a thread that tells what they do, as their processes would:
# 1,000 times a second that an actor is busy or idle, and beside that the calls for a timeline, each rank once in two
# seconds, and the resources used.
DRIVER = """
%load_ext monarch
import os, random, resource, threading, time
import msgspec
from types import SimpleNamespace
from monarch_nb.mesh import ActorMesh
from monarch_nb.profiling.verbs import Recorded, RecordedSpan
from monarch_nb.profiling.service import PROFILING
from monarch_nb.profiling.timelines import Timeline
from monarch_nb.runtime import ActorState, ProcState, current_runtime
from monarch_nb.shape import NDSlice, Region
from monarch_nb.store import store_of, events as e
from monarch_nb.store.verbs import Activity, ActorActivity, ResourcesUsed
from monarch_nb.telemetry import history
from monarch_nb.wire import Layout
from monarch_kernel import _loaded
from monarch_kernel.views.channel import ViewChannel

runtime = current_runtime()
store = store_of(runtime)
count = RANKS
now = time.time()
hosts = tuple(f"node{i}" for i in range(count // 8))
shape = dict(ranks=range(count), labels=("hosts", "gpus"), sizes=(count // 8, 8), strides=(8, 1), ready=True, at=now)
store.put(e.MeshDescription(uid="p", name="workers", kind="procs", hosts=hosts, per_host=8, **shape))
store.put(e.MeshDescription(uid="a", name="trainers", kind="actors", actor_class="Trainer", on="p", **shape))
widgets = next(iter(_loaded.values()))._widgets

region = Region(("hosts", "gpus"), NDSlice(0, (count // 8, 8), (8, 1)))
procs = ProcState("p", "workers", region, runtime.address, layout=Layout("p", hosts, 8))
actors = ActorState("a", "trainers", region, runtime.address, procs=procs)
runtime.meshes.update(p=procs, a=actors)
mesh = ActorMesh(actors, region)

class Simulated(Timeline):
    def _begin(self, ranks):
        "There is nobody to ask."

def bodies():
    made = []
    for _ in range(4 * count):
        rank, busy = random.randrange(count), random.random() < 0.5
        does = ("busy", now, "step") if busy else ("idle", now, "")
        made.append(msgspec.msgpack.encode(Activity((ActorActivity("a", rank, 0, *does, 0, 1, 1.0, 0),))))
    return made

ready = bodies()
read = [ResourcesUsed(random.random(), random.randrange(1 << 30), -1.0, 0, 0, "", 9, 9) for _ in range(999)]
used = [msgspec.msgpack.encode(Activity((), each)) for each in read]
addresses = [SimpleNamespace(src=procs.address(rank)) for rank in range(count)]
activity = msgspec.msgpack.Decoder(Activity)
recorded = msgspec.msgpack.Decoder(Recorded)
service = runtime.feature(PROFILING)
number = 0  # of the timeline

def span(rank):
    "A call of the last two seconds."
    ended = time.time() - random.random()
    call = RecordedSpan("call", random.choice(("step", "eval")), ended - random.random(), ended, f"c{int(ended)}")
    return msgspec.msgpack.encode(Recorded(number, rank, (call,)))

def tell(seconds, take):
    "1,000 events a second in parts of a hundredth; gives the processor time of the whole kernel meanwhile."
    began, told, spent = time.monotonic(), 0, time.process_time()
    while (passed := time.monotonic() - began) < seconds:
        while told < passed * 1000:
            spans, rank = told % 2, (told // 2 if told % 2 else told // 5) % count
            beside = span(rank) if spans else used[told % len(used)] if told % 10 in (0, 6) else None
            take(ready[told % len(ready)], beside, rank, spans)
            told += 1
        time.sleep(0.01)
    return (time.process_time() - spent) / seconds, told / seconds

def arrive(body, beside, rank, spans):
    store.collector._activity(activity.decode(body), None)
    if spans:
        service._recorded(recorded.decode(beside), None)
    elif beside:
        store.collector._activity(activity.decode(beside), addresses[rank])

def watched(seconds):
    global result
    result = None
    def run():
        global result
        before = messages
        share, rate = tell(seconds, arrive)
        result = (messages - before) / seconds, share, rate
    threading.Thread(target=run).start()

def nothing(*given):
    pass

messages = 0  # to pages
send = ViewChannel._send

def counted(channel, message):
    global messages
    messages += 1
    send(channel, message)

ViewChannel._send = counted

print("ready", os.getpid())
"""


def reducer(plan: Plan) -> None:
    """The store by itself: so many ranks, one face that reads everything."""
    count = plan.face_ranks * 10
    for watching in (True, False):
        store = Store()
        spawned = e.MeshDescription(
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
            e.ActivityChanged("p", chance.randrange(count), 0, chance.choice(("busy", "idle")), float(i), "step")
            for i in range(plan.face_events)
        ]
        if watching:
            store._watchers.append(listen)
            listen({"type": "snapshot", "state": store.document()})
        interval = int(EVENTS_S * FLUSH_S)
        began = time.process_time()
        for index, event in enumerate(events):
            store._events.append(event) if watching else store.put(event)
            if watching and index % interval == interval - 1:
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
