"""`python -m tests.benchmarks.logs`: calls while eight ranks write 1 MB/s each, beside the same calls without.

The issue asks for no more than twice the idle p50. Prints figures as the other programs do, and the ratio.
"""

import asyncio
import sys
import time

from monarch.actor import Actor, ProcMesh, current_rank, endpoint, this_host
from tests.benchmarks.measure import times

RANKS = 8
LINES_A_SECOND = 10_000  # of 100 bytes
TARGET = 2.0


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
    found = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        begun = time.perf_counter()
        echo.echo.call_one(1).get()
        found.append(time.perf_counter() - begun)
    return found


def main(argv: list[str]) -> int:
    seconds = float(argv[0]) if argv else 5.0
    procs: ProcMesh = this_host().spawn_procs(per_host={"gpus": RANKS}, name="flood")
    asyncio.run(procs.logging_option(stream_to_client=False))  # the logs have it; the terminal need not
    echo = procs.slice(gpus=0).spawn("echo", Echo)
    flooders = procs.spawn("flooders", Flooder)
    flooders.flood.call(0.1).get()
    calls(echo, 0.5)
    idle = calls(echo, seconds)
    flood = flooders.flood.call(seconds + 1.0)
    time.sleep(0.5)
    busy = calls(echo, seconds)
    written = sum(flood.get().values())
    times("call_one, idle", idle)
    times("call_one, 8 ranks write", busy)
    ratio = sorted(busy)[len(busy) // 2] / sorted(idle)[len(idle) // 2]
    missed = procs.logs("nothing has this text").missing
    print(f"p50 under the flood is {ratio:.2f} times that of idle (target: {TARGET:g})")
    print(f"{written / (seconds + 1):,.0f} lines/s were written, {missed:,} lines came to the files only")
    procs.stop().get()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
