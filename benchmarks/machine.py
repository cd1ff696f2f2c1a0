"""The machine on which figures were measured."""

import os
import platform
from pathlib import Path


def load() -> float:
    """The load average of the last minute."""
    return os.getloadavg()[0]


def processor() -> str:
    """Its name, as the system has it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
