"""Breakpoints that code asks for itself."""

import sys
from typing import Any

from monarch_nb.runtime.features import stop_here


def breakpoint_if(condition: Any, reason: str = "") -> None:
    """Stops the actor that calls it if `condition` is true; in a process without actors it is `breakpoint()`.

    Costs no more than the test where it is false.
    """
    if condition:
        stop_here(sys._getframe(1), reason or "breakpoint_if()")
