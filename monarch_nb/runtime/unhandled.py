"""Where the hook is found that a program has set for failures that nobody handles."""

from collections.abc import Callable
from typing import Any

__all__ = ["fault_hook", "set_hook_lookup"]

_lookup: Callable[[], Callable[[Any], None] | None] = lambda: None  # noqa: E731 - replaced as a whole


def set_hook_lookup(lookup: Callable[[], Callable[[Any], None] | None]) -> None:
    """`lookup` gives the program's present hook; None where it has not set one."""
    global _lookup
    _lookup = lookup


def fault_hook(default: Callable[[Any], None]) -> Callable[[Any], None]:
    """The function to call with a failure that nobody handles."""
    return _lookup() or default
