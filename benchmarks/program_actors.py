"""The small program, on the API that ours and torchmonarch share: run by either one's interpreter."""

import importlib
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
from measure import Plan, figure, leave, memory, plan_of, rate, repeat, times, work

import monarch.actor
from monarch.actor import Actor, endpoint, this_host

heal_mesh = getattr(monarch.actor, "heal_mesh", None)
MEGABYTE = 1 << 20
SLOW_DETECTION_S = 2.0  # where deaths take that long to be reported, a few are enough


class Worker(Actor):
    @endpoint
    def noop(self, *arguments: Any) -> None:
        return None

    @endpoint
    def give(self, count: int) -> Any:
        return np.ones(count, np.uint8)

    @endpoint
    def keep(self, array: Any) -> None:
        self.array = array
        array[::1024].sum()  # all its pages

    @endpoint
    def load(self, module: str) -> None:
        importlib.import_module(module)

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def spawn(count: int) -> tuple[Any, Any]:
    procs = this_host().spawn_procs(per_host={"gpus": count})
    workers = procs.spawn("workers", Worker)
    workers.noop.call().get()
    return procs, workers


def calls(plan: Plan) -> None:
    procs, four = spawn(4)
    worker = four.slice(gpus=0)
    times("call_one", repeat(plan.calls, lambda: worker.noop.call_one().get()))
    times("call on 4", repeat(plan.casts, lambda: four.noop.call().get()))

    def pipelined() -> None:
        for future in [worker.noop.call_one() for _ in range(plan.pipelined)]:
            future.get()

    figure("pipelined", value=rate(repeat(3, pipelined, warm=1), plan.pipelined))
    megabyte = np.ones(MEGABYTE, np.uint8)
    times("1 MB argument", repeat(plan.megabyte, lambda: worker.noop.call_one(megabyte).get()))
    big = np.ones(64 * MEGABYTE, np.uint8)
    size = big.nbytes / 1e9
    figure("64 MB argument", value=rate(repeat(plan.big, lambda: worker.noop.call_one(big).get()), size))
    plain = bytes(big)
    figure("64 MB bytes", value=rate(repeat(plan.big, lambda: worker.noop.call_one(plain).get()), size))
    figure("64 MB result", value=rate(repeat(plan.big, lambda: worker.give.call_one(big.nbytes).get()), size))
    procs.stop().get()


def tensors(plan: Plan) -> None:
    if plan.heavy != "torch":
        return
    import torch

    procs, actor = spawn(1)
    tensor = torch.ones(64 * MEGABYTE, dtype=torch.uint8)
    figure("64 MB tensor", value=rate(repeat(plan.big, lambda: actor.noop.call_one(tensor).get()), tensor.nbytes / 1e9))
    procs.stop().get()


