"""Stopped ranks drawn together, by actor mesh and line: as groups, a table, one tree of stacks; and selected. Pure."""

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from monarch_nb.debug.records import DebugError, Frame, Stopped
from monarch_nb.shape import Extent, places, spans
from monarch_nb.wire import counted

FileName = Callable[[str], str]
THREADS = 3  # names of threads that are listed for a group
_SLICE = re.compile(r"(-?\d*):(-?\d*)(?::(-?\d*))?")
_DIM = re.compile(r"([^\W\d]\w*)=(\S+)", re.ASCII)


def short(file: str) -> str:
    """Display name of a file."""
    return os.path.basename(file) or file


@dataclass(frozen=True)
class StackGroup:
    """Ranks of one actor mesh that have stopped at one line, on whichever threads and wherever it was called from."""

    records: tuple[Stopped, ...]

    @property
    def first(self) -> Stopped:
        """The lowest rank, which represents all."""
        return self.records[0]

    @property
    def ranks(self) -> int:
        """Number of ranks, of which some may have several threads here."""
        return len({record.rank for record in self.records})

    @property
    def thread(self) -> str:
        """The names of threads other than those of the actors, "" if there are none."""
        names = sorted({record.thread for record in self.records if record.thread})
        more = f" and {len(names) - THREADS} more" if len(names) > THREADS else ""
        return f"{', '.join(names[:THREADS])}{more}"

    @property
    def where(self) -> str:
        """The ranks: `trainers gpus=0-6`."""
        return named(self.records)


def grouped(records: Iterable[Stopped]) -> list[StackGroup]:
    """Returns the groups, the largest of each mesh first."""
    by_place: dict[object, list[Stopped]] = {}
    for record in sorted(records, key=lambda record: (record.rank, record.session)):
        frame = record.frame
        key = (record.mesh, record.post_mortem, frame.file, frame.line, frame.function)
        by_place.setdefault(key, []).append(record)
    groups = [StackGroup(tuple(members)) for members in by_place.values()]
    return sorted(groups, key=lambda group: (group.first.name, group.first.mesh, -group.ranks, group.first.rank))


def ranks_of(records: Sequence[Stopped]) -> str:
    """Returns the places of ranks of one mesh: `gpus=0-2,5`; "" for an actor that is alone."""
    if not records or not records[0].labels:
        return ""
    is_complete = {len(record.point) for record in records} == {len(records[0].labels)}
    if not is_complete:
        return spans(record.rank for record in records)
    return places(records[0].labels, (record.point for record in records), records[0].sizes)


def named(records: Sequence[Stopped]) -> str:
    """Ranks with the names of their meshes."""
    meshes: dict[str, list[Stopped]] = {}
    for record in records:
        meshes.setdefault(record.mesh, []).append(record)
    return "; ".join(f"{members[0].name} {ranks_of(members)}".rstrip() for members in meshes.values())


def place(frame: Frame, name: FileName = short) -> str:
    """`train.py:42 in Trainer.step`."""
    return f"{name(frame.file)}:{frame.line} in {frame.function}"


# -- one tree of many stacks -------------------------------------------------------------------------------------------


@dataclass
class StackNode:
    """A frame of the tree, and the owners of the stacks with it."""

    frame: Frame
    owners: list[str] = field(default_factory=list)
    below: "dict[tuple[str, int, str], StackNode]" = field(default_factory=dict)

    @property
    def children(self) -> "list[StackNode]":
        """Called frames, those with most ranks first."""
        return _sorted(self.below)


def tree(stacks: Iterable[tuple[str, Sequence[Frame]]]) -> list[StackNode]:
    """Returns the tree of some stacks (outermost first), each of which has an owner."""
    root: dict[tuple[str, int, str], StackNode] = {}
    for owner, stack in stacks:
        level = root
        for frame in stack:
            node = level.setdefault((frame.file, frame.line, frame.function), StackNode(frame))
            node.owners.append(owner)
            level = node.below
    return _sorted(root)


def _sorted(level: dict[tuple[str, int, str], StackNode]) -> list[StackNode]:
    return sorted(level.values(), key=lambda node: -len(node.owners))


def tree_text(
    nodes: Sequence[StackNode], label: Callable[[Sequence[str]], str], name: FileName = short, indent: str = ""
) -> list[str]:
    """Returns a tree as lines: count, function and location, and the owners, by `label`, at branches and ends."""
    lines = []
    for node in nodes:
        below = node.children
        ends = len(node.owners) - sum(len(child.owners) for child in below)
        ranks = f"  [{label(node.owners)}]" if ends or len(nodes) > 1 else ""
        lines.append(
            f"{indent}{len(node.owners)}  {node.frame.function}  {name(node.frame.file)}:{node.frame.line}{ranks}"
        )
        if node.frame.text and not below:
            lines.append(f"{indent}   → {node.frame.text}")
        deeper = indent + ("  " if len(below) > 1 or len(nodes) > 1 else "")
        lines += tree_text(below, label, name, deeper)
    return lines


# -- selections --------------------------------------------------------------------------------------------------------


