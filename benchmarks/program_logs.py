"""Calls while eight ranks write 1 MB/s each, beside the same calls without; and whether every line is in the files."""

import asyncio
import sys
import time
from pathlib import Path

from measure import figure, plan_of, times

from monarch.actor import Actor, ProcMesh, current_rank, endpoint, this_host

RANKS = 8
LINES_A_SECOND = 10_000  # of 100 bytes


class Flooder(Actor):
    """Writes at a steady rate, in bursts of a hundredth of a second."""

    @endpoint
    def flood(self, seconds: float) -> int:
        rank, begun, written = current_rank().rank, time.monotonic(), 0
        while time.monotonic() - begun < seconds:
            for _ in range(LINES_A_SECOND // 100):
                print(f"rank {rank} line {written}".ljust(99, "."))
                written += 1
            time.sleep(max(0.0, begun + written / LINES_A_SECOND - time.monotonic()))
        return written


class Echo(Actor):
    """Answers."""

    @endpoint
    def echo(self, number: int) -> int:
        return number


def calls(echo: Echo, seconds: float) -> list[float]:
    """How long single calls took, one after the other."""
    durations = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        begun = time.perf_counter()
        echo.echo.call_one(1).get()
        durations.append(time.perf_counter() - begun)
    return durations


def share(procs: ProcMesh, written: int) -> float:
    """The share of the lines that is in the log files, once nothing is added any more."""
    end = time.monotonic() + 20
    count = 0
    while count < written and time.monotonic() < end:
        time.sleep(0.1)
        paths = [Path(path) for path in procs.logs(last=0).files.values()]
        files = [file for path in paths for file in path.parent.glob(f"{path.name}*")]
        count = sum(file.read_bytes().count(b" line ") for file in files)
    return count / written


def main() -> None:
    plan = plan_of(sys.argv)
    seconds = plan.idle_s / 2
    procs: ProcMesh = this_host().spawn_procs(per_host={"gpus": RANKS}, name="flood")
    asyncio.run(procs.logging_option(stream_to_client=False))  # the logs have it; the terminal need not
    echo = procs.slice(gpus=0).spawn("echo", Echo)
    flooders = procs.spawn("flooders", Flooder)
    written = sum(flooders.flood.call(0.1).get().values())
    calls(echo, seconds / 10)
    idle = calls(echo, seconds)
    flood = flooders.flood.call(1.2 * seconds)
    time.sleep(seconds / 10)
    busy = calls(echo, seconds)
    in_flood = sum(flood.get().values())
    times("call_one, idle", idle)
    times("call_one, 8 ranks write", busy)
    ratio = sorted(busy)[len(busy) // 2] / sorted(idle)[len(idle) // 2]
    figure("logs", ratio=ratio, rate=in_flood / (1.2 * seconds) / 1e4, kept=100 * share(procs, written + in_flood))
    procs.stop().get()


if __name__ == "__main__":
    main()
