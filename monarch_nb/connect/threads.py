"""Work that is waited for, on threads that no end of a program waits for, as it would for those of a pool."""

import threading
from collections.abc import Callable
from typing import TypeVar

from monarch_nb.runtime import Future, fail_future, pending_future, resolve_future

T = TypeVar("T")


def begun(function: Callable[[], T], name: str = "monarch-attach") -> Future[T]:
    """What the function gives, on a thread of its own."""
    future: Future[T] = pending_future()

    def run() -> None:
        try:
            resolve_future(future, function())
        except BaseException as error:
            fail_future(future, error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
