"""Printed output of ranks in the cell that caused it: equal lines of several ranks once, with their ranks.

Calls are numbered, and each cell stores the number of its first call, by which the cell of a line is found.
"""

import bisect
import logging
import math
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

from monarch_nb.logs import Bar, Line, MeshLogs, Source, Windows, Written, briefly, merged, mesh_of
from monarch_nb.mesh.mesh_events import Event, MeshEvents, MeshSpawned, MeshStopped
from monarch_nb.runtime import ProcState, Runtime

from ..front import Front
from .grouping import LINES_BELOW, Folds, Grouping, TextPiece, merge_pieces
from .pacing import WAITING, HeldLines, Pacing
from .rows import DisplayRow, DisplayRows

MOST_CELLS = 2000  # cells
FLUSH_SECONDS = 0.08  # how long lines are collected, so that equal ones meet
SILENCE_SECONDS = 1.0  # the end of a cell waits for lines written before its replies while they come,
LIMIT_SECONDS = 10.0  # and for no longer than that
STALE_SECONDS = 1.0  # a line without end is shown after that long
FOLD_SECONDS = 0.5  # how often the counts of withheld output are shown,
CALM_SECONDS = 2.0  # and, where shown text cannot be replaced, how long output must pause before they are
logger = logging.getLogger(__name__)


class CallCells:
    """Maps numbers of calls to cells. One thread begins cells; any thread may ask."""

    def __init__(self, cell: Any) -> None:
        self._starts: tuple[list[int], list[object]] = ([0], [cell])  # first calls, and cells; replaced, not changed

    def begin(self, call: int, cell: object) -> None:
        """Starts a cell: this call and later ones belong to it."""
        calls, cells = self._starts
        self._starts = [*calls[1 - MOST_CELLS :], call], [*cells[1 - MOST_CELLS :], cell]

    def of(self, call: int) -> object:
        """Returns the cell of a call; the oldest stored cell for earlier calls."""
        calls, cells = self._starts
        return cells[max(0, bisect.bisect_right(calls, call) - 1)]


class Cells:
    """Maps output to cells. Cells begin on the kernel's thread; `of` is for any thread."""

    def __init__(self, front: Front, runtime: Runtime) -> None:
        self._front = front
        self._runtime = runtime
        self._events = runtime.part(MeshEvents)
        self._prefix = f"{runtime.address}:"
        self._calls = CallCells(front.parent)
        self._spawned: dict[str, object] = {}  # by mesh: the cell in which it was spawned
        front.beginning.append(self._begin)
        self._events.listeners.append(self._on_event)

    def close(self) -> None:
        """Stops listening."""
        if self._begin in self._front.beginning:
            self._front.beginning.remove(self._begin)
        if self._on_event in self._events.listeners:
            self._events.listeners.remove(self._on_event)

    def _begin(self) -> None:
        self._calls.begin(int(self._runtime.new_call().removeprefix(self._prefix)), self._front.parent)

    def _on_event(self, event: Event) -> None:
        match event:
            case MeshSpawned(ProcState(uid=uid)):
                self._spawned[uid] = self._front.parent
            case MeshStopped(ProcState(uid=uid)):
                self._spawned.pop(uid, None)
            case _:
                return

    def of(self, address: str, call: str) -> object:
        """Returns the cell of the lines of a process and a call; None if only the logs have them."""
        if not self._front.has_displays:
            return self._front.parent
        number = call.removeprefix(self._prefix)
        if number != call and number.isdecimal():
            return self._calls.of(int(number))
        state = self._runtime.meshes.get(mesh_of(address))
        if state is None or state.stopped is not None:  # its last words
            return self._front.parent
        initialized = getattr(state.spawn_spec, "initialized", None)
        if initialized is not None and not initialized.done():  # before the first call
            return self._spawned.get(state.uid)
        return None


class _Waiting:
    """Output of one rank for one cell that is not shown yet."""

    def __init__(self) -> None:
        self.written: list[Written] = []
        self.size = 0


