"""The output of this process: the calls that it belongs to, and its position."""

import sys
import time
from collections.abc import Callable, Sequence
from typing import Protocol, TextIO

from monarch_nb.runtime.output import log_prefix
from monarch_nb.runtime.output.displays import displays

AT_ONCE_S = 0.001  # a call that begins this soon after another has ended gets no mark


class OutputSink(Protocol):
    """The destination of a process's output."""

    @property
    def texts(self) -> Sequence[TextIO]:
        """The streams that `position` flushes."""

    def tag_by(self, tag: Callable[[], tuple[str, int]], sole: Callable[[], str]) -> None:
        """Sets the functions that return the call of output: that of the running code, and the only one that runs."""

    def display(self, line: bytes, tag: tuple[str, int]) -> bool:
        """Writes a display. False if it cannot be written."""

    def mark(self) -> None:
        """Assigns output of C code and child processes since the last mark to the present call."""

    def position(self) -> int:
        """Returns the end of the output so far."""


class OwnLog:
    """Records the calls that run here. Methods from any thread; without a journal they do nothing.

    `running` returns the outermost call that the running code belongs to, "" for none.
    """

    def __init__(self, running: Callable[[], str]) -> None:
        self._running = running
        self._journal: OutputSink | None = None
        self._calls: list[str] = []  # the outermost calls of running code
        self._ended_at = float("-inf")  # when one of them ended last

    def keep(self, journal: OutputSink) -> None:
        """Sends output to files that are followed: replies carry its position, and text carries its call."""
        journal.tag_by(self.tag, self.sole)
        self._journal = journal
        displays.write_to(self)

    def display(self, line: bytes, call: str | None = None) -> bool:
        """Writes a display, for the running code or for a call. False if it cannot be written."""
        return self._journal is not None and self._journal.display(line, self.tag() if call is None else (call, 0))

    def begin(self, origin: str) -> None:
        """Begins a run for a call."""
        if self._journal is not None:
            if self._calls or time.monotonic() - self._ended_at > AT_ONCE_S:
                self._journal.mark()
            self._calls.append(origin)

    def end(self, origin: str, *, answered: bool = False) -> None:
        """Ends the run; with `answered`, the answer's position has marked its output."""
        if self._journal is not None:
            if not answered:
                self._journal.mark()
            self._ended_at = time.monotonic()
            if origin in self._calls:
                self._calls.remove(origin)

    def position(self) -> int:
        """Returns the position of the output; 0 if it is not stored."""
        if self._journal is None:
            return 0
        displays.flush()
        try:
            for text in (sys.stdout, sys.stderr):
                if text not in self._journal.texts:  # the program has replaced it
                    text.flush()
            return self._journal.position()
        except (OSError, ValueError):
            return 0

    def tag(self) -> tuple[str, int]:
        """Returns the call of the running code, or the only one that runs, and the level of its present log record."""
        return self._running() or self.sole(), log_prefix.level()

    def sole(self) -> str:
        """Returns the only call that runs, "" if there are none or several."""
        calls = set(self._calls)
        return calls.pop() if len(calls) == 1 else ""
