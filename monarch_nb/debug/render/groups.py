"""Stopped ranks drawn together, by actor mesh and line; and their stacks as one tree. Pure."""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from monarch_nb.debug.records import Frame, Stopped
from monarch_nb.shape import places, spans

FileName = Callable[[str], str]
THREADS = 3  # names of threads that are listed for a group


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
