"""What people write after a magic's name, read into plain values; what is wrong with it is said with a way out."""

import difflib
import functools
import keyword
import re
from collections.abc import Iterable
from typing import Any, TypeAlias

from IPython.core.error import UsageError
from msgspec import Struct, field

from monarch_nb.mesh import ActorMesh, ProcMesh
from monarch_nb.mesh.handle import part_of, region_of
from monarch_nb.shape import Region

Mesh: TypeAlias = "ProcMesh | ActorMesh[Any]"

USUAL_DIMS = ("hosts", "gpus")  # what almost everybody means by a dimension of a similar name
_DIM = re.compile(r"([^\W\d]\w*)=(.*)", re.ASCII)
_SLICE = re.compile(r"(-?\d*):(-?\d*)(?::(-?\d*))?")
_SPAN = re.compile(r"(-?\d+)(?:-(\d+))?")


class MeshWish(Struct, frozen=True):
    """`%mesh NAME gpus=4 hosts=2 --fresh --no-dedup`."""

    name: str
    dims: dict[str, int] = field(default_factory=dict)
    fresh: bool = False
    dedup: bool = True


Picks: TypeAlias = "dict[str, int | slice | list[int]]"


class Place(Struct, frozen=True):
    """`%%on NAME gpus=0-2,5`: a mesh, or the ranks of it that are picked; `hosts=0 gpus=1; hosts=1` picks both."""

    magic: str
    name: str
    picks: tuple[Picks, ...] = ()
    options: frozenset[str] = frozenset()

    def of(self, mesh: Mesh) -> Mesh:
        """The part of `mesh` that is picked. Raises UsageError for a dimension or an index that it does not have."""
        if not self.picks:
            return mesh
        region = region_of(mesh)
        try:
            parts = [region.pick(**picks) for picks in self.picks]
        except (TypeError, IndexError, ValueError) as error:
            raise UsageError(f"{self.magic}: {error}") from None
        return part_of(mesh, functools.reduce(Region.union, parts))


class ActorWish(Struct, frozen=True):
    """`%%actor NAME on MESH class=Trainer lr=1e-3 --fresh`; the arguments are expressions."""

    name: str
    mesh: str
    args: tuple[str, ...] = ()
    kwargs: dict[str, str] = field(default_factory=dict)
    cls: str = ""
    fresh: bool = False


def actor_wish(line: str) -> ActorWish:
    """Reads the arguments of %%actor. Raises UsageError."""
    usage = "write %%actor trainers on workers lr=1e-3"
    words = _words(line)
    options = {word for word in words if re.fullmatch(r"--[a-z]+", word)}
    _check_options("%%actor", options, {"--fresh"})
    words = [word for word in words if word not in options]
    if len(words) < 3 or words[1] != "on":
        raise UsageError(f"%%actor: a name, and the mesh that the actors are to live on, come first: {usage}")
    name, _, mesh, *given = words
    if not name.isidentifier() or keyword.iskeyword(name):
        raise UsageError(f"%%actor: {name!r} cannot be the name of a variable; {usage}")
    args: list[str] = []
    kwargs: dict[str, str] = {}
    for word in given:
        found = re.fullmatch(r"([^\W\d]\w*)=(?!=)(.*)", word, re.ASCII | re.DOTALL)
        label, text = (found[1], found[2]) if found is not None else ("", word)
        if label in kwargs:
            raise UsageError(f"%%actor: {label} is given twice")
        if not label and kwargs:
            raise UsageError(f"%%actor: {word} comes after {'='.join(next(reversed(kwargs.items())))}; {_BLANKS}")
        if label != "class":
            _check_expression(label, text)
        if label:
            kwargs[label] = text
        else:
            args.append(text)
    return ActorWish(name, mesh, tuple(args), kwargs, kwargs.pop("class", ""), "--fresh" in options)


_BLANKS = "positional arguments come before named ones, and an expression has no blanks outside of brackets"


def _check_expression(label: str, text: str) -> None:
    try:
        compile(text, "<argument>", "eval")
    except SyntaxError as error:
        what = f"{label}={text}" if label else text
        raise UsageError(f"%%actor: {what} is not an expression ({error.msg}); {_BLANKS}") from None


