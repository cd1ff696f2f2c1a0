"""How a program reports its facts: a line of JSON each. The runner does not count lines that only measure."""

import json
import os
import re
import signal
import time
import traceback
from typing import Any

ANSI = re.compile(r"\x1b\[[0-9;]*m")
now = time.perf_counter


def fact(name: str, value: Any) -> None:
    """Reports one fact; of an exception, all that its user sees where nobody catches it."""
    if isinstance(value, BaseException):
        own = getattr(value, "_render_traceback_", None)  # what IPython asks for
        value = "\n".join(own()) if own is not None else "".join(traceback.format_exception(value))
        value = ANSI.sub("", value)
    print(json.dumps({"fact": name, "value": value}), flush=True)


def since_start() -> float:
    """Seconds since this process began, to a hundredth."""
    with open("/proc/self/stat") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])  # proc(5): starttime
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def kill(pid: int) -> None:
    """Kills a process without warning."""
    os.kill(pid, signal.SIGKILL)
