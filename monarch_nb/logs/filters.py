"""Which lines of a mesh are wanted: by rank, text, level, time and stream."""

import logging
import re
import time
from collections.abc import Collection, Iterable, Iterator
from datetime import datetime, timedelta
from typing import Any

from monarch_nb.logs.records import LogRecord
from monarch_nb.logs.sources import mesh_of, rank_of
from monarch_nb.logs.written import Written
from monarch_nb.settings import parse_duration
from monarch_nb.shape import Region


class LogFilter:
    """Lines of some base ranks of a mesh of processes; `region` is the whole mesh, after which ranks are told.

    `grep` is a regular expression; `level` leaves only records of `logging` from there on; `since` is a datetime, or
    how long ago: seconds or "5m". Raises ValueError for what cannot be understood.
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
        """Whether lines of a process are wanted."""
        return mesh_of(address) == self._uid and rank_of(address) in self._ranks

    def rank(self, address: str) -> int:
        """The rank of a process in the whole mesh."""
        return self._region.point_of_base_rank(rank_of(address)).rank

    def records(self, address: str, written: Iterable[Written]) -> Iterator[LogRecord]:
        """The lines of a process that are wanted."""
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
        """A line that says how many were missed."""
        point = self._region.point_of_base_rank(min(self._ranks))
        return LogRecord(time.time(), point, "stderr", 0, f"… {count:,} lines were missed; the files have them")


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
