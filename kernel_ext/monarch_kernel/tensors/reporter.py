"""Reports sharded tensors to the store: a summary of each mesh of them, a few times a second, while a page watches.

Operations report nothing themselves: the summary is read from the tables that the streams maintain anyway.
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
from monarch_nb.tensor.verbs import MemoryUsed

from .naming import names_of, variables

REPORT_S = 0.4  # between two summaries
ASKING_S = 2.0  # between two questions to ranks
logger = logging.getLogger(__name__)


class TensorReporter:
    """Puts summaries of sharded tensors into the store. One per process. `file_name` gives a file's display name."""

    def __init__(self) -> None:
        self._watchers = 0
        self._lock = threading.Lock()
        self._running = False
        self._reported: dict[str, dict[str, object]] = {}  # as the store has it
        self._requests: dict[int, tuple[Asked, float]] = {}  # by stream, with its time
        self._answers: dict[int, Sequence[MemoryUsed]] = {}  # by stream
        self._last: dict[int, tuple[Sequence[Any], Sequence[Any]]] = {}  # moved, waited, by stream

    def begin_cell(self) -> None:
        """Starts the movements of a new cell. Those of the last cell that moved anything stay visible."""
        for stream, _ in streams():
            done = (stream.table.movements(), stream.table.synchronisations())
            if any(done):
                self._last[stream.number] = done
                stream.begin_cell()

    def watch(self, runtime: Runtime, file_name: FileName) -> Callable[[], None]:
        """Keeps the store up to date until the result is called."""
        with self._lock:
            self._watchers += 1
            begin = not self._running
            self._running = True
        if begin:
            self._report(runtime, file_name)
        return self._leave

    def update(self, runtime: Runtime, file_name: FileName, *, wait_s: float = 0.0) -> None:
        """Puts changed summaries into the store. Waits up to `wait_s` for the memory use of ranks."""
        self._ask(runtime, fresh=wait_s > 0)
        names = names_of(variables())
        records: dict[str, dict[str, Any]] = {}
        for stream, procs in all_streams():
            table = stream.table
            live = table.live()
            if stream.lost is not None and not live:
                continue
            moved, waited, cell = table.movements(), table.synchronisations(), table.cell
            if not moved and not waited:
                (moved, waited), cell = self._last.get(stream.number, ((), ())), cell - 1
            used = self._used(stream.number, wait_s)
            own_names = {number: name for (of, number), name in names.items() if of == stream.number}
            summary = summary_of(
                stream.title if stream.lane is None else f"{stream.title}, stream {stream.lane.name}",
                stream.layout,
                live,
                moved,
                waited,
                names=own_names,
                file_name=file_name,
                used=used,
                cell=cell,
                lost=stream.lost or "",
                lost_numbers=stream.held.lost,
            )
            records[str(stream.number)] = {**summary.record, **mesh_ranks(procs)}
        put = store_of(runtime).put
        with self._lock:
            for key in self._reported.keys() - records.keys():
                put(TensorsSeen(key, {}))
            for key, record in records.items():
                if self._reported.get(key) != record:
                    put(TensorsSeen(key, record))
            self._reported = records

    def _ask(self, runtime: Runtime, *, fresh: bool) -> None:
        """Requests the memory use of ranks, where no request is pending."""
        now = time.monotonic()
        numbers = dict.fromkeys(stream.number for stream, _ in streams())
        for stream, procs in streams():
            _, since = self._requests.get(stream.number, (None, 0.0))
            if fresh or now - since > ASKING_S:
                if fresh:
                    stream.flush_nowait()  # the count includes operations issued so far
                self._requests[stream.number] = Asked(runtime, procs, stream.number), now
        for number in self._requests.keys() - numbers.keys():
            del self._requests[number]
            self._answers.pop(number, None)

    def _used(self, number: int, wait_s: float) -> "Sequence[MemoryUsed] | None":
        """Returns the last answer of the ranks; None for streams that have ended."""
        request = self._requests.get(number)
        answer = request[0].answered(wait_s) if request is not None else None
        if answer is not None:
            self._answers[number] = answer
        return self._answers.get(number)

    def _report(self, runtime: Runtime, file_name: FileName) -> None:
        with self._lock:
            if not self._watchers or runtime.closed:
                self._running = False
                return
        try:
            self.update(runtime, file_name)
        except Exception:  # modules and tables may change while they are read; the next summary is complete again
            logger.debug("tensors were not summed up", exc_info=True)
        runtime.later(REPORT_S, lambda: self._report(runtime, file_name))

    def _leave(self) -> None:
        with self._lock:
            self._watchers -= 1


def all_streams() -> list[tuple[Any, ProcMesh]]:
    """Streams of all meshes of tensors with their processes, those with lost contents included.

    Empty, without an import of torch, until the first one is made.
    """
    module = sys.modules.get("monarch_nb.tensor.device")
    return [] if module is None else module.streams()


def streams() -> list[tuple[Any, ProcMesh]]:
    """Streams that still have their tensors."""
    return [(stream, procs) for stream, procs in all_streams() if stream.lost is None]


def mesh_ranks(procs: ProcMesh) -> dict[str, Any]:
    """Returns the processes of a mesh of tensors as views name them: the uid of their mesh, and their indices in it."""
    state = state_of(procs)
    indices = {base: index for index, base in enumerate(state.region.ranks())}
    return {"mesh": state.uid, "ranks": [indices[base] for base in region_of(procs).ranks()]}


TENSOR_REPORTER = TensorReporter()
