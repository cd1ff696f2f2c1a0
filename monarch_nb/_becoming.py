"""How a process that is part of nothing yet becomes a controller: the top package says it."""

from collections.abc import Callable

_become: Callable[[], None] | None = None


def set_becoming(become: Callable[[], None]) -> None:
    """`become` makes this process a controller, and installs it."""
    global _become
    _become = become


def become_controller() -> None:
    """Makes this process a controller."""
    assert _become is not None
    _become()
