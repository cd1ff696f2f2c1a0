"""What people write after a magic's name, read into plain values; what is wrong with it is said with a way out."""

import keyword
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from IPython.core.error import UsageError

_DIM = re.compile(r"([^\W\d]\w*)=(.*)", re.ASCII)
_PICK = re.compile(r"\[?(-?\d*)(:-?\d*)?(:-?\d*)?\]?")


@dataclass(frozen=True)
class MeshWish:
    """`%mesh NAME gpus=4 hosts=2 --fresh`."""

    name: str
    dims: dict[str, int] = field(default_factory=dict)
    fresh: bool = False


@dataclass(frozen=True)
class Place:
    """`%%on NAME gpus=0:2`: a mesh, or the slice of it that is picked."""

    name: str
    picks: "dict[str, int | slice]" = field(default_factory=dict)


def mesh_wish(line: str) -> MeshWish:
    """Reads the arguments of %mesh. Raises UsageError."""
    name, words, options = _split("%mesh NAME gpus=4", line, {"--fresh"})
    dims: dict[str, int] = {}
    for word in words:
        label, text = _dim(word, "gpus=4")
        if not text.isdecimal() or int(text) < 1:
            raise UsageError(f"%mesh: {label}={text} is no size: write a whole number from 1 on, as in {label}=4")
        if label in dims:
            raise UsageError(f"%mesh: {label} is given twice")
        dims[label] = int(text)
    return MeshWish(name, dims, "--fresh" in options)


def place(magic: str, line: str) -> Place:
    """Reads a mesh's name and what is picked of it. Raises UsageError."""
    name, words, _ = _split(f"{magic} NAME gpus=0:2", line, set())
    picks: dict[str, int | slice] = {}
    for word in words:
        label, text = _dim(word, "gpus=0:2")
        found = _PICK.fullmatch(text)
        if found is None or not text.strip("[]"):
            raise UsageError(
                f"{magic}: {label}={text} picks nothing: write an index ({label}=0) or a slice ({label}=0:2)"
            )
        if label in picks:
            raise UsageError(f"{magic}: {label} is given twice")
        first, *rest = found.groups()
        parts = [_number(first), *(_number(part[1:]) for part in rest if part is not None)]
        picks[label] = slice(*parts) if len(parts) > 1 else int(first)
    return Place(name, picks)


def names(magic: str, line: str, options: Iterable[str] = ()) -> tuple[list[str], set[str]]:
    """Reads names and options. Raises UsageError."""
    words = line.split()
    given = {word for word in words if word.startswith("-")}
    _check_options(magic, given, set(options))
    found = [word.rstrip(",") for word in words if not word.startswith("-")]
    if not found and not given:
        raise UsageError(f"{magic}: which mesh? Write {magic} NAME{''.join(f', or {magic} {o}' for o in options)}")
    return found, given


def check_name(name: str) -> None:
    """Raises UsageError for a name that no variable can have."""
    if not name.isidentifier() or keyword.iskeyword(name):
        raise UsageError(f"%mesh: {name!r} cannot be the name of a variable; write %mesh workers gpus=4")


def _split(usage: str, line: str, options: set[str]) -> tuple[str, list[str], set[str]]:
    # The brackets with which documentation marks what may be left out are often typed along.
    words = [word.strip("[]") if "=" in word else word for word in re.split(r"[\s,]+", line.strip()) if word]
    magic = usage.split()[0]
    given = {word for word in words if word.startswith("-")}
    _check_options(magic, given, options)
    words = [word for word in words if not word.startswith("-")]
    if not words or "=" in words[0]:
        raise UsageError(f"{magic}: the name of a mesh comes first: {usage}")
    return words[0], words[1:], given


def _check_options(magic: str, given: set[str], known: set[str]) -> None:
    for option in sorted(given - known):
        there = f"; there is {', '.join(sorted(known))}" if known else ""
        raise UsageError(f"{magic} knows no option {option}{there}. {magic}? shows its help")


def _dim(word: str, example: str) -> tuple[str, str]:
    found = _DIM.fullmatch(word)
    if found is None:
        raise UsageError(f"{word!r} is no dimension: write its name and a number, as in {example}")
    return found[1], found[2]


def _number(text: str) -> int | None:
    return int(text) if text else None
