"""The logs of a mesh as values: which rank wrote what, when, and where all of it is kept."""

import logging
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple, overload

from monarch_nb.logs.receiver import Written, output_of
from monarch_nb.runtime import ActorState, ProcState, runtime
from monarch_nb.settings import parse_duration
from monarch_nb.shape import Point, places

SHOWN = 200  # lines, of those that are looked at as a whole
TICK = 0.25  # seconds, between looks whether somebody wants to stop following
MOST_WAITING = 10_000  # lines that whoever follows has not taken yet


class LogRecord(NamedTuple):
    """One line."""

    time: float  # wall clock, seconds
    rank: Point  # in the whole mesh
    stream: str  # "stdout" or "stderr"
    level: int  # of records of `logging` (logging.WARNING is 30), 0 for what was printed
    text: str
    call: str = ""  # the outermost call it belongs to, "" for none

    def __str__(self) -> str:
        at = datetime.fromtimestamp(self.time).strftime("%H:%M:%S.%f")[:-3]
        where = places(self.rank.labels, [tuple(self.rank.values())], self.rank.extent.sizes)
        return f"{at} {f'[{where}] ' if where else ''}{self.text}"


class Logs(Sequence[LogRecord]):
    """Lines of a mesh in the order of their times. `files` says where all that each rank wrote is: host and path."""

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
        """What this is, in a line."""
        hidden = max(0, len(self) - SHOWN)
        told = [f"{len(self):,} line{'' if len(self) == 1 else 's'} of {self.name}"]
        if hidden:
            told.append(f"the last {SHOWN} of them")
        if self.missing:
            told.append(f"{self.missing:,} more in the files only (see .files)")
        return ", ".join(told)

    @property
    def text(self) -> str:
        """The last lines, each with its time and rank."""
        return "\n".join(map(str, self._records[-SHOWN:]))

    def __repr__(self) -> str:
        return f"{self.heading}\n{self.text}".rstrip()


class Wish:
    """Which lines are wanted. Raises ValueError for what cannot be understood."""

    def __init__(self, mesh: Any, grep: str | None, level: int | str | None, since: Any, stream: str | None) -> None:
        self.state = mesh._state
        procs: ProcState = self.state.procs if isinstance(self.state, ActorState) else self.state
        if procs.born is None:
            raise RuntimeError(f"{procs.name} was spawned by another process: its logs are there ({procs.home})")
        self.procs = procs
        self.region = self.state.region  # ranks are told as those of the whole mesh
        self.ranks = frozenset(mesh._region.ranks())
        self.stream = stream
        if stream not in (None, "stdout", "stderr"):
            raise ValueError(f"stream={stream!r} is not a stream: use 'stdout' or 'stderr'")
        try:
            self.pattern = re.compile(grep) if grep else None
        except re.error as error:
            raise ValueError(f"grep={grep!r} is not a regular expression: {error}") from None
        self.level = level_of(level)
        self.since = since_of(since)

    def rank_of(self, address: str) -> int | None:
        """The rank of a process, if it is one of these."""
        uid, _, rest = address.partition("/")[2].partition(".")
        rank = int(rest.partition(".")[0] or 0) if uid == self.procs.uid else -1
        return rank if rank in self.ranks else None

    def records(self, rank: int, written: Iterable[Written]) -> Iterator[LogRecord]:
        """Those of some lines of a rank that are wanted."""
        point = self.region.point_of_base_rank(rank)
        for one in written:
            if one.level < self.level or one.at < self.since or (self.stream and one.stream != self.stream):
                continue
            for text in one.text.removesuffix("\n").split("\n") if one.text else ():
                if self.pattern is None or self.pattern.search(text):
                    yield LogRecord(one.at, point, one.stream, one.level, text, one.call)


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
    wish = Wish(mesh, grep, level, since, stream)
    engine = runtime()
    output = output_of(engine)
    records: list[LogRecord] = []
    files: dict[int, str] = {}
    missing = 0
    skipped = output.skipped()
    for address in output.addresses(wish.procs.uid):
        rank = wish.rank_of(address)
        if rank is None:
            continue
        found = list(wish.records(rank, output.written(address)))
        records += found if last is None else found[max(0, len(found) - last) :]
        missing += skipped.get(address, 0)
        files[wish.region.point_of_base_rank(rank).rank] = log_file(engine, address)
    return Logs(wish.state.name, records, files, missing)


def log_file(engine: Any, address: str) -> str:
    """Where all that a process wrote is: a path, with its host before it if that is not this one; "" if unknown."""
    path = engine.keeper.watching.log_files.get(address, "")
    host = address.partition("/")[0]
    return path if not path or host in engine.local_hosts else f"{host}:{path}"


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
    wish = Wish(mesh, grep, level, since, stream)
    output = output_of(runtime())
    waiting: deque[LogRecord] = deque(maxlen=MOST_WAITING)
    came = threading.Event()
    missed = 0

    def wrote(address: str, written: Sequence[Written]) -> None:
        nonlocal missed
        rank = wish.rank_of(address)
        for record in wish.records(rank, written) if rank is not None else ():
            missed += len(waiting) == MOST_WAITING
            waiting.append(record)
            came.set()

    with output.still():  # or a line that comes between the two would be in neither
        before = logs_of(mesh, grep, level=level, since=since, stream=stream)
        stop = output.listen(wrote)
    try:
        yield from before
        while True:
            over = wish.procs.stopped is not None or until()
            came.wait(0.0 if over else TICK)
            came.clear()
            while waiting:
                yield waiting.popleft()
            if missed:
                lost, missed = missed, 0
                point = wish.region.point_of_base_rank(min(wish.ranks))
                yield LogRecord(time.time(), point, "stderr", 0, f"… {lost:,} lines were missed; the files have them")
            if over:
                return
    finally:
        stop()


def level_of(given: int | str | None) -> int:
    """A level by number or name, 0 for None. Raises ValueError."""
    if given is None or isinstance(given, int):
        return given or 0
    number = int(given) if given.isdecimal() else logging.getLevelName(given.upper())
    if not isinstance(number, int):
        raise ValueError(f"level={given!r} is not a level: use DEBUG, INFO, WARNING, ERROR, CRITICAL or a number")
    return number


def since_of(given: Any) -> float:
    """A time of the wall clock: a datetime, or how long ago. Raises ValueError."""
    if given is None:
        return 0.0
    if isinstance(given, datetime):
        return given.timestamp()
    if isinstance(given, timedelta):
        return time.time() - given.total_seconds()
    try:
        return time.time() - (float(given) if isinstance(given, (int, float)) else parse_duration(given) / 1e9)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"since={given!r} is not a time: write a datetime, seconds, or a text such as 30s or 5m"
        ) from error
