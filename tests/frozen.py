"""Stopping a process so that it does nothing more, not even what it was just at."""

import os
import signal
import time
from pathlib import Path


def freeze(pid: int) -> None:
    """Stops a process; returns when none of its threads runs any more. SIGCONT wakes it."""
    os.kill(pid, signal.SIGSTOP)  # which only asks: on the other core it may answer one more call
    tasks = Path(f"/proc/{pid}/task")
    deadline = time.monotonic() + 20
    while any(_state(task) not in "TtXZ" for task in tasks.iterdir()):
        assert time.monotonic() < deadline, f"process {pid} does not stop"
        time.sleep(0.001)


def _state(task: Path) -> str:
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "X"
