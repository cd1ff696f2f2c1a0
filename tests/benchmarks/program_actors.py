"""The small program, on the API that ours and torchmonarch share: run by either one's interpreter."""

import os
import signal
import sys
import time
from typing import Any

import numpy as np
from measure import Plan, figure, leave, plan_of, rate, repeat, times

import monarch.actor
from monarch.actor import Actor, endpoint, this_host

heal_mesh = getattr(monarch.actor, "heal_mesh", None)
MEGABYTE = 1 << 20
SLOW_TELLING_S = 2.0  # where deaths take that long to be told, a few are enough


class Worker(Actor):
    @endpoint
    def noop(self, *arguments: Any) -> None:
        return None

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
    one = four.slice(gpus=0)
    times("call_one", repeat(plan.calls, lambda: one.noop.call_one().get()))
    times("call on 4", repeat(plan.casts, lambda: four.noop.call().get()))

    def pipelined() -> None:
        for future in [one.noop.call_one() for _ in range(plan.pipelined)]:
            future.get()

    figure("pipelined", value=rate(repeat(3, pipelined, warm=1), plan.pipelined))
    megabyte = np.ones(MEGABYTE, np.uint8)
    times("1 MB argument", repeat(plan.megabyte, lambda: one.noop.call_one(megabyte).get()))
    big = np.ones(64 * MEGABYTE, np.uint8)
    figure("64 MB argument", value=rate(repeat(plan.big, lambda: one.noop.call_one(big).get()), big.nbytes / 1e9))
    procs.stop().get()


def casts(plan: Plan) -> None:
    procs, eight = spawn(8)
    times("call on 8", repeat(plan.casts, lambda: eight.noop.call().get()))
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
    told: list[float] = []
    healed: list[float] = []
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
            told.append(time.perf_counter() - began)
        if heal_mesh is None:
            if told[-1] > SLOW_TELLING_S and len(told) >= 3:
                break
            _, workers = spawn(8)
            continue
        heal_mesh(workers)
        workers.noop.call().get()
        healed.append(time.perf_counter() - began)
    times("death told", told)
    times("death healed", healed)


def main() -> None:
    plan = plan_of(sys.argv)
    monarch.actor.unhandled_fault_hook = lambda failure: None
    began = time.perf_counter()
    procs, _ = spawn(1)
    figure("first reply, cold", value=(time.perf_counter() - began) * 1000)
    procs.stop().get()
    for part in (calls, casts, spawns, deaths):
        part(plan)
    if heal_mesh is None:
        leave()


if __name__ == "__main__":
    main()
