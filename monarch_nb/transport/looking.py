"""Waiting that looks before it sleeps: when a thread that waits may read messages by itself, and for how long.

Going to sleep and waking up is most of what an empty call costs. Where a host has processors to spare, a thread that
begins to wait looks for messages for a moment instead. Looking takes a processor, so it ends at once, and is left for
a while, where others want that processor or the interpreter's lock: where two looks are far apart.
"""

import os
import stat
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

__all__ = ["LOOK_S", "PAUSE_S", "Host", "Looking", "host_of"]

LOOK_S = 0.0003  # a look lasts that long at most
PAUSE_S = 0.00005  # two looks that far apart: something else ran between them
FIRST_REST_S, LAST_REST_S = 1.0, 60.0  # without looks, after such a pause
FIRST_MISS_S, LAST_MISS_S = 0.01, 1.0  # the same, after a look in vain
FRESH_S = 2.0  # what is known of the host is known anew after that long
_CALM = 1.0  # percent of the time in which something waited for a processor
_PRESSURE = Path("/proc/pressure/cpu")
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


class Host(Struct, frozen=True):
    """What there is to share on a host: processors that may be used, our processes, and the wait for processors.

    `pressure` is the percentage of the last ten seconds in which something waited for a processor; None if the kernel
    does not tell.
    """

    processors: int
    processes: int
    pressure: float | None

    @property
    def spares(self) -> bool:
        """Whether each of our processes can have one thread that works and one that looks, and two are left."""
        if self.pressure is None or self.processes < 1:
            return False
        return self.processes <= self.most_processes and self.pressure < _CALM

    @property
    def most_processes(self) -> int:
        """How many of our processes leave processors to spare."""
        return max(0, (self.processors - 2) // 2)


def host_of(run_folder: Path | None) -> Host:
    """The host of this process; its processes are those that listen in a run folder."""
    return Host(_processors(), _processes(run_folder), _pressure())


def _processors() -> int:
    try:
        usable = len(os.sched_getaffinity(0))
    except (AttributeError, OSError):
        return 0
    try:
        quota, period = _QUOTA.read_text().split()
        return usable if quota == "max" else min(usable, int(quota) // int(period))
    except (OSError, ValueError):
        return usable


def _processes(run_folder: Path | None) -> int:
    if run_folder is None:
        return 0
    try:
        with os.scandir(run_folder) as entries:
            return sum(stat.S_ISSOCK(entry.stat(follow_symlinks=False).st_mode) for entry in entries)
    except OSError:
        return 0


def _pressure() -> float | None:
    try:
        some = _PRESSURE.read_text().split()
        return float(some[1].removeprefix("avg10="))
    except (OSError, ValueError, IndexError):
        return None


class Looking:
    """Decides for one process. `mode` is "auto", "on" (whatever the host) or "off"; `host` is asked now and then."""

    def __init__(self, mode: str, host: Callable[[], Host]) -> None:
        self._mode, self._host = mode, host
        self._spares = mode == "on"
        self._known_at = float("-inf")
        self._rest_until = float("-inf")
        self._rest, self._miss = FIRST_REST_S, FIRST_MISS_S

    def seconds(self, now: float) -> float:
        """For how long a thread that begins to wait may look; 0 if it is to sleep at once."""
        if self._mode == "off" or now < self._rest_until:
            return 0.0
        if self._mode == "auto" and now - self._known_at >= FRESH_S:
            self._known_at, self._spares = now, self._host().spares
        return LOOK_S if self._spares else 0.0

    def found(self) -> None:
        """A look has ended with what was waited for."""
        self._rest, self._miss = FIRST_REST_S, FIRST_MISS_S

    def missed(self, now: float) -> None:
        """A look was in vain."""
        self._rest_until, self._miss = now + self._miss, min(2 * self._miss, LAST_MISS_S)

    def paused(self, now: float) -> None:
        """Something else has run between two looks."""
        self._rest_until, self._rest = now + self._rest, min(2 * self._rest, LAST_REST_S)
