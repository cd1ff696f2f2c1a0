"""Meshes whose ranks are simulated: programs run on them without processes and without values, in simulated time."""

import sys
from collections.abc import Callable


def _write(simulator: object) -> None:
    sys.stdout.write(f"{simulator!r}\n")


show: Callable[[object], object] = _write  # how `Simulator.display` shows a simulator; a notebook has its own
