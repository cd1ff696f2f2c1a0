"""Waiting for facts that nobody reports: of the operating system, of other processes and threads."""

import time
from collections.abc import Callable


def until(condition: Callable[[], object], description: str = "it", timeout: float = 40) -> None:
    """Polls until the condition is true."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"{description} did not come true within {timeout} s"
        time.sleep(0.005)
