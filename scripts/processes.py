"""The processes that come of a run: a mark in their environment tells them from all others."""

import time
from collections.abc import Container

import psutil

MARK = "MONARCH_DEMO_RUN"  # in the environment of what is run, and so of every process that comes of it
GONE_SECONDS = 15.0


def left_behind(mark: str, seconds: float = GONE_SECONDS, but: Container[int] = ()) -> list[str]:
    """The processes that came of a run, `but` those, and are still there after `seconds`, ended now; each as a line."""
    deadline = time.monotonic() + seconds
    # Those that are there are waited for; only then is it worth looking at every process of the machine again.
    while (living := [found for found in marked(mark) if found.pid not in but]) and time.monotonic() < deadline:
        psutil.wait_procs(living, min(0.5, max(0.0, deadline - time.monotonic())))
    told = []
    for process in living:
        try:
            told.append(f"{process.pid} {' '.join(process.cmdline())[:160]}")
            process.kill()
        except psutil.NoSuchProcess:
            pass
    return told


def marked(mark: str) -> list[psutil.Process]:
    """The processes that came of a run and live."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            pass
    return found
