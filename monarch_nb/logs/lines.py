"""Single lines for display: equal ones of several ranks once, with the ranks that they come from."""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from monarch_nb.logs.sources import Source, prefix
from monarch_nb.logs.written import Written
from monarch_nb.wire import Display


class Line(NamedTuple):
    """A line that a process wrote."""

    address: str
    text: str
    stream: str = "stdout"
    call: str = ""
    display: Display | None = None


def lines_of(written: Written) -> list[Line]:
    """Splits written text into its lines."""
    address, stream, call, _, _, text, display = written
    if display is not None:
        return [Line(address, text.removesuffix("\n"), stream, call, display)]
    return [Line(address, line, stream, call) for line in written.lines]


_ACTOR = re.compile(r"\[actor=<root>(?:\.<[^<>]*>)*\.<\S+ ([^<>{}]+)(?:\{[^{}]*\})?>\] ")


def briefly(written: Written) -> Written:
    """Shortens records of `logging` to the name of their actor: the rank precedes the line, and equal lines merge."""
    if not written.level or "[actor=" not in written.text:
        return written
    return written._replace(text=_ACTOR.sub(r"[\1] ", written.text))


# The format of tqdm: "train:  40%|████      | 4/10 [00:01<00:02, 2.75it/s, loss=0.3]".
_BAR = re.compile(r"(.*?)\s*\d{1,3}%\|[^|]*\|\s*(\S+)/(\S+) \[[\d:]+<[^,\]]*,[^,\]]*((?:, [^\[\]]*)?)\]\s*")


class Bar(NamedTuple):
    """The text of a progress bar without the time, which differs on each rank."""

    title: str
    done: str
    total: str
    values: str  # ", loss=0.3"

    @classmethod
    def read(cls, text: str) -> "Bar | None":
        """Reads a line; None for other text."""
        match = _BAR.fullmatch(text) if "%|" in text else None
        return None if match is None else cls(*match.groups())


def merged(
    lines: Iterable[Line], source_of: Callable[[str], Source], *, named: bool, prefixed: bool = True
) -> list[str]:
    """Returns equal lines once, with their ranks, and a count if some rank wrote them more than once."""
    groups: dict[tuple[str, str], list[Source]] = {}
    for line in lines:
        if line.display is not None and not line.text:
            continue
        source = source_of(line.address)
        groups.setdefault((source.uid, line.text), []).append(source)
    return [
        f"{prefix(sources, named=named) if prefixed else ''}{text}{_times(sources)}\n"
        for (_, text), sources in groups.items()
    ]


def _times(sources: Sequence[Source]) -> str:
    return f" ({len(sources)} times)" if len(set(sources)) < len(sources) else ""