def casts(plan: Plan) -> None:
    procs, eight = spawn(8)
    times("call on 8", repeat(plan.casts, lambda: eight.noop.call().get()))
    big = np.ones(64 * MEGABYTE, np.uint8)
    everywhere = ["self", *values(eight.pid.call().get())]
    before = sum(memory(pid)["share"] for pid in everywhere)
    eight.keep.call(big).get()
    added = sum(memory(pid)["share"] for pid in everywhere) - before
    figure("64 MB broadcast, copies", value=added / big.nbytes)
    seconds = repeat(max(2, plan.big // 2), lambda: eight.noop.call(big).get())
    figure("64 MB broadcast", value=rate(seconds, 8 * big.nbytes / 1e9))
    procs.stop().get()


def values(mesh: Any) -> list[Any]:
    return [value for _, value in mesh.items()]


def template(_plan: Plan) -> None:
    """How long ours imports before it can fork."""
    if heal_mesh is None:
        return
    from monarch_nb.host.verbs import STATUS
    from monarch_nb.mesh.requests import request
    from monarch_nb.runtime import current_runtime
    from monarch_nb.wire import Done

    this_host()
    runtime = current_runtime()
    while True:
        state = request(runtime, str(runtime.agent), STATUS, Done()).get()
        if state.template_seconds is not None:
            break
        time.sleep(0.01)
    figure("template ready", value=state.template_seconds)


BARE = "import sys, {}; print(flush=True); sys.stdin.read()"


def idle(plan: Plan) -> None:
    """The cost of an idle process with torch, beside one that has only imported torch."""
    procs, workers = spawn(2)
    workers.load.call(plan.heavy).get()
    pid = values(workers.pid.call().get())[0]
    # Two of them, as there are several of ours: the memory that they share is not private.
    command = [sys.executable, "-c", BARE.format(plan.heavy)]
    bare = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(2)]
    for process in bare:
        assert process.stdout is not None
        process.stdout.readline()
    time.sleep(min(2.0, plan.idle_s))  # the work after a call is over
    private, plain = memory(pid)["private"] / 1e6, memory(bare[0].pid)["private"] / 1e6
    figure("idle proc", above=private - plain, private=private, bare=plain)
    for process in bare:
        process.kill()
        process.wait()
    before = work(pid), work(os.getpid())
    time.sleep(plan.idle_s)
    after = work(pid), work(os.getpid())
    for name, (cpu0, waits0), (cpu1, waits1) in zip(
        ("idle proc runs", "idle controller runs"), before, after, strict=True
    ):
        figure(name, cpu=(cpu1 - cpu0) / plan.idle_s * 100, wakes=(waits1 - waits0) / plan.idle_s)
    procs.stop().get()


def actors(plan: Plan) -> None:
    """The cost of one more actor to the controller: meshes of eight are spawned, called and kept."""
    procs, _ = spawn(8)

    def add(count: int, name: str) -> list[Any]:
        meshes = [procs.spawn(f"{name}{number}", Worker) for number in range(count)]
        for mesh in meshes:
            mesh.noop.call().get()
        return meshes

    spawned = add(max(1, plan.actors // 80), "first")
    before = memory()["private"]
    spawned += add(plan.actors // 8, "more")
    figure("controller, one more actor", value=(memory()["private"] - before) / 1e3 / (plan.actors // 8 * 8))
    procs.stop().get()


def spawns(plan: Plan) -> None:
    seconds = []
    for _ in range(plan.spawns):
        began = time.perf_counter()
        procs, _workers = spawn(8)
        seconds.append(time.perf_counter() - began)
        procs.stop().get()
    times("8 procs to first reply", seconds)


def deaths(plan: Plan) -> None:
    """Each rank of eight in turn is killed while a call to it is under way."""
    detection: list[float] = []
    healing: list[float] = []
    _, workers = spawn(8)
    for kill in range(plan.kills):
        rank = kill % 8
        victim = workers.slice(gpus=rank)
        pid = victim.pid.call_one().get()
        under_way = victim.sleep.call_one(60)
        time.sleep(0.05)
        began = time.perf_counter()
        os.kill(pid, signal.SIGKILL)
        try:
            under_way.get()
        except Exception:
            detection.append(time.perf_counter() - began)
        if heal_mesh is None:
            if detection[-1] > SLOW_DETECTION_S and len(detection) >= 3:
                break
            _, workers = spawn(8)
            continue
        heal_mesh(workers)
        workers.noop.call().get()
        healing.append(time.perf_counter() - began)
    times("death told", detection)
    times("death healed", healing)


def colds(plan: Plan) -> None:
    """In fresh interpreters."""
    program = str(Path(__file__).with_name("program_cold.py"))

    def run(mode: str) -> tuple[float, float]:
        done = subprocess.run([sys.executable, program, mode], stdout=subprocess.PIPE, check=True, timeout=100)
        total, spawned = map(float, done.stdout.split()[-2:])
        return total, spawned

    seconds = [run("program" if heal_mesh else "leave") for _ in range(plan.colds)]
    times("import to first reply, cold", [full for full, _ in seconds])
    times("spawn to first reply, cold", [spawned for _, spawned in seconds])
    if heal_mesh is not None:
        times("load_ext to first reply, cold", [run("notebook")[0] for _ in range(plan.colds)])


def main() -> int:
    plan = plan_of(sys.argv)
    monarch.actor.unhandled_fault_hook = lambda failure: None
    broken = 0
    for part in (colds, template, calls, casts, spawns, deaths, actors, idle, tensors):
        try:
            part(plan)
        except Exception:  # the other figures are worth having
            broken = 1
            traceback.print_exc()
    if heal_mesh is None:
        leave(broken)
    return broken


if __name__ == "__main__":
    sys.exit(main())
