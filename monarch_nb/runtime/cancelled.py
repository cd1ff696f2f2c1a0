"""Calls that were cancelled: those whose messages still come here are not run."""

import asyncio
from collections import OrderedDict

REMEMBERED = 4096  # cancelled calls whose messages may still be waiting, or on their way


class CancelledCalls:
    """Remembers the latest of them."""

    def __init__(self) -> None:
        self._calls: OrderedDict[str, None] = OrderedDict()

    def __contains__(self, call: str) -> bool:
        return call in self._calls

    def add(self, call: str) -> None:
        """A call that has not begun here never will; its message may yet come, as control goes a way of its own."""
        self._calls[call] = None
        while len(self._calls) > REMEMBERED:
            self._calls.popitem(last=False)


def not_run() -> asyncio.CancelledError:
    """What a message that is never run is answered with, so that agents stop waiting for its answer."""
    return asyncio.CancelledError("the call was cancelled before it ran")
