"""What one thread prints, caught while the other threads of the process go on printing as before."""

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any, TextIO


class _Split:
    """Stands in for a stream: one thread's words go to `into`, all others' to `behind`."""

    def __init__(self, behind: TextIO, into: TextIO, thread: int) -> None:
        self._behind, self._into, self._thread = behind, into, thread

    @property
    def _now(self) -> TextIO:
        return self._into if threading.get_ident() == self._thread else self._behind

    def write(self, text: str) -> int:
        """Writes."""
        return self._now.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._now, name)


_lock = threading.Lock()


@contextlib.contextmanager
def redirected(into: TextIO) -> Iterator[None]:
    """What this thread prints goes into `into`."""
    with _lock:
        split = [(name, _Split(getattr(sys, name), into, threading.get_ident())) for name in ("stdout", "stderr")]
        for name, stream in split:
            setattr(sys, name, stream)
    try:
        yield
    finally:
        with _lock:
            for name, stream in split:
                if getattr(sys, name) is stream:
                    setattr(sys, name, stream._behind)
                else:  # another thread has put its own over it: it lets through what is not its own
                    stream._thread = 0
