"""A mesh, or the ranks of it that are picked: `%%on NAME gpus=0-2,5`; `hosts=0 gpus=1; hosts=1` picks both."""

import functools
import re
from collections.abc import Iterable
from typing import Any, TypeAlias

from IPython.core.error import UsageError
from msgspec import Struct

from monarch_nb.mesh import ActorMesh, ProcMesh, part_of, region_of
from monarch_nb.shape import Region

from .words import check_options, read_dim, split_line, split_words

Mesh: TypeAlias = "ProcMesh | ActorMesh[Any]"
Picks: TypeAlias = "dict[str, int | slice | list[int]]"

_SLICE = re.compile(r"(-?\d*):(-?\d*)(?::(-?\d*))?")
_SPAN = re.compile(r"(-?\d+)(?:-(\d+))?")


class MeshSelection(Struct, frozen=True):
    """The mesh and ranks that a line of `magic` names."""

    magic: str
    name: str
    picks: tuple[Picks, ...] = ()
    options: frozenset[str] = frozenset()

    def of(self, mesh: Mesh) -> Mesh:
        """Returns the selected part of `mesh`. Raises UsageError for an unknown dimension or index."""
        if not self.picks:
            return mesh
        region = region_of(mesh)
        try:
            parts = [region.pick(**picks) for picks in self.picks]
        except (TypeError, IndexError, ValueError) as error:
            raise UsageError(f"{self.magic}: {error}") from None
        return part_of(mesh, functools.reduce(Region.union, parts))


def read_place(magic: str, line: str, options: Iterable[str] = ()) -> MeshSelection:
    """Reads the name of a mesh and the picked ranks, written as in output: `gpus=0-2,5`.

    Raises UsageError.
    """
    first, *parts = line.split(";")
    name, words, flags = split_line(f"{magic} NAME gpus=0-2", first, set(options))
    picks = [_picks(magic, words)] if words else []
    for part in parts:
        words = split_words(part)
        flags |= {word for word in words if word.startswith("-")}
        picks.append(_picks(magic, [word for word in words if not word.startswith("-") and word != name]))
    check_options(magic, flags, set(options))
    return MeshSelection(magic, name, tuple(pick for pick in picks if pick), frozenset(flags))


def _picks(magic: str, words: Iterable[str]) -> Picks:
    picks: Picks = {}
    for word in words:
        label, text = read_dim(word, "gpus=0-2")
        if label in picks:
            raise UsageError(f"{magic}: {label} is given twice")
        parts = [_pick(magic, label, part) for part in text.strip("[]").split(",")]
        if len(parts) == 1:
            picks[label] = parts[0]
        elif any(isinstance(part, slice) for part in parts):
            raise UsageError(f"{magic}: {label}={text} mixes a list and a slice: write {label}=0,2-4")
        else:
            flat = [[part] if isinstance(part, int) else part for part in parts if not isinstance(part, slice)]
            picks[label] = [index for part in flat for index in part]
    return picks


def _pick(magic: str, label: str, text: str) -> int | slice | list[int]:
    if match := _SLICE.fullmatch(text):
        return slice(*(int(part) if part else None for part in match.groups()))
    match = _SPAN.fullmatch(text)
    if match is None:
        raise UsageError(
            f"{magic}: {label}={text} picks no rank: write an index ({label}=0), a list ({label}=0,2-4) or a slice "
            f"({label}=0:2)"
        )
    first, last = match.groups()
    if last is None:
        return int(first)
    if int(last) < int(first):
        raise UsageError(f"{magic}: {label}={text} runs backwards: write {label}={last}-{first}")
    return list(range(int(first), int(last) + 1))
