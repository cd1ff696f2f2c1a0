"""The lines of a mesh as values: the present ones, and new ones."""

import logging
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple, overload

from monarch_nb.logs.lines import Listener, Written, mesh_of, rank_of
from monarch_nb.logs.mesh_logs import MeshLogs
from monarch_nb.mesh.handle import region_of, state_of
from monarch_nb.runtime import ProcState, current_runtime, proc_state_of
from monarch_nb.settings import parse_duration
from monarch_nb.shape import Point, Region, places
from monarch_nb.wire import counted

TICK = 0.25  # seconds, between checks whether to stop following
USUAL_LINES = 200  # lines displayed of a whole sequence
MOST_WAITING = 10_000  # lines that a follower has not taken yet


class LogRecord(NamedTuple):
    """A line of a mesh."""

    time: float  # wall clock, seconds
    rank: Point  # in the whole mesh
    stream: str  # "stdout" or "stderr"
    level: int  # of records of `logging` (logging.WARNING is 30), 0 for what was printed
    text: str
    call: str = ""  # the outermost call that wrote it, "" for none

    def __str__(self) -> str:
        clock = datetime.fromtimestamp(self.time).strftime("%H:%M:%S.%f")[:-3]
        ranks = places(self.rank.labels, [tuple(self.rank.values())], self.rank.extent.sizes)
        return f"{clock} {f'[{ranks}] ' if ranks else ''}{self.text}"


class Logs(Sequence[LogRecord]):
    """Lines of a mesh in the order of their times. `files` has the host and path of each rank's whole log."""

    def __init__(self, name: str, records: Iterable[LogRecord], files: dict[int, str], missing: int = 0) -> None:
        self.name = name
        self.files = files
        self.missing = missing  # lines that only the files have
        self._records = sorted(records, key=lambda record: record.time)

    @overload
    def __getitem__(self, index: int) -> LogRecord: ...
    @overload
    def __getitem__(self, index: slice) -> list[LogRecord]: ...
    def __getitem__(self, index: int | slice) -> LogRecord | list[LogRecord]:
        return self._records[index]

    def __len__(self) -> int:
        return len(self._records)

    @property
    def heading(self) -> str:
        """A one-line description."""
        hidden = max(0, len(self) - USUAL_LINES)
        parts = [f"{counted(len(self), 'line')} of {self.name}"]
        if hidden:
            parts.append(f"the last {USUAL_LINES} of them")
        if self.missing:
            parts.append(f"{self.missing:,} more in the files only (see .files)")
        return ", ".join(parts)

    @property
    def text(self) -> str:
        """The last lines, each with its time and rank."""
        return "\n".join(map(str, self._records[-USUAL_LINES:]))

    def __repr__(self) -> str:
        return f"{self.heading}\n{self.text}".rstrip()


class LogFilter:
    """Lines of some base ranks of a mesh of processes; `region` is the whole mesh, in which ranks are counted.

    `grep` is a regular expression; `level` is the lowest level of records of `logging`, and excludes other lines;
    `since` is a datetime, or seconds or "5m" ago. Raises ValueError for invalid values.
    """

    def __init__(
        self,
        uid: str,
        region: Region,
        ranks: Collection[int],
        *,
        grep: str | None = None,
        level: int | str | None = None,
        since: "float | str | timedelta | datetime | None" = None,
        stream: str | None = None,
    ) -> None:
        self._uid = uid
        self._region = region
        self._ranks = frozenset(ranks)
        if stream not in (None, "stdout", "stderr"):
            raise ValueError(f"stream={stream!r} is not a stream: use 'stdout' or 'stderr'")
        self._stream = stream
        try:
            self._pattern = re.compile(grep) if grep else None
        except re.error as error:
            raise ValueError(f"grep={grep!r} is not a regular expression: {error}") from None
        self._level = level_of(level)
        self._since = since_of(since)

    def wants(self, address: str) -> bool:
        """Returns whether lines of a process match."""
        return mesh_of(address) == self._uid and rank_of(address) in self._ranks

    def rank(self, address: str) -> int:
        """Returns the rank of a process in the whole mesh."""
        return self._region.point_of_base_rank(rank_of(address)).rank

    def records(self, address: str, written: Iterable[Written]) -> Iterator[LogRecord]:
        """Yields the matching lines of a process."""
        if not self.wants(address):
            return
        point = self._region.point_of_base_rank(rank_of(address))
        for block in written:
            if block.level < self._level or block.at < self._since or (self._stream and block.stream != self._stream):
                continue
            for text in block.lines:
                if self._pattern is None or self._pattern.search(text):
                    yield LogRecord(block.at, point, block.stream, block.level, text, block.call)

    def missed(self, count: int) -> LogRecord:
        """Returns a line with the number of missed lines."""
        point = self._region.point_of_base_rank(min(self._ranks))
        return LogRecord(time.time(), point, "stderr", 0, f"… {count:,} lines were missed; the files have them")


