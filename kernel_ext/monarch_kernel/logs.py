"""What the ranks print, shown in the cell that caused it: equal lines of several ranks once, with their ranks."""

import logging
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

from monarch_nb.logs.lines import Gathered, Line, Source, briefly, merged, options, prefix, source_of
from monarch_nb.logs.receiver import Output, Written
from monarch_nb.logs.view import log_file
from monarch_nb.runtime import ProcState

from .cells import Cells
from .folds import BELOW, Folds
from .front import Front
from .pacing import WAITING, Held, Pacing
from .rows import Row, Rows

FLUSH_SECONDS = 0.08  # how long lines are collected, so that equal ones meet
DRAIN_SECONDS = 1.0  # how long the end of a cell waits for lines that were written before its replies
STALE_SECONDS = 1.0  # a line without end is shown after that long
FOLD_SECONDS = 0.5  # how often what is held back is told,
CALM_SECONDS = 2.0  # and where what was said cannot be replaced, when no more of it was for that long
MOST_PIECES = 20  # messages of one batch, where stdout and stderr take turns

logger = logging.getLogger(__name__)


class _Waiting:
    """What one rank wrote in one cell and is not shown yet."""

    def __init__(self) -> None:
        self.written: list[Written] = []
        self.size = 0


class Logs:
    """Collects lines on the reading thread and writes them, in batches, from a thread of its own."""

    def __init__(self, front: Front, engine: Any, output: Output) -> None:
        self._front = front
        self._engine = engine
        self._output = output
        self._cells = Cells(front, engine)
        self._pacing = Pacing()
        self._rows = Rows(front)
        self._folds = Folds(front)
        self._gathered = Gathered(engine)
        self._lock = threading.Lock()  # over what is collected
        self._waiting: dict[str, _Waiting] = {}  # by address
        self._held: dict[str, Held] = {}
        self._skipped: dict[str, int] = {}
        front.beginning.append(self._begin)
        options().flush = lambda: self.settle(all_of_it=True)
        self._writing = threading.Lock()  # one batch at a time, in order
        self._wake = threading.Event()
        self._ended = False
        self._stop_listening = output.listen(self._wrote)
        self._thread = threading.Thread(target=self._work, name="monarch-cell-output", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Shows what is there and ends."""
        if self._begin in self._front.beginning:
            self._front.beginning.remove(self._begin)
        self._stop_listening()
        self._ended = True
        self._wake.set()
        self._thread.join(1.0)
        self.flush(all_of_it=True)
        self._cells.close()

    def _begin(self) -> None:
        with self._lock:
            self._pacing.anew()

    def _wrote(self, address: str, written: Sequence[Written]) -> None:
        if written:
            option = options().of(address)
            if option is not None and option.stream is False:
                return
            written = [briefly(one) for one in written]
            if option is not None and option.window:
                self._gathered.put(one for one in written if one.display is None)
                written = [one for one in written if one.display is not None]
            self._collect(address, written)
        self._wake.set()

    def _collect(self, address: str, written: Iterable[Written]) -> None:
        with self._lock:
            waiting = self._waiting.get(address) or self._waiting.setdefault(address, _Waiting())
            for one in written:
                if self._cells.of(one) is None:
                    continue
                if waiting.size > WAITING and one.display is None:
                    self._held.setdefault(address, Held()).add(one, one.text)
                    continue
                waiting.written.append(one)
                waiting.size += len(one.text)

    def _work(self) -> None:
        while not self._ended:
            # Polled while a line is open, for it may get stale without anything more coming.
            held = self._gathered.wait()
            busy = self._held or self._rows.waiting or self._output.open_lines()
            self._wake.wait(min(held or STALE_SECONDS, STALE_SECONDS / 2) if busy else held)
            self._wake.clear()
            time.sleep(FLUSH_SECONDS)
            try:
                self._cut(STALE_SECONDS, progress=False)
                self.flush()
            except Exception:  # a closed front end must not end the thread
                logger.debug("output could not be shown", exc_info=True)

    def flush(self, *, all_of_it: bool = False, displays: bool = False) -> None:
        """Writes all complete lines now, but those of windows that last; with `all_of_it` these too.

        With `displays` those too that were shown a moment ago and have changed again.
        """
        with self._writing:
            skipped = self._output.skipped()  # not under our lock: the reading thread takes both the other way round
            with self._lock:
                taken = {address: one.written for address, one in self._waiting.items() if one.written}
                self._waiting = {}
                shown = self._pacing.share(taken, self._held)
                held = self._told(skipped, all_of_it)
            shown.sort(key=lambda each: each[0])
            self._show([line for _, line in shown])
            self._rows.show_changed(named=self._several(), all_of_it=all_of_it or displays)
            self._show_held(held)
            _, gathered = self._gathered.take(all_of_it=all_of_it)
            text = "".join(merged(self._engine, gathered, named=self._several()))
            if text:
                self._front.write(text)

    def settle(self, *, all_of_it: bool = False) -> None:
        """Waits for, and writes, what was printed before the replies that came; with `all_of_it` open lines too."""
        positions = self._engine.log_positions.take()
        if positions:
            self._output.drain(positions, DRAIN_SECONDS)
        if all_of_it:
            self._cut(0.0, progress=True)
        self.flush(all_of_it=all_of_it, displays=True)

    def _cut(self, age: float, *, progress: bool) -> None:
        for place, (_, overwrites, seconds) in self._output.open_lines().items():
            if seconds >= age and (progress or not overwrites):
                self._output.cut(place)

    def progress(self) -> str:
        """How far the ranks' own progress bars are: their lines with carriage returns."""
        bars = [
            Line(address, text, stream, call)
            for (address, stream, call), (text, over, _) in self._output.open_lines().items()
            if over and text
        ]
        sources = {bar.address: source_of(self._engine, bar.address) for bar in bars}
        bars.sort(key=lambda bar: (sources[bar.address].uid, sources[bar.address].point))
        return self._text(bars).rstrip("\n")

    # -- what is held back ------------------------------------------------------------------------------------------

    def _told(self, skipped: dict[str, int], all_of_it: bool) -> dict[str, Held]:
        """What was held back and is to be told now. Under the lock."""
        now = time.monotonic()
        for address, count in skipped.items():
            lost = count - self._skipped.get(address, 0)
            if lost:
                self._skipped[address] = count
                self._held.setdefault(address, Held()).count += lost
        due = [address for address, held in self._held.items() if all_of_it or self._is_due(held, now)]
        return {address: self._held.pop(address) for address in due}

    def _is_due(self, held: Held, now: float) -> bool:
        return now - held.begun > FOLD_SECONDS if self._front.has_displays else now - held.since > CALM_SECONDS

    def _show_held(self, told: dict[str, Held]) -> None:
        for address, held in told.items():
            source = source_of(self._engine, address)
            path = log_file(self._engine, address)
            last = held.last[-1][1] if held.last else Line(address, "")
            if self._front.has_displays:
                self._folds.add(self._cell(last) or self._front.parent, source, path, held.count, held.last)
                continue
            below = [line for _, line in held.last][-BELOW:]
            said = f"… {held.count - len(below):,} lines are not shown; all are in {path} (%logs {source.name})"
            self._show([last._replace(text=said), *below])
        self._folds.show(self._text, named=self._several())

    def _text(self, lines: Iterable[Line]) -> str:
        return "".join(piece[2] for piece in self._pieces(lines) if not isinstance(piece, Row))

    def _cell(self, line: Line) -> Any:
        return self._cells.of(Written(line.address, line.stream, line.call, 0, 0.0, ""))

    # -- text -------------------------------------------------------------------------------------------------------

    def _show(self, lines: Iterable[Line]) -> None:
        pieces: list[tuple[Any, str, str]] = []
        for piece in self._pieces(lines):
            if isinstance(piece, Row):
                self._write(pieces)
                pieces = []
                self._rows.show(piece, named=self._several())
            elif pieces and pieces[-1][0] is piece[0] and pieces[-1][1] == piece[1]:
                pieces[-1] = (*piece[:2], pieces[-1][2] + piece[2])
            else:
                pieces.append(piece)
        self._write(pieces)

    def _write(self, pieces: list[tuple[Any, str, str]]) -> None:
        if len(pieces) > MOST_PIECES:
            joined: dict[tuple[int, str], tuple[Any, str, str]] = {}
            for cell, stream, text in pieces:
                before = joined.get((id(cell), stream), (cell, stream, ""))[2]
                joined[id(cell), stream] = (cell, stream, before + text)
            pieces = list(joined.values())
        for cell, stream, text in pieces:
            self._front.write(text, stream, cell)

    def _pieces(self, lines: Iterable[Line]) -> list[tuple[Any, str, str] | Row]:
        """Lines as they are shown: the cell, the stream and the text; equal ones once. Between them new displays."""
        groups: dict[Any, Row | tuple[Any, Line, list[Source]]] = {}
        repeats: dict[Line, int] = {}
        cells: dict[tuple[str, str], Any] = {}
        for line in lines:
            place = (line.address, line.call)
            if place not in cells:
                cells[place] = self._cell(line)
            cell = cells[place]
            source = source_of(self._engine, line.address)
            merges = options().merges(line.address)
            if line.display is not None and self._front.has_displays:
                row = self._rows.take(cell, line, source, merges=merges) if cell is not None else None
                if row is not None:
                    groups[row] = row
                continue
            if line.display is not None and not line.text:
                continue
            nth = repeats[line] = repeats.get(line, -1) + 1
            key = (id(cell), line.stream, source.uid, line.text, nth, "" if merges else line.address)
            found = groups.setdefault(key, (cell, line, []))
            assert not isinstance(found, Row)
            found[2].append(source)
        named = self._several()
        return [
            group
            if isinstance(group, Row)
            else (group[0], group[1].stream, f"{prefix(group[2], named=named)}{group[1].text}\n")
            for group in groups.values()
        ]

    def _several(self) -> bool:
        """Whether there are several meshes of processes, so that their names are needed."""
        known = tuple(self._engine.meshes.values())
        return len([m for m in known if isinstance(m, ProcState) and m.born is not None and m.stopped is None]) > 1
