"""The processes of a run: a mark in their environment distinguishes them from all others."""

import time
from collections.abc import Container

import psutil

MARK = "MONARCH_DEMO_RUN"  # in the environment of the run, and so of every process that it starts
GONE_SECONDS = 15.0


def left_behind(mark: str, seconds: float = GONE_SECONDS, but: Container[int] = ()) -> list[str]:
    """Ends the processes of a run, `but` those, that still live after `seconds`; a line for each."""
    deadline = time.monotonic() + seconds
    # Waits for these first: reading every process of the machine again takes long.
    while (living := [process for process in marked(mark) if process.pid not in but]) and time.monotonic() < deadline:
        psutil.wait_procs(living, min(0.5, max(0.0, deadline - time.monotonic())))
    lines = []
    for process in living:
        try:
            lines.append(f"{process.pid} {' '.join(process.cmdline())[:160]}")
            process.kill()
        except psutil.NoSuchProcess:
            pass
    return lines


def marked(mark: str) -> list[psutil.Process]:
    """The living processes of a run."""
    processes = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                processes.append(process)
        except psutil.Error:
            pass
    return processes