class CellOutput:
    """A presenter of logs: collects lines on the reading thread and writes them, in batches, from one of its own."""

    def __init__(self, front: Front, logs: MeshLogs, cells: Cells) -> None:
        self._front = front
        self._mesh_logs = logs
        self._receiver = logs.receiver
        self._options = logs.options
        self._sources = logs.sources
        self._cells = cells
        self._pacing = Pacing()
        self._rows = DisplayRows(front)
        self._folds = Folds(front)
        self._windows = Windows(logs.options)
        self._grouping = Grouping(
            cell_of=self._cell,
            source_of=self._sources.of,
            merges=self._options.merges,
            take=self._take if front.has_displays else None,
        )
        self._lock = threading.Lock()  # guards the collected output
        self._waiting: dict[str, _Waiting] = {}  # by address
        self._backlogs: dict[str, HeldLines] = {}
        self._skipped: dict[str, int] = {}
        self._writing = threading.Lock()  # one batch at a time, in order
        self._wake = threading.Event()
        self._ended = False
        front.beginning.append(self._begin)
        self._stop_listening = self._receiver.listen(self._on_written)
        self._thread = threading.Thread(target=self._work, name="monarch-cell-output", daemon=True)

    def start(self) -> None:
        """Starts to show lines as they come, not only on request."""
        self._thread.start()

    def close(self) -> None:
        """Shows pending output and ends."""
        if self._ended:
            return
        self._ended = True
        if self._begin in self._front.beginning:
            self._front.beginning.remove(self._begin)
        self._stop_listening()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(1.0)
        try:
            self.flush(all_of_it=True)
        except Exception:  # the front end is closed
            logger.debug("output could not be shown", exc_info=True)

    def settle(self) -> None:
        """Waits for and shows output that was written before the received replies, unfinished lines included."""
        self._drain()
        self._receiver.cut_stale(0.0, progress=True)
        self.flush(all_of_it=True, displays=True)

    def settle_lines(self) -> None:
        """Shows whole lines and bars only: the call that has ended may not be the last one of its cell."""
        self._drain()
        self._receiver.cut_finished()
        self.flush(displays=True)

    def settle_replies(self) -> None:
        """Shows lines if there are new replies; nothing else must be shown before them."""
        if self._drain():
            self._receiver.cut_finished()
            self.flush(displays=True)

    def _drain(self) -> bool:
        """Waits for output that was written before the received replies; returns whether there were any."""
        positions = self._mesh_logs.positions.take()
        if positions:
            self._receiver.drain(positions, silence=SILENCE_SECONDS, limit=LIMIT_SECONDS)
        return bool(positions)

    def _begin(self) -> None:
        with self._lock:
            self._pacing.reset()

    # -- collecting -------------------------------------------------------------------------------------------------

    def _on_written(self, address: str, written: Sequence[Written]) -> None:
        if written:
            option = self._options.of(address)
            if option is not None and option.stream is False:
                return
            written = [briefly(block) for block in written]
            if option is not None and option.window:
                self._windows.put(block for block in written if block.display is None)
                written = [block for block in written if block.display is not None]
            self._collect(address, written)
        self._wake.set()

    def _collect(self, address: str, written: Iterable[Written]) -> None:
        with self._lock:
            waiting = self._waiting.get(address) or self._waiting.setdefault(address, _Waiting())
            for block in written:
                if self._cells.of(block.address, block.call) is None:
                    continue
                if waiting.size > WAITING and block.display is None:
                    self._backlogs.setdefault(address, HeldLines()).add(block, block.text)
                    continue
                waiting.written.append(block)
                waiting.size += len(block.text)

    def _work(self) -> None:
        while not self._ended:
            # Polled while a line is open, since it may get stale without further output.
            delay = self._windows.wait(time.monotonic())
            busy = self._backlogs or self._rows.waiting or self._receiver.open_lines()
            self._wake.wait(min(delay or STALE_SECONDS, STALE_SECONDS / 2) if busy else delay)
            self._wake.clear()
            time.sleep(FLUSH_SECONDS)
            try:
                self._receiver.cut_stale(STALE_SECONDS)
                self.flush()
            except Exception:  # a closed front end must not end the thread
                logger.debug("output could not be shown", exc_info=True)

    # -- showing ----------------------------------------------------------------------------------------------------

    def flush(self, *, all_of_it: bool = False, displays: bool = False) -> None:
        """Writes all complete lines now, except those of open windows; with `all_of_it` these too.

        With `displays` also displays that were shown a moment ago and have changed again.
        """
        with self._writing:
            skipped = self._receiver.skipped()  # not under our lock: the reading thread takes them in reverse order
            with self._lock:
                batches = {address: rank.written for address, rank in self._waiting.items() if rank.written}
                self._waiting = {}
                shown = self._pacing.share(batches, self._backlogs)
                due = self._due(skipped, all_of_it)
            shown.sort(key=lambda timed: timed[0])
            named = self._sources.several
            self._show([line for _, line in shown], named=named)
            self._rows.show_changed(named=named, all_of_it=all_of_it or displays)
            self._show_backlogs(due, named=named)
            _, gathered = self._windows.take(time.monotonic(), all_of_it=all_of_it)
            text = "".join(merged(gathered, self._sources.of, named=named))
            if text:
                self._front.write(text)

    def _show(self, lines: Iterable[Line], *, named: bool) -> None:
        pieces: list[TextPiece] = []
        for piece in self._grouping.pieces(lines, named=named):
            if isinstance(piece, DisplayRow):
                self._write(pieces)
                pieces = []
                self._rows.show(piece, named=named)
            else:
                pieces.append(piece)
        self._write(pieces)

    def _write(self, pieces: Sequence[TextPiece]) -> None:
        for piece in merge_pieces(pieces):
            self._front.write(piece.text, piece.stream, piece.cell)

    def _take(self, cell: Any, line: Line, source: Source, merges: bool) -> DisplayRow | None:
        return self._rows.take(cell, line, source, merges=merges)

    def _cell(self, line: Line) -> object:
        return self._cells.of(line.address, line.call)

    def progress(self) -> str:
        """Progress of the ranks' own progress bars: their lines with carriage returns.

        Ranks with the same bar have that of the slowest one.
        """
        bars = [
            (self._sources.of(bar.address), Line(bar.address, row, bar.stream, bar.call))
            for bar in self._receiver.open_lines()
            if bar.overwrites
            for row in bar.text.split("\n")
            if row
        ]
        bars.sort(key=lambda bar: (bar[0].uid, bar[0].point))
        return self._text(_level(bars)).rstrip("\n")

    def _text(self, lines: Iterable[Line]) -> str:
        pieces = self._grouping.pieces(lines, named=self._sources.several)
        return "".join(piece.text for piece in pieces if isinstance(piece, TextPiece))

    # -- withheld output --------------------------------------------------------------------------------------------

    def _due(self, skipped: dict[str, int], all_of_it: bool) -> dict[str, HeldLines]:
        """Withheld output whose count is due to be shown. Under the lock."""
        now = time.monotonic()
        for address, count in skipped.items():
            lost = count - self._skipped.get(address, 0)
            if lost:
                self._skipped[address] = count
                self._backlogs.setdefault(address, HeldLines()).count += lost
        due = [address for address, backlog in self._backlogs.items() if all_of_it or self._is_due(backlog, now)]
        return {address: self._backlogs.pop(address) for address in due}

    def _is_due(self, backlog: HeldLines, now: float) -> bool:
        return now - backlog.begun > FOLD_SECONDS if self._front.has_displays else now - backlog.since > CALM_SECONDS

    def _show_backlogs(self, due: dict[str, HeldLines], *, named: bool) -> None:
        for address, backlog in due.items():
            source = self._sources.of(address)
            path = self._mesh_logs.file(address)
            last = backlog.last[-1][1] if backlog.last else Line(address, "")
            if self._front.has_displays:
                self._folds.add(self._cell(last) or self._front.parent, source, path, backlog.count, backlog.last)
                continue
            below = [line for _, line in backlog.last][-LINES_BELOW:]
            notice = f"… {backlog.count - len(below):,} lines are not shown; all are in {path} (%logs {source.name})"
            self._show([last._replace(text=notice), *below], named=named)
        self._folds.show(self._text, named=named)


def _level(bars: Sequence[tuple[Source, Line]]) -> list[Line]:
    """Returns the lines of bars; equal bars of one mesh (title, total, values) show the progress of the slowest."""
    slowest: dict[object, tuple[float, str]] = {}
    keys = list[object]()
    for source, line in bars:
        bar = Bar.read(line.text)
        if bar is None or not bar.done.isdecimal():
            keys.append(None)
            continue
        keys.append(key := (source.uid, line.call, bar.title, bar.total, bar.values))
        slowest[key] = min(slowest.get(key, (math.inf, "")), (float(bar.done), line.text))
    return [
        line._replace(text=slowest[key][1]) if key is not None else line
        for key, (_, line) in zip(keys, bars, strict=True)
    ]