def pick(records: Sequence[Stopped], text: str) -> list[Stopped]:
    """Returns the selected ranks. Raises DebugError for none, or for invalid text."""
    words = text.replace("[", " ").replace("]", " ").split()
    picked = list(records)
    for word in words:
        dim = _DIM.fullmatch(word.rstrip(","))
        if dim is not None:
            picked = _by_dim(picked, dim[1], dim[2])
        elif re.fullmatch(r"[-\d:,]+", word):
            ranks = _numbers(word, 1 + max((record.rank for record in picked), default=0))
            picked = [record for record in picked if record.rank in ranks]
        elif word != "all":
            picked = [record for record in picked if record.name == word]
    if not picked:
        names = ", ".join(dict.fromkeys(record.name for record in records)) or "nothing"
        raise DebugError(f"no stopped rank is {text}; stopped: {names}. Write a rank (3), or gpus=0:4, or all")
    return picked


def _by_dim(records: Sequence[Stopped], label: str, text: str) -> list[Stopped]:
    labels = list(dict.fromkeys(axis for record in records for axis in record.labels))
    if label not in labels:
        raise DebugError(f"there is no dimension {label}; there is: {', '.join(labels) or 'none'}")
    pairs = [(record, record.point[record.labels.index(label)]) for record in records if label in record.labels]
    numbers = _numbers(text, 1 + max((index for _, index in pairs), default=0))
    return [record for record, index in pairs if index in numbers]


def _numbers(text: str, size: int) -> set[int]:
    numbers: set[int] = set()
    for part in text.strip(",").split(","):
        piece = _SLICE.fullmatch(part)
        dash = re.fullmatch(r"(\d+)-(\d+)", part)
        if piece is not None:
            ends = [int(end) if end else None for end in piece.groups()]
            numbers |= set(range(*slice(*ends).indices(size)))
        elif dash is not None:
            numbers |= set(range(int(dash[1]), int(dash[2]) + 1))
        elif re.fullmatch(r"-?\d+", part):
            numbers.add(int(part) if int(part) >= 0 else size + int(part))
        else:
            raise DebugError(f"{part} is neither a rank nor a slice: write 3, 0:4, or 0,2,5")
    return numbers


# -- the table of a waiting cell ---------------------------------------------------------------------------------------


class Missing:
    """Ranks of a mesh that are not stopped, and their activity."""

    def __init__(self, name: str, extent: Extent, activities: Mapping[tuple[int, ...], str]) -> None:
        self.name = name
        self.extent = extent
        self.activities = dict(activities)  # by point

    def by_activity(self) -> dict[str, list[tuple[int, ...]]]:
        """Ranks by their activity."""
        by_activity: dict[str, list[tuple[int, ...]]] = {}
        for point, activity in self.activities.items():
            by_activity.setdefault(activity, []).append(point)
        return by_activity

    def where(self, points: Iterable[tuple[int, ...]]) -> str:
        """Points of the mesh as text: `gpus=0-2`."""
        return places(self.extent.labels, points, self.extent.sizes)

    def lines(self) -> list[str]:
        """`not stopped: trainers gpus=5 (runs step for 3 s, at model.py:88 in forward)`."""
        return [
            f"not stopped: {self.name} {self.where(points)}".rstrip() + (f": {activity}" if activity else "")
            for activity, points in self.by_activity().items()
        ]


def table_text(
    records: Sequence[Stopped],
    *,
    sizes: Mapping[str, int] | None = None,
    missing: Sequence[Missing] = (),
    name: FileName = short,
    source: bool = True,
) -> str:
    """Returns a line for each group, the other ranks, and the source around the line of the largest group.

    `sizes` are those of whole meshes, by uid; `name` gives display names of files.
    """
    groups = grouped(records)
    if not groups:
        return "nothing is stopped"
    stopped = [record for record in records if record.blocks_actor]
    opened = len(records) - len(stopped)
    counts = [f"{counted(len({record.place for record in stopped}), 'rank')} stopped"] if stopped else []
    counts += [f"{counted(opened, 'failed call')} opened"] if opened else []
    lines = [f"■ {', '.join(counts)}"]
    rows = [_row(group, (sizes or {}).get(group.first.mesh), name) for group in groups]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for group, row in zip(groups, rows, strict=True):
        lines.append(
            "  " + "  ".join(text.ljust(width) for text, width in zip(row[:3], widths, strict=True)) + f"  {row[3]}"
        )
        if group.first.note:
            lines.append(f"      {group.first.note}")
    lines += [f"  {line}" for entry in missing for line in entry.lines()]
    if source:
        biggest = max(groups, key=lambda group: group.ranks)
        lines += ["", *source_lines(biggest.first)]
    return "\n".join(line.rstrip() for line in lines)


def _row(group: StackGroup, size: int | None, name: FileName) -> tuple[str, str, str, str]:
    first = group.first
    count = f"{group.ranks} of {size}" if size is not None else str(group.ranks)
    reasons = list(dict.fromkeys(record.reason for record in group.records))
    reason = reasons[0] if len(reasons) == 1 else f"{reasons[0]} and {len(reasons) - 1} other reasons"
    thread = f", thread {group.thread}" if group.thread else ""
    return count, f"at {place(first.frame, name)}", f"{group.where}{thread}", reason


def source_lines(record: Stopped) -> list[str]:
    """Returns the source around its line, which is marked."""
    line = record.selected_frame.line
    last = record.first + len(record.source) - 1
    width = len(str(last))
    return [
        f"  {'→' if number == line else ' '} {number:>{width}}  {text}".rstrip()
        for number, text in enumerate(record.source, record.first)
    ]
