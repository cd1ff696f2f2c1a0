"""Looking at the lines of a mesh: those there are, and those that come."""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any

from monarch_nb.logs.filters import LogFilter
from monarch_nb.logs.mesh_logs import MeshLogs
from monarch_nb.logs.records import LogRecord, Logs
from monarch_nb.logs.written import Listener, Written
from monarch_nb.mesh.handle import region_of, state_of
from monarch_nb.runtime import ActorState, ProcState, runtime

TICK = 0.25  # seconds, between looks whether somebody wants to stop following
MOST_WAITING = 10_000  # lines that whoever follows has not taken yet


class LogReader:
    """Reads the wanted lines of a mesh of processes. `name` is that of the mesh that is looked at."""

    def __init__(self, logs: MeshLogs, name: str, procs: ProcState, wanted: LogFilter) -> None:
        self._logs = logs
        self._name = name
        self._procs = procs
        self._wanted = wanted

    def there(self, last: int | None = None) -> Logs:
        """What has arrived, of each rank the `last` lines."""
        records: list[LogRecord] = []
        files: dict[int, str] = {}
        missing = 0
        receiver = self._logs.receiver
        skipped = receiver.skipped()
        for address in filter(self._wanted.wants, receiver.addresses(self._procs.uid)):
            of_rank = list(self._wanted.records(address, receiver.written(address)))
            records += of_rank if last is None else of_rank[max(0, len(of_rank) - last) :]
            missing += skipped.get(address, 0)
            files[self._wanted.rank(address)] = self._logs.file(address)
        return Logs(self._name, records, files, missing)

    def follow(self, until: Callable[[], bool]) -> Iterator[LogRecord]:
        """What has arrived, then what comes, until the mesh is stopped or `until()`. Blocks."""
        waiting: deque[LogRecord] = deque(maxlen=MOST_WAITING)
        came = threading.Event()
        missed = 0

        def wrote(address: str, written: Sequence[Written]) -> None:
            nonlocal missed
            for record in self._wanted.records(address, written):
                missed += len(waiting) == MOST_WAITING
                waiting.append(record)
                came.set()

        with self._logs.receiver.still():  # or a line that comes between the two would be in neither
            before = self.there()
            stop = self._logs.receiver.listen(wrote)
        try:
            yield from before
            while True:
                over = self._procs.stopped is not None or until()
                came.wait(0.0 if over else TICK)
                came.clear()
                while waiting:
                    yield waiting.popleft()
                if missed:
                    lost, missed = missed, 0
                    yield self._wanted.missed(lost)
                if over:
                    return
        finally:
            stop()


def logs_here() -> MeshLogs:
    """The logs of the meshes that this process has spawned."""
    return runtime().part(MeshLogs)


def logs_of(
    mesh: Any,
    grep: str | None = None,
    *,
    level: int | str | None = None,
    since: "float | str | timedelta | datetime | None" = None,
    stream: str | None = None,
    last: int | None = None,
) -> Logs:
    """The last lines that the processes of a mesh (or slice) wrote, also those that were not shown in any cell.

    `grep` is a regular expression; `level` leaves only records of `logging` from there on; `since` is a datetime, or
    how long ago: seconds or "5m"; `last` lines of each rank. Of an actor mesh: of the processes its actors live in.
    Raises ValueError, and RuntimeError for a mesh that another process has spawned.
    """
    return _reader(mesh, grep=grep, level=level, since=since, stream=stream).there(last)


def follow_logs(
    mesh: Any,
    grep: str | None = None,
    *,
    level: int | str | None = None,
    since: "float | str | timedelta | datetime | None" = None,
    stream: str | None = None,
    until: Callable[[], bool] = lambda: False,
) -> Iterator[LogRecord]:
    """Lines as they come, after those there are (see `logs_of`), until the mesh is stopped or `until()`. Blocks.

    Whoever takes them too slowly misses some; that is said in a line of its own.
    """
    return _reader(mesh, grep=grep, level=level, since=since, stream=stream).follow(until)


def listen_to_logs(listener: Listener) -> Callable[[], None]:
    """Calls `listener(address, lines)` for all that processes spawned from here write; the result ends that.

    On the engine's reading thread: it must be quick, and must not call the engine. `lines` are `Written`, each of them
    one line or many, in the order in which a process wrote them; it is empty where only an open line has grown.
    """
    return logs_here().receiver.listen(listener)


def _reader(mesh: Any, **wanted: Any) -> LogReader:
    state = state_of(mesh)
    procs: ProcState = state.procs if isinstance(state, ActorState) else state
    if procs.born is None:
        raise RuntimeError(f"{procs.name} was spawned by another process: its logs are there ({procs.home})")
    return LogReader(
        logs_here(), state.name, procs, LogFilter(procs.uid, state.region, region_of(mesh).ranks(), **wanted)
    )
