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
from monarch_nb.runtime import ActorState, ProcState, runtime

TICK = 0.25  # seconds, between looks whether somebody wants to stop following
MOST_WAITING = 10_000  # lines that whoever follows has not taken yet


def logs_here() -> MeshLogs:
    """The logs of the meshes that this process has spawned."""
    logs: MeshLogs = runtime().keeper.logs
    return logs


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
    procs, wanted = _filter(mesh, grep=grep, level=level, since=since, stream=stream)
    logs = logs_here()
    return _there(logs, str(mesh._state.name), procs.uid, wanted, last)


def _there(logs: MeshLogs, name: str, uid: str, wanted: LogFilter, last: int | None) -> Logs:
    """What has arrived."""
    records: list[LogRecord] = []
    files: dict[int, str] = {}
    missing = 0
    skipped = logs.receiver.skipped()
    for address in filter(wanted.wants, logs.receiver.addresses(uid)):
        of_rank = list(wanted.records(address, logs.receiver.written(address)))
        records += of_rank if last is None else of_rank[max(0, len(of_rank) - last) :]
        missing += skipped.get(address, 0)
        files[wanted.rank(address)] = logs.file(address)
    return Logs(name, records, files, missing)


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
    procs, wanted = _filter(mesh, grep=grep, level=level, since=since, stream=stream)
    logs = logs_here()
    waiting: deque[LogRecord] = deque(maxlen=MOST_WAITING)
    came = threading.Event()
    missed = 0

    def wrote(address: str, written: Sequence[Written]) -> None:
        nonlocal missed
        for record in wanted.records(address, written):
            missed += len(waiting) == MOST_WAITING
            waiting.append(record)
            came.set()

    with logs.receiver.still():  # or a line that comes between the two would be in neither
        before = _there(logs, str(mesh._state.name), procs.uid, wanted, None)
        stop = logs.receiver.listen(wrote)
    try:
        yield from before
        while True:
            over = procs.stopped is not None or until()
            came.wait(0.0 if over else TICK)
            came.clear()
            while waiting:
                yield waiting.popleft()
            if missed:
                lost, missed = missed, 0
                yield wanted.missed(lost)
            if over:
                return
    finally:
        stop()


def listen_to_logs(listener: Listener) -> Callable[[], None]:
    """Calls `listener(address, lines)` for all that processes spawned from here write; the result ends that.

    On the engine's reading thread: it must be quick, and must not call the engine. `lines` are `Written`, each of them
    one line or many, in the order in which a process wrote them; it is empty where only an open line has grown.
    """
    return logs_here().receiver.listen(listener)


def _filter(mesh: Any, **wanted: Any) -> tuple[ProcState, LogFilter]:
    """The processes that a mesh, or slice, is of, and the lines of them that are wanted."""
    state = mesh._state
    procs: ProcState = state.procs if isinstance(state, ActorState) else state
    if procs.born is None:
        raise RuntimeError(f"{procs.name} was spawned by another process: its logs are there ({procs.home})")
    return procs, LogFilter(procs.uid, state.region, mesh._region.ranks(), **wanted)
