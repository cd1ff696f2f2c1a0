"""Output of a script's processes, written where the script runs; in a notebook the cells show it instead."""

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TextIO

from monarch_nb.logs.lines import Line, Written, lines_of, merged, mesh_of, prefix
from monarch_nb.logs.mesh_logs import LogOptions, MeshLogs
from monarch_nb.runtime.output.displays import displays
from monarch_nb.settings import settings

STALE_SECONDS = 1.0  # after which a line without end is written
SILENCE_SECONDS = 5.0  # the longest wait for the next piece of output that was written before a reply,
LIMIT_SECONDS = 20.0  # and for all of it

logger = logging.getLogger(__name__)


class Windows:
    """Lines to write, some held in windows of time. Any thread may put; one at a time takes. Times are monotonic."""

    def __init__(self, options: LogOptions) -> None:
        self._options = options
        self._new: deque[Line] = deque()
        self._held: dict[str, tuple[float, list[Line]]] = {}  # by mesh: the end of the window, and its lines

    def put(self, written: Iterable[Written]) -> None:
        """Adds lines. Does not block."""
        for lines in written:
            self._new.extend(lines_of(lines))

    def take(self, now: float, *, all_of_it: bool = False) -> tuple[list[Line], list[Line]]:
        """Takes the lines that are due: single ones, and those of closed windows."""
        single: list[Line] = []
        while self._new:
            line = self._new.popleft()
            option = self._options.of(line.address)
            if option is None or (option.stream is not False and not option.window):
                single.append(line)
            elif option.stream is not False and option.window:
                self._held.setdefault(mesh_of(line.address), (now + option.window, []))[1].append(line)
        due = [uid for uid, (end, _) in self._held.items() if all_of_it or end <= now]
        return single, [line for uid in due for line in self._held.pop(uid)[1]]

    def wait(self, now: float) -> float | None:
        """Returns the seconds until the next window is over; None when nothing is held."""
        windows = tuple(self._held.values())
        return max(0.0, min(end for end, _ in windows) - now) if windows else None


class Forwarding:
    """A presenter. Lines are written by a thread of its own, never by the reading thread."""

    def __init__(self, logs: MeshLogs) -> None:
        self._logs = logs
        self._receiver = logs.receiver
        self._windows = Windows(logs.options)
        self._wake = threading.Event()
        self._writing = threading.Lock()  # one batch at a time, in order
        self._thread: threading.Thread | None = None
        self._closed = False
        self._stop_listening = self._receiver.listen(self._wrote)

    def close(self) -> None:
        """Writes all pending output, and nothing from then on."""
        if self._closed:
            return
        self.settle()
        self._closed = True
        self._stop_listening()
        self._wake.set()

    def settle(self) -> None:
        """Writes the output that preceded the replies and ends known here; blocks for it, not long."""
        self._receiver.drain(self._logs.positions.take(), silence=SILENCE_SECONDS, limit=LIMIT_SECONDS)
        self._receiver.cut_stale(0.0, progress=True)
        self.flush(all_of_it=True)

    def _wrote(self, address: str, written: Sequence[Written]) -> None:
        self._windows.put(written)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="monarch-output", daemon=True)
            self._thread.start()
        self._wake.set()

    def _work(self) -> None:
        while not self._closed:
            wait = self._windows.wait(time.monotonic())
            tick = min(wait or STALE_SECONDS, STALE_SECONDS / 2) if self._receiver.open_lines() else wait
            self._wake.wait(tick)
            self._wake.clear()
            try:
                self._receiver.cut_stale(STALE_SECONDS)
                self.flush()
            except Exception:
                logger.exception("output of processes could not be written")

    def flush(self, *, all_of_it: bool = False) -> None:
        """Writes all complete lines now, except those of open windows; with `all_of_it` these too."""
        with self._writing:
            lines, gathered = self._windows.take(time.monotonic(), all_of_it=all_of_it)
            text = ""
            for line in lines:
                if line.display is not None and displays.has_viewer:
                    _write(text)  # in a process of a mesh: to its own output
                    text = ""
                    displays.relay(line.display, line.call, line.address)
                elif line.display is None or line.text:
                    text += f"{self._prefix(line.address)}{line.text}\n"
            prefixed = settings.prefix_with_rank
            text += "".join(merged(gathered, self._logs.sources.of, named=True, prefixed=prefixed))
            _write(text)

    def _prefix(self, address: str) -> str:
        option = self._logs.options.of(address)
        streamed = settings.enable_log_forwarding or (option is not None and option.stream)
        outermost = not displays.has_viewer  # lines of a process get its rank at the receiver
        if settings.prefix_with_rank and (outermost or streamed):
            return prefix([self._logs.sources.of(address)], named=True)
        return ""


def _write(text: str) -> None:
    """Writes what standard output takes; it may have no reader any more, or not know all characters."""
    output: TextIO | None = sys.stdout  # None where the program was started without one
    if not text or output is None:
        return
    with suppress(OSError, ValueError):  # no reader, or closed: the logs have the lines
        try:
            output.write(text)
        except UnicodeEncodeError:
            encoding = getattr(output, "encoding", None) or "ascii"
            output.write(text.encode(encoding, "backslashreplace").decode(encoding))
        output.flush()
