"""Tells the process that everything was spawned from what moves: twice a second while something does."""

import threading
import time
from collections.abc import Callable

import msgspec

from monarch_nb.mesh.registry import MeshRegistry
from monarch_nb.rdma import verbs
from monarch_nb.rdma.regions import Regions
from monarch_nb.rdma.traffic import Flow, Offered, Report, Traffic
from monarch_nb.runtime import Runtime
from monarch_nb.transport import TransportError
from monarch_nb.wire import Asker

__all__ = ["Telling"]

_TOLD_S = 0.5


class Telling:
    """One per process. In the first of them all, `traffic` is what is known of the whole cluster."""

    def __init__(self, engine: Runtime, regions: Regions) -> None:
        self._engine, self._regions = engine, regions
        self._lock = threading.Lock()
        self._flows: dict[tuple[str, str, str], Flow] = {}
        self._changed: set[tuple[str, str, str]] = set()
        self._planned = False
        self.traffic = Traffic()
        self._listeners: list[Callable[[], None]] = []
        engine.verbs.handle(verbs.MOVED, self._arrived)

    def moved(self, process: str, mover: str, size: int, seconds: float, *, write: bool) -> None:
        """A transfer of this process is over: from another process, or to it."""
        here = self._engine.address
        source, target = (here, process) if write else (process, here)
        key = (source, target, mover)
        with self._lock:
            flow = self._flows.get(key)
            if flow is None:
                flow = self._flows[key] = Flow(source, target, mover)
            flow.size += size
            flow.transfers += 1
            flow.seconds += seconds
            self._changed.add(key)
        self.soon()

    def soon(self) -> None:
        """Something has changed: it is told with what else changes in the next moment."""
        if self._planned or self._engine.closed:
            return
        self._planned = True
        self._engine.later(_TOLD_S, self._tell)

    def listen(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Calls `listener()` when something has come; the result ends that. It must not block."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener) if listener in self._listeners else None

    def known(self) -> Traffic:
        """What is known now, with this process's own flows as they are."""
        self._tell()
        return self.traffic

    def _report(self) -> Report:
        flows = [msgspec.structs.replace(self._flows[key]) for key in self._changed]
        self._changed.clear()
        sizes = [region.memory.size for region in self._regions if region.memory is not None]
        return Report(self._engine.address, flows, Offered(len(sizes), sum(sizes)), time.time())

    def _tell(self) -> None:
        with self._lock:
            self._planned = False
            report = self._report()
        self._take(report)

    def _arrived(self, report: Report, asker: Asker[None]) -> None:
        self._take(report)

    def _take(self, report: Report) -> None:
        home = self._engine.part(MeshRegistry).started_by
        if home and home != self._engine.address:
            try:
                self._engine.tell(home, verbs.MOVED, report)
            except TransportError:
                return  # nobody is there to hear it
            return
        with self._lock:
            self.traffic.add(report)
        for listener in tuple(self._listeners):
            listener()
