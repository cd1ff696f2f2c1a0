"""How a program tells what it found: a line of JSON each. The runner does not count lines that only measure."""

import json
import os
import signal
import time
from typing import Any

now = time.perf_counter


def fact(name: str, value: Any) -> None:
    """Tells one thing that was found; what raises is shown as its user sees it."""
    if isinstance(value, BaseException):
        value = f"{type(value).__name__}: {value}"
    print(json.dumps({"fact": name, "value": value}), flush=True)


def since_start() -> float:
    """Seconds since this process began, to a hundredth."""
    with open("/proc/self/stat") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])  # proc(5): starttime
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def kill(pid: int) -> None:
    """What happens to a process at the worst moment."""
    os.kill(pid, signal.SIGKILL)
