"""Values that are made when somebody first looks at them."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Lazy(Generic[T]):
    """Calls `thunk` once, on the first `get`, and keeps what it returned. Safe to share between threads.

    If the thunk raises, so does `get`, and the next `get` tries again: a missing module can be imported meanwhile.
    """

    __slots__ = ("_lock", "_thunk", "_value")

    def __init__(self, thunk: Callable[[], T]) -> None:
        self._thunk: Callable[[], T] | None = thunk
        self._lock = threading.RLock()  # re-entrant: decoding a value may look at the mesh that it is in
        self._value: T

    @property
    def decoded(self) -> bool:
        """Whether the value is there already."""
        return self._thunk is None

    def get(self) -> T:
        """The value. Blocks while another thread is making it; raises what the thunk raises."""
        if self._thunk is None:
            return self._value
        with self._lock:
            if self._thunk is not None:
                self._value = self._thunk()
                self._thunk = None  # after the value: readers without the lock look at this first
            return self._value

    def __repr__(self) -> str:
        return f"Lazy({self._value!r})" if self.decoded else "Lazy(not decoded yet)"
