"""Interrupts of what actors run, and what they were found doing."""

import linecache
import os
import sys
import time
from collections.abc import Mapping
from types import FrameType
from typing import TYPE_CHECKING

import msgspec

from monarch_nb.runtime.cancelled import CancelledCalls
from monarch_nb.runtime.cell import ActorCell
from monarch_nb.runtime.roles import Answers
from monarch_nb.transport import Clock
from monarch_nb.wire import Header, Status

if TYPE_CHECKING:
    from monarch_nb.transport import Parcel

INTERRUPT, DOING = "actor.interrupt", "actor.doing"
REACTS_WITHIN = 0.7  # seconds after which who asked is told that an interrupt has not ended what runs
LOOKS_EVERY = 0.02
_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_LIBRARY = os.path.dirname(os.__file__) + os.sep


class Interrupt(msgspec.Struct, array_like=True, frozen=True):
    """actor.interrupt: raises KeyboardInterrupt in what one rank runs. Calls of `drop` that have not begun never do."""

    mesh: str
    rank: int
    drop: tuple[str, ...] = ()


class Doing(msgspec.Struct, array_like=True, frozen=True):
    """What one rank does: the endpoint it runs, "" for none, and the innermost line of the user's that it is in."""

    call: str = ""
    endpoint: str = ""
    seconds: float = 0.0  # since it began
    ended: bool = False  # an interrupt has ended it
    file: str = ""
    line: int = 0
    source: str = ""


class Interruptions:
    """Carries out interrupts that come from other processes, and says what came of them."""

    def __init__(
        self, answers: Answers, cells: Mapping[tuple[str, int], ActorCell], cancelled: CancelledCalls, clock: Clock
    ) -> None:
        self._answers, self._cells, self._cancelled, self._clock = answers, cells, cancelled, clock

    def interrupt(self, header: Header, parcel: "Parcel") -> None:
        """Somebody interrupts an actor here (reading thread)."""
        request = msgspec.msgpack.decode(parcel.frames[0], type=Interrupt)
        cell = self._cells.get((request.mesh, request.rank))
        running = cell.running_now() if cell is not None else {}
        for call in request.drop:
            if call not in running:
                self._cancelled.add(call)
        if cell is None or not running:
            self._answers.answer(header, Status.VALUE, Doing())
            return
        before = _doing(cell)
        cell.interrupt()
        if header.port:
            self._follow(header, cell, running, before)

    def _follow(self, header: Header, cell: "ActorCell", running: dict[str, object], before: Doing) -> None:
        until = time.monotonic() + REACTS_WITHIN

        def look() -> bool:
            now = cell.running_now()
            if not any(now.get(call) is mark for call, mark in running.items()):
                self._answers.answer(header, Status.VALUE, msgspec.structs.replace(before, ended=True))
                return False
            if time.monotonic() < until:
                return True
            self._answers.answer(header, Status.VALUE, _doing(cell))
            return False

        self._clock.every(LOOKS_EVERY, look)

    def doing(self, header: Header, parcel: "Parcel") -> None:
        """Somebody asks what an actor here does (reading thread)."""
        mesh, rank = msgspec.msgpack.decode(parcel.frames[0], type=tuple[str, int])
        cell = self._cells.get((mesh, rank))
        self._answers.answer(header, Status.VALUE, _doing(cell) if cell is not None else Doing())


def _doing(cell: "ActorCell") -> Doing:
    running = cell.running
    if running is None:
        return Doing()
    call, endpoint, since = running
    file, line, source = "", 0, ""
    frame = _users(sys._current_frames().get(cell.executor.thread.ident or 0))
    if frame is not None:
        file, line = frame.f_code.co_filename, frame.f_lineno
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
