"""Tells the store of sharded tensors: a summary of each mesh of them, while somebody looks, a few times a second.

No operation tells anything: what there is is read from the tables that the streams keep anyway.
"""

import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from monarch_nb.mesh import ProcMesh, region_of, state_of
from monarch_nb.runtime import Runtime
from monarch_nb.store import store_of
from monarch_nb.store.events import TensorsSeen
from monarch_nb.tensor.groups.asking import Asked
from monarch_nb.tensor.summary import FileName, summary_of
from monarch_nb.tensor.verbs import Used

from .naming import names_of, variables

TELLING_S = 0.4  # between two summaries
ASKING_S = 2.0  # between two questions to ranks
logger = logging.getLogger(__name__)


class TensorTelling:
    """The one of this process. `file_name` is what people call a file."""

    def __init__(self) -> None:
        self._watchers = 0
        self._lock = threading.Lock()
        self._running = False
        self._told: dict[str, dict[str, Any]] = {}  # as the store has it
        self._asked: dict[int, tuple[Asked, float]] = {}  # by stream, with when that was
        self._known: dict[int, Sequence[Used]] = {}  # what came of it
        self._last: dict[int, tuple[Sequence[Any], Sequence[Any]]] = {}  # moved, waited, by stream

    def begin_cell(self) -> None:
        """What is moved from now on is another cell's. What the last one that moved anything did stays in sight."""
        for stream, _ in streams():
            done = (stream.table.movements(), stream.table.synchronisations())
            if any(done):
                self._last[stream.number] = done
                stream.begin_cell()

    def watch(self, engine: Runtime, file_name: FileName) -> Callable[[], None]:
        """Keeps the store up to date until the result is called."""
        with self._lock:
            self._watchers += 1
            begin = not self._running
            self._running = True
        if begin:
            self._again(engine, file_name)
        return self._leave

    def tell(self, engine: Runtime, file_name: FileName, *, wait_s: float = 0.0) -> None:
        """Tells what there is now, where it has changed. Waits so long for ranks to tell how much they use."""
        self._ask(engine, anew=wait_s > 0)
        names = names_of(variables())
        told: dict[str, dict[str, Any]] = {}
        for stream, procs in all_streams():
            table = stream.table
            live = table.live()
            if stream.lost is not None and not live:
                continue
            moved, waited, cell = table.movements(), table.synchronisations(), table.cell
            if not moved and not waited:
                (moved, waited), cell = self._last.get(stream.number, ((), ())), cell - 1
            used = self._used(stream.number, wait_s)
            own = {number: name for (of, number), name in names.items() if of == stream.number}
            summary = summary_of(
                stream.title,
                stream.layout,
                live,
                moved,
                waited,
                names=own,
                file_name=file_name,
                used=used,
                cell=cell,
                lost=stream.lost or "",
                gone=stream.held.gone,
            )
            told[str(stream.number)] = {**summary.record, **place_of(procs)}
        put = store_of(engine).put
        with self._lock:
            for key in self._told.keys() - told.keys():
                put(TensorsSeen(key, {}))
            for key, record in told.items():
                if self._told.get(key) != record:
                    put(TensorsSeen(key, record))
            self._told = told

    def _ask(self, engine: Runtime, *, anew: bool) -> None:
        """Asks ranks how much they use, where they are not being asked already."""
        now = time.monotonic()
        here = dict.fromkeys(stream.number for stream, _ in streams())
        for stream, procs in streams():
            _, since = self._asked.get(stream.number, (None, 0.0))
            if anew or now - since > ASKING_S:
                if anew:
                    stream.flush_aside()  # what is asked for counts, too
                self._asked[stream.number] = Asked(engine, procs, stream.number), now
        for number in self._asked.keys() - here.keys():
            del self._asked[number]
            self._known.pop(number, None)

    def _used(self, number: int, wait_s: float) -> "Sequence[Used] | None":
        """What ranks have told last; None of those that are gone."""
        asked = self._asked.get(number)
        found = asked[0].answered(wait_s) if asked is not None else None
        if found is not None:
            self._known[number] = found
        return self._known.get(number)

    def _again(self, engine: Runtime, file_name: FileName) -> None:
        with self._lock:
            if not self._watchers or engine.closed:
                self._running = False
                return
        try:
            self.tell(engine, file_name)
        except Exception:  # modules and tables may change while they are read: the next summary is whole again
            logger.debug("tensors were not summed up", exc_info=True)
        engine.later(TELLING_S, lambda: self._again(engine, file_name))

    def _leave(self) -> None:
        with self._lock:
            self._watchers -= 1


def all_streams() -> list[tuple[Any, ProcMesh]]:
    """Those of all meshes of tensors, and their processes; of those whose contents are lost, too.

    None are there, and torch is not imported, before somebody makes one.
    """
    module = sys.modules.get("monarch_nb.tensor.device")
    return [] if module is None else module.streams()


def streams() -> list[tuple[Any, ProcMesh]]:
    """Those that still have their tensors."""
    return [(stream, procs) for stream, procs in all_streams() if stream.lost is None]


def place_of(procs: ProcMesh) -> dict[str, Any]:
    """The processes of a mesh of tensors as views have them: the uid of their mesh, and their indices in it."""
    state = state_of(procs)
    whole = {base: index for index, base in enumerate(state.region.ranks())}
    return {"mesh": state.uid, "ranks": [whole[base] for base in region_of(procs).ranks()]}


TELLING = TensorTelling()
