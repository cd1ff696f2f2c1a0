"""The lines of a mesh as values: which rank wrote what, when, and where all of it is kept."""

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import NamedTuple, overload

from monarch_nb.shape import Point, places
from monarch_nb.wire import counted

SHOWN = 200  # lines, of those that are looked at as a whole


class LogRecord(NamedTuple):
    """A line of a mesh."""

    time: float  # wall clock, seconds
    rank: Point  # in the whole mesh
    stream: str  # "stdout" or "stderr"
    level: int  # of records of `logging` (logging.WARNING is 30), 0 for what was printed
    text: str
    call: str = ""  # the outermost call it belongs to, "" for none

    def __str__(self) -> str:
        clock = datetime.fromtimestamp(self.time).strftime("%H:%M:%S.%f")[:-3]
        where = places(self.rank.labels, [tuple(self.rank.values())], self.rank.extent.sizes)
        return f"{clock} {f'[{where}] ' if where else ''}{self.text}"


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
        """A one-line description."""
        hidden = max(0, len(self) - SHOWN)
        parts = [f"{counted(len(self), 'line')} of {self.name}"]
        if hidden:
            parts.append(f"the last {SHOWN} of them")
        if self.missing:
            parts.append(f"{self.missing:,} more in the files only (see .files)")
        return ", ".join(parts)

    @property
    def text(self) -> str:
        """The last lines, each with its time and rank."""
        return "\n".join(map(str, self._records[-SHOWN:]))

    def __repr__(self) -> str:
        return f"{self.heading}\n{self.text}".rstrip()