def level_of(level: int | str | None) -> int:
    """Returns a level by number or name, 0 for None. Raises ValueError."""
    if level is None or isinstance(level, int):
        return level or 0
    number = int(level) if level.isdecimal() else logging.getLevelName(level.upper())
    if not isinstance(number, int):
        raise ValueError(f"level={level!r} is not a level: use DEBUG, INFO, WARNING, ERROR, CRITICAL or a number")
    return number


def since_of(since: object) -> float:
    """Returns a time of the wall clock: a datetime, or how long ago. Raises ValueError."""
    if since is None:
        return 0.0
    if isinstance(since, datetime):
        return since.timestamp()
    if isinstance(since, timedelta):
        return time.time() - since.total_seconds()
    try:
        return time.time() - (float(since) if isinstance(since, (int, float)) else parse_duration(since) / 1e9)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"since={since!r} is not a time: write a datetime, seconds, or a text such as 30s or 5m"
        ) from error


class LogReader:
    """Reads the matching lines of a mesh of processes. `name` is the name of the mesh that the user named."""

    def __init__(self, logs: MeshLogs, name: str, procs: ProcState, wanted: LogFilter) -> None:
        self._logs = logs
        self._name = name
        self._procs = procs
        self._wanted = wanted

    def there(self, last: int | None = None) -> Logs:
        """Returns the lines that have arrived, of each rank the `last` ones."""
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
        """Yields the lines that have arrived, then new ones, until the mesh is stopped or `until()`. Blocks."""
        waiting: deque[LogRecord] = deque(maxlen=MOST_WAITING)
        arrived = threading.Event()
        missed = 0

        def wrote(address: str, written: Sequence[Written]) -> None:
            nonlocal missed
            for record in self._wanted.records(address, written):
                missed += len(waiting) == MOST_WAITING
                waiting.append(record)
                arrived.set()

        with self._logs.receiver.still():  # else a line that arrives between the two would be lost
            before = self.there()
            stop = self._logs.receiver.listen(wrote)
        try:
            yield from before
            while True:
                over = self._procs.stopped is not None or until()
                arrived.wait(0.0 if over else TICK)
                arrived.clear()
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
    """Returns the logs of the meshes that this process has spawned."""
    return current_runtime().part(MeshLogs)


def logs_of(
    mesh: Any,
    grep: str | None = None,
    *,
    level: int | str | None = None,
    since: "float | str | timedelta | datetime | None" = None,
    stream: str | None = None,
    last: int | None = None,
) -> Logs:
    """Returns the last lines that the processes of a mesh (or slice) wrote, also those that no cell has shown.

    `grep` is a regular expression; `level` is the lowest level of records of `logging`, and excludes other lines;
    `since` is a datetime, or seconds or "5m" ago; `last` lines of each rank. For an actor mesh: of the actors'
    processes. Raises ValueError, and RuntimeError for a mesh that another process has spawned.
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
    """Returns the present lines (see `logs_of`), then new ones, until the mesh is stopped or `until()`. Blocks.

    A slow consumer misses some; a line of its own says how many.
    """
    return _reader(mesh, grep=grep, level=level, since=since, stream=stream).follow(until)


def listen_to_logs(listener: Listener) -> Callable[[], None]:
    """Calls `listener(address, lines)` for all output of processes spawned from here; the result ends that.

    The call is on the engine's reading thread: it must be quick, and must not call the engine. `lines` are `Written`,
    each of one line or many, in the order in which a process wrote them; it is empty where only an open line has grown.
    """
    return logs_here().receiver.listen(listener)


def _reader(mesh: Any, **wanted: Any) -> LogReader:
    state = state_of(mesh)
    procs = proc_state_of(state)
    if procs.spawn_spec is None:
        raise RuntimeError(f"{procs.name} was spawned by another process: its logs are there ({procs.owner_process})")
    return LogReader(
        logs_here(), state.name, procs, LogFilter(procs.uid, state.region, region_of(mesh).ranks(), **wanted)
    )
