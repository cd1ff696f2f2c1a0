"""Interrupts of what actors run, and what they were found doing."""

import linecache
import os
import sys
import time
from collections.abc import Callable, Mapping
from types import FrameType

import msgspec

from monarch_nb.runtime.actors.cell import ActorCell
from monarch_nb.runtime.cancelled import CancelledCalls
from monarch_nb.runtime.verbs import Doing, Interrupt, WhatRuns
from monarch_nb.transport import Clock
from monarch_nb.wire import Asker

FREES_AFTER = 0.2  # seconds after which what an interrupt has not ended is freed from the process groups it waits in
FREES_WITHIN = 30.0  # seconds in which it is freed; then it takes another interrupt
REACTS_WITHIN = 0.7  # seconds after which who asked is told that an interrupt has not ended what runs
LOOKS_EVERY = 0.02
_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_LIBRARY = os.path.dirname(os.__file__) + os.sep


class Interruptions:
    """Carries out interrupts that come from other processes, and says what came of them."""

    def __init__(
        self,
        cells: Mapping[tuple[str, int], ActorCell],
        cancelled: CancelledCalls,
        clock: Clock,
        free: Callable[[ActorCell], bool],
    ) -> None:
        """`free` ends what an actor waits in, in process groups of torch.distributed; True if it did."""
        self._cells, self._cancelled, self._clock, self._free = cells, cancelled, clock, free

    def interrupt(self, request: Interrupt, asker: Asker[Doing]) -> Doing | None:
        """Somebody interrupts an actor here (reading thread)."""
        cell = self._cells.get((request.mesh, request.rank))
        running = cell.running_now() if cell is not None else {}
        for call in request.drop if cell is None or cell.struck is None else ():
            if call not in running:
                self._cancelled.add(call)
        if cell is None or not running:
            return Doing()
        before = _doing(cell)
        cell.interrupt()
        self._follow(asker, cell, running, before)
        return None

    def _follow(self, asker: Asker[Doing], cell: ActorCell, running: dict[str, object], before: Doing) -> None:
        began, freed, answered, look_at = time.monotonic(), False, False, FREES_AFTER

        def look() -> bool:
            nonlocal freed, answered, look_at
            now, passed = cell.running_now(), time.monotonic() - began
            if not any(now.get(call) is mark for call, mark in running.items()):
                if not answered:
                    asker.reply(msgspec.structs.replace(before, ended=True, freed=freed))
                return False
            if passed >= look_at:  # again and again: it may come to a collective in what it does now
                look_at = passed * 1.2
                freed |= "torch.distributed" in sys.modules and self._free(cell)
            if passed >= REACTS_WITHIN and not answered:
                answered = True
                asker.reply(msgspec.structs.replace(_doing(cell), freed=freed))
            return passed < FREES_WITHIN

        self._clock.every(LOOKS_EVERY, look)

    def doing(self, which: WhatRuns, asker: Asker[Doing]) -> Doing:
        """Somebody asks what an actor here does (reading thread)."""
        cell = self._cells.get((which.mesh, which.rank))
        return _doing(cell) if cell is not None else Doing()


def _doing(cell: "ActorCell") -> Doing:
    running = cell.running
    if running is None:
        return Doing()
    call, endpoint, since = running
    file, line, source = "", 0, ""
    frame = _users(sys._current_frames().get(cell.executor.thread.ident or 0))
    if frame is not None:
        # Between two lines a frame may be at none.
        file, line = frame.f_code.co_filename, frame.f_lineno or frame.f_code.co_firstlineno
        source = linecache.getline(file, line).strip()
    return Doing(call, endpoint, time.monotonic() - since, file=file, line=line, source=source)


def _users(frame: FrameType | None) -> FrameType | None:
    """The innermost frame that is of the user's program; of a library where there is none."""
    first = None
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_PACKAGE):
            if first is not None and not file.endswith(("sleeping.py", "future.py")):
                break  # what is above the endpoint
        elif not file.startswith((_LIBRARY, "<frozen")):
            return frame
        elif first is None:
            first = frame
        frame = frame.f_back
    return first
