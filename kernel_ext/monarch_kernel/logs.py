"""What the ranks print, shown in the cell that is running: equal lines of several ranks once, with their ranks."""

import logging
import threading
import time
from collections.abc import Iterable
from typing import Any

from monarch_nb.mesh.log_lines import Gathered, Line, Source, merged, options, prefix, source_of
from monarch_nb.mesh.output import Output
from monarch_nb.mesh.state import ProcState

from .front import Front

FLUSH_SECONDS = 0.08  # how long lines are collected, so that equal ones meet
DRAIN_SECONDS = 1.0  # how long the end of a cell waits for lines that were written before its replies
STALE_SECONDS = 1.0  # a line without end is shown after that long
MOST_LINES = 1000  # of one flush; a notebook with more than that is of no use to anybody

logger = logging.getLogger(__name__)


class Logs:
    """Collects lines on the reading thread and writes them, in batches, from a thread of its own."""

    def __init__(self, front: Front, engine: Any, output: Output) -> None:
        self._front = front
        self._engine = engine
        self._output = output
        self._lines = Gathered(engine)
        options().flush = lambda: self.settle(all_of_it=True)
        self._writing = threading.Lock()  # one batch at a time, in order
        self._wake = threading.Event()
        self._ended = False
        self._stop_listening = output.listen(self._wrote)
        self._thread = threading.Thread(target=self._work, name="monarch-cell-output", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Shows what is there and ends."""
        self._stop_listening()
        self._ended = True
        self._wake.set()
        self._thread.join(1.0)
        self.flush(all_of_it=True)

    def _wrote(self, address: str, lines: list[str]) -> None:
        self._lines.put(address, lines)
        self._wake.set()

    def _work(self) -> None:
        while not self._ended:
            # Polled while a line is open, for it may get stale without anything more coming.
            held = self._lines.wait()
            self._wake.wait(min(held or STALE_SECONDS, STALE_SECONDS / 2) if self._output.open_lines() else held)
            self._wake.clear()
            time.sleep(FLUSH_SECONDS)
            try:
                self._cut(STALE_SECONDS, progress=False)
                self.flush()
            except Exception:  # a closed front end must not end the thread
                logger.debug("output could not be shown", exc_info=True)

    def flush(self, *, all_of_it: bool = False) -> None:
        """Writes all complete lines now, but those of windows that last; with `all_of_it` these too."""
        with self._writing:
            lines, gathered = self._lines.take(all_of_it=all_of_it)
            if lines or gathered:
                self._front.write(self._text(lines, gathered))

    def settle(self, *, all_of_it: bool = False) -> None:
        """Waits for, and writes, what was printed before the replies that came; with `all_of_it` open lines too."""
        marks = self._engine.log_marks
        if marks:
            self._engine.log_marks = {}
            self._output.drain(marks, DRAIN_SECONDS)
        if all_of_it:
            self._cut(0.0, progress=True)
        self.flush(all_of_it=all_of_it)

    def _cut(self, age: float, *, progress: bool) -> None:
        for address, (_, overwrites, seconds) in self._output.open_lines().items():
            if seconds >= age and (progress or not overwrites):
                line = self._output.cut(address)
                if line:
                    self._lines.put(address, [line])

    def progress(self) -> str:
        """How far the ranks' own progress bars are: their lines with carriage returns."""
        bars = [(address, text) for address, (text, over, _) in self._output.open_lines().items() if over and text]
        return self._text(bars).rstrip("\n")

    # -- text -------------------------------------------------------------------------------------------------------

    def _text(self, lines: Iterable[Line], gathered: Iterable[Line] = ()) -> str:
        groups: dict[tuple[str, str, int], list[Source]] = {}
        repeats: dict[tuple[str, str], int] = {}
        for address, line in lines:
            source = source_of(self._engine, address)
            nth = repeats[address, line] = repeats.get((address, line), -1) + 1
            groups.setdefault((source.uid, line, nth), []).append(source)
        named = self._several()
        shown = [f"{prefix(sources, named=named)}{line}\n" for (_, line, _), sources in groups.items()]
        shown += merged(self._engine, gathered, named=named)
        if len(shown) > MOST_LINES:
            hidden = len(shown) - MOST_LINES
            shown[MOST_LINES // 2 : -(MOST_LINES // 2)] = [f"… {hidden} lines are not shown\n"]
        return "".join(shown)

    def _several(self) -> bool:
        """Whether there are several meshes of processes, so that their names are needed."""
        known = tuple(self._engine.meshes.values())
        return len([m for m in known if isinstance(m, ProcState) and m.born is not None and m.stopped is None]) > 1
