"""Lines of processes: with call, rank and mesh; for display, equal ones of several ranks once, with these ranks."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from monarch_nb.runtime import MeshState, ProcState
from monarch_nb.shape import places
from monarch_nb.wire import Display, parse_address


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


class OpenLine(NamedTuple):
    """A line that has no end yet."""

    address: str
    stream: str
    call: str
    text: str  # its visible part
    overwrites: bool  # overwrites itself, as progress bars do
    age: float  # seconds since it began
    finished: bool = False  # bars that the program has left


Listener = Callable[[str, Sequence[Written]], None]


class Source(NamedTuple):
    """The rank and mesh of a process."""

    uid: str
    name: str
    labels: tuple[str, ...]
    point: tuple[int, ...]
    sizes: tuple[int, ...] = ()


class Sources:
    """Maps processes to ranks by the known meshes: `meshes` by uid."""

    def __init__(self, meshes: Mapping[str, MeshState]) -> None:
        self._meshes = meshes

    def of(self, address: str) -> Source:
        """Returns the rank of a process."""
        uid, rank = mesh_of(address), rank_of(address)
        state = self._meshes.get(uid)
        if state is None:
            return Source(uid, uid, ("rank",), (rank,))
        point = state.region.point_of_base_rank(rank)
        return Source(uid, state.name, tuple(point.labels), tuple(point.values()), tuple(point.extent.sizes))

    def spawned_here(self, uid: str) -> bool:
        """Returns whether this process spawned a mesh: other processes show the output of theirs."""
        state = self._meshes.get(uid)
        return isinstance(state, ProcState) and state.spawn_spec is not None

    @property
    def several(self) -> bool:
        """True with several meshes of processes, so that lines need the names of their meshes."""
        states = tuple(self._meshes.values())
        return len([state for state in states if self.spawned_here(state.uid) and state.stopped is None]) > 1


def mesh_of(address: str) -> str:
    """Returns the uid of the mesh that a process belongs to."""
    return parse_address(address).mesh


def rank_of(address: str) -> int:
    """Returns the base rank of a process in its mesh."""
    return parse_address(address).rank


def prefix(sources: Sequence[Source], *, named: bool) -> str:
    """Returns `[workers gpus=0-3] `, or a prefix without the mesh's name."""
    first = sources[0]
    ranks = places(first.labels, (source.point for source in sources), first.sizes)
    both = " ".join(filter(None, (first.name if named else "", ranks)))
    return f"[{both}] " if both else ""


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
