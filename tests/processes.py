"""Processes of the operating system: whether they run, and how to stop one so that it does nothing more."""

import os
import signal
import sys
import time
from pathlib import Path


def proc_stat(folder: Path) -> list[str]:
    """Fields of a process or thread in /proc, from its state on. Raises OSError if it has ended."""
    return (folder / "stat").read_text().rpartition(")")[2].split()


def alive(pid: int) -> bool:
    """Whether a process runs; zombies do not."""
    try:
        return proc_stat(Path(f"/proc/{pid}"))[0] != "Z"
    except OSError:
        return False


def freeze(pid: int) -> None:
    """Stops a process; returns when none of its threads runs any more. SIGCONT wakes it."""
    os.kill(pid, signal.SIGSTOP)  # which only asks: on the other core it may answer one more call
    deadline = time.monotonic() + 20
    while any(_runs(task) for task in Path(f"/proc/{pid}/task").iterdir()):
        assert time.monotonic() < deadline, f"process {pid} does not stop"
        time.sleep(0.001)


def _runs(task: Path) -> bool:
    try:
        return proc_stat(task)[0] not in "TtXZ"
    except FileNotFoundError:
        return False


def say(*words: object) -> None:
    """Writes one line for the test that has started this program; in one piece, as ranks' lines come meanwhile."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()
