"""The breakpoints that controllers want in all actors of a process, those that come included."""

import linecache
import os
import re
import threading
import weakref
from collections.abc import Callable

import msgspec

from monarch_nb.debug.errors import DebugError
from monarch_nb.debug.messages import BreakLine, BreakSet
from monarch_nb.debug.records import Stopped
from monarch_nb.debug.render.picks import pick
from monarch_nb.debug.session.thread import ThreadDebugger
from monarch_nb.runtime import ActorCell, Runtime
from monarch_nb.wire import msgpack_decoder

_ENGINE = "monarch_nb."
_CELL = re.compile(r"ipykernel_\d+[/\\]\d+\.py$")  # how kernels name the files of cells: by their process and the text


class WantedBreakpoints:
    """By the address of the controller that wants them. Actors whose code they are not in are not slowed down; those of
    the engine run functions of the user, too: cells on the processes, and what is run on parts of tensors.
    """

    def __init__(self, engine: Runtime, debugger_of: Callable[[ActorCell], ThreadDebugger]) -> None:
        self._engine = engine
        self._debugger_of = debugger_of
        self._sets: dict[str, BreakSet] = {}
        self._classes: weakref.WeakKeyDictionary[ActorCell, type] = weakref.WeakKeyDictionary()  # whose __init__ runs
        self._armed: weakref.WeakSet[ActorCell] = weakref.WeakSet()
        self._lock = threading.Lock()

    def encoded(self) -> bytes:
        """What an actor that is spawned from this process has to know; empty where nothing is wanted."""
        sets = {src: each for src, each in self._sets.items() if _is_any(each)}
        return msgspec.msgpack.encode(sets) if sets else b""

    def take(self, src: str, wanted: BreakSet) -> int:
        """What a controller wants from now on; gives how many actors have any of it."""
        with self._lock:
            known = self._sets.get(src)
            if known is None or known.version < wanted.version:
                self._sets[src] = wanted
            cells = tuple(self._engine.cells.values())
            for cell in cells:
                cls = type(cell.obj) if cell.obj is not None else self._classes.get(cell)
                if cls is not None:
                    self._apply(cell, cls)
            return sum(cell in self._armed for cell in cells)

    def drop(self, but: str = "") -> None:
        """Those of all controllers go, `but` that of one: they are not there any more to let go on what is stopped."""
        for src, wanted in tuple(self._sets.items()):
            if src != but and _is_any(wanted):
                self.take(src, BreakSet(version=wanted.version + 1))

    def prepare(self, cell: ActorCell, cls: type) -> None:
        """An actor is about to be constructed, on its thread: what is wanted holds in its `__init__`, too."""
        sets: dict[str, BreakSet] = msgpack_decoder(dict[str, BreakSet]).decode(cell.spec.debug or b"\x80")
        with self._lock:
            for src, wanted in sets.items():
                known = self._sets.get(src)
                if known is None or known.version < wanted.version:
                    self._sets[src] = wanted
            self._classes[cell] = cls
            self._apply(cell, cls)

    def _apply(self, cell: ActorCell, cls: type) -> None:
        names = {base.__qualname__ for base in cls.__mro__}
        engines = cls.__module__.startswith(_ENGINE)
        who = _who(cell)
        lines: dict[str, tuple[BreakLine, ...]] = {}
        raised = uncaught = False
        for src, wanted in self._sets.items():
            lines[src] = tuple(
                msgspec.structs.replace(line, file=_as_here(line.file))
                for line in wanted.lines
                if (not line.actor or line.actor in names) and _is_meant(who, line.ranks)
            )
            raised = raised or (wanted.raised is not None and _is_meant(who, wanted.raised))
            uncaught = uncaught or (not engines and wanted.uncaught is not None and _is_meant(who, wanted.uncaught))
        self._engine.failures.freeze_at(cell.mesh, cell.rank, on=uncaught)
        if raised or any(lines.values()) or cell in self._armed:
            debugger = self._debugger_of(cell)
            for src, here in lines.items():
                debugger.want(src, here)
            debugger.stop_where_raised(raised)
        (self._armed.add if raised or uncaught or any(lines.values()) else self._armed.discard)(cell)


def _as_here(file: str) -> str:
    """The name that a file has in this process: a kernel before this one may have run the same cell."""
    if file in linecache.cache or not _CELL.search(file):
        return file
    _, separator, name = file.rpartition(os.sep)
    known = (each for each in tuple(linecache.cache) if each.endswith(separator + name) and _CELL.search(each))
    return next(known, file)


def _is_any(wanted: BreakSet) -> bool:
    return bool(wanted.lines) or wanted.raised is not None or wanted.uncaught is not None


def _who(cell: ActorCell) -> Stopped:
    """An actor as the ranks that people write mean it."""
    point = cell.instance.rank
    return Stopped(
        session="",
        number=0,
        address="",
        host="",
        pid=0,
        mesh=cell.mesh,
        name=cell.spec.name,
        rank=cell.rank,
        incarnation=cell.incarnation,
        labels=tuple(point.extent.labels),
        point=tuple(point.values()),
        sizes=tuple(point.extent.sizes),
    )


def _is_meant(who: Stopped, ranks: str) -> bool:
    try:
        return not ranks.strip() or bool(pick([who], ranks))
    except DebugError:
        return False
