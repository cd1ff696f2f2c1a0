"""The small program on Ray."""

import os
import signal
import sys
import time
from typing import Any

import numpy as np
import ray
from measure import Plan, figure, plan_of, rate, repeat, times

MEGABYTE = 1 << 20


@ray.remote(num_cpus=0, max_restarts=-1)
class Worker:
    def noop(self, *arguments: Any) -> None:
        return None

    def pid(self) -> int:
        return os.getpid()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def spawn(count: int) -> list[Any]:
    workers = [Worker.remote() for _ in range(count)]
    ray.get([worker.noop.remote() for worker in workers])
    return workers


def stop(workers: list[Any]) -> None:
    for worker in workers:
        ray.kill(worker)


def calls(plan: Plan) -> None:
    four = spawn(4)
    first = four[0]
    times("call_one", repeat(plan.calls, lambda: ray.get(first.noop.remote())))
    times("call on 4", repeat(plan.casts, lambda: ray.get([worker.noop.remote() for worker in four])))
    figure(
        "pipelined",
        value=rate(
            repeat(3, lambda: ray.get([first.noop.remote() for _ in range(plan.pipelined)]), warm=1), plan.pipelined
        ),
    )
    megabyte = np.ones(MEGABYTE, np.uint8)
    times("1 MB argument", repeat(plan.megabyte, lambda: ray.get(first.noop.remote(megabyte))))
    big = np.ones(64 * MEGABYTE, np.uint8)
    figure("64 MB argument", value=rate(repeat(plan.big, lambda: ray.get(first.noop.remote(big))), big.nbytes / 1e9))
    stop(four)


def casts(plan: Plan) -> None:
    eight = spawn(8)
    times("call on 8", repeat(plan.casts, lambda: ray.get([worker.noop.remote() for worker in eight])))
    stop(eight)


def spawns(plan: Plan) -> None:
    seconds = []
    for _ in range(plan.spawns):
        began = time.perf_counter()
        workers = spawn(8)
        seconds.append(time.perf_counter() - began)
        stop(workers)
    times("8 procs to first reply", seconds)


def deaths(plan: Plan) -> None:
    """Ray brings its actors back by itself; calls fail until it has."""
    detection: list[float] = []
    healing: list[float] = []
    workers = spawn(8)
    for kill in range(plan.kills):
        victim = workers[kill % 8]
        pid = ray.get(victim.pid.remote())
        under_way = victim.sleep.remote(60)
        time.sleep(0.05)
        began = time.perf_counter()
        os.kill(pid, signal.SIGKILL)
        try:
            ray.get(under_way)
        except ray.exceptions.RayActorError:
            detection.append(time.perf_counter() - began)
        while True:
            try:
                ray.get([worker.noop.remote() for worker in workers])
                break
            except ray.exceptions.RayActorError:
                time.sleep(0.001)
        healing.append(time.perf_counter() - began)
    times("death told", detection)
    times("death healed", healing)


def main() -> None:
    plan = plan_of(sys.argv)
    began = time.perf_counter()
    # In the folder that goes away after the run; Ray's sockets lie in it too, so its name is short.
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, _temp_dir=f"{os.getcwd()}/r")
    stop(spawn(1))
    figure("first reply, cold", value=(time.perf_counter() - began) * 1000)
    for part in (calls, casts, spawns, deaths):
        part(plan)
    ray.shutdown()


if __name__ == "__main__":
    main()