def _words(line: str) -> list[str]:
    """What is separated by blanks, where these are neither in brackets nor in quotes; commas at the ends go."""
    words, word, depth, quote = [], "", 0, ""
    place = 0
    while place < len(line):
        char = line[place]
        if quote:
            if char == "\\":
                word += line[place : place + 2]
                place += 2
                continue
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        elif char.isspace() and depth <= 0:
            words.append(word)
            word = ""
        word += "" if not word and char.isspace() else char
        place += 1
    return [stripped for each in (*words, word) if (stripped := each.rstrip(","))]


def mesh_wish(line: str) -> MeshWish:
    """Reads the arguments of %mesh. Raises UsageError."""
    name, words, options = _split("%mesh NAME gpus=4", line, {"--fresh", "--no-dedup"})
    dims: dict[str, int] = {}
    for word in words:
        label, text = _dim(word, "gpus=4")
        usual = difflib.get_close_matches(label, USUAL_DIMS, n=1, cutoff=0.8)
        if usual and label not in USUAL_DIMS:
            raise UsageError(
                f"%mesh: the usual dimensions are called {' and '.join(USUAL_DIMS)}; did you mean {usual[0]}={text}?"
            )
        if not text.isdecimal() or int(text) < 1:
            raise UsageError(
                f"%mesh: {label}={text} is not a size: write a whole number of at least 1, as in {label}=4"
            )
        if label in dims:
            raise UsageError(f"%mesh: {label} is given twice")
        dims[label] = int(text)
    return MeshWish(name, dims, "--fresh" in options, "--no-dedup" not in options)


def place(magic: str, line: str, options: Iterable[str] = ()) -> Place:
    """Reads a mesh's name and what is picked of it, as people write ranks and as output names them: `gpus=0-2,5`.

    Raises UsageError.
    """
    first, *others = line.split(";")
    name, words, given = _split(f"{magic} NAME gpus=0-2", first, set(options))
    picks = [_picks(magic, words)] if words else []
    for other in others:
        words = _split_words(other)
        given |= {word for word in words if word.startswith("-")}
        picks.append(_picks(magic, [word for word in words if not word.startswith("-") and word != name]))
    _check_options(magic, given, set(options))
    return Place(magic, name, tuple(each for each in picks if each), frozenset(given))


def _picks(magic: str, words: Iterable[str]) -> Picks:
    picks: Picks = {}
    for word in words:
        label, text = _dim(word, "gpus=0-2")
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
    if found := _SLICE.fullmatch(text):
        return slice(*(_number(part or "") for part in found.groups()))
    found = _SPAN.fullmatch(text)
    if found is None:
        raise UsageError(
            f"{magic}: {label}={text} picks no rank: write an index ({label}=0), a list ({label}=0,2-4) or a slice "
            f"({label}=0:2)"
        )
    first, last = found.groups()
    if last is None:
        return int(first)
    if int(last) < int(first):
        raise UsageError(f"{magic}: {label}={text} runs backwards: write {label}={last}-{first}")
    return list(range(int(first), int(last) + 1))


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
    words = _split_words(line)
    magic = usage.split()[0]
    given = {word for word in words if word.startswith("-")}
    _check_options(magic, given, options)
    words = [word for word in words if not word.startswith("-")]
    if not words or "=" in words[0]:
        raise UsageError(f"{magic}: which mesh? The name of a mesh comes first: {usage}")
    return words[0], words[1:], given


def _split_words(line: str) -> list[str]:
    # The brackets with which documentation marks what may be left out are often typed along. A comma before a number
    # goes on with a list of indices.
    return [word.strip("[]") if "=" in word else word for word in re.split(r"\s*,(?!\d)\s*|\s+", line.strip()) if word]


def _check_options(magic: str, given: set[str], known: set[str]) -> None:
    for option in sorted(given - known):
        there = f"; its options are {', '.join(sorted(known))}" if known else ""
        raise UsageError(f"{magic} knows no option {option}{there}. {magic}? shows its help")


def _dim(word: str, example: str) -> tuple[str, str]:
    found = _DIM.fullmatch(word)
    if found is None:
        raise UsageError(f"{word!r} is not a dimension: write a name and a number, as in {example}")
    return found[1], found[2]


def _number(text: str) -> int | None:
    return int(text) if text else None
