"""Lines of processes on arrival, with the call that they belong to."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from monarch_nb.wire import Display


class Written(NamedTuple):
    """Whole lines that a process wrote to one stream, for one call."""

    address: str
    stream: str  # "stdout" or "stderr"
    call: str  # the outermost call that they belong to, "" for none
    level: int  # of records of `logging`, 0 for other text
    at: float  # wall clock, seconds
    text: str  # each line with its end
    display: Display | None = None  # the display; `text` replaces it where only text can be shown

    @property
    def line_count(self) -> int:
        """Number of lines."""
        return self.text.count("\n")

    @property
    def lines(self) -> list[str]:
        """The lines, without their ends."""
        return self.text.removesuffix("\n").split("\n") if self.text else []


Listener = Callable[[str, Sequence[Written]], None]


class OpenLine(NamedTuple):
    """A line that has no end yet."""

    address: str
    stream: str
    call: str
    text: str  # its visible part
    overwrites: bool  # overwrites itself, as progress bars do
    age: float  # seconds since it began
    finished: bool = False  # bars that the program has left
