"""The words of a magic's line: names, dimensions and options; error messages say what to write instead."""

import keyword
import re
from collections.abc import Iterable

from IPython.core.error import UsageError

_DIM = re.compile(r"([^\W\d]\w*)=(.*)", re.ASCII)


def split_words(line: str) -> list[str]:
    """Returns the words of a line, which blanks and commas separate."""
    # The brackets with which documentation marks what may be left out are often typed along. A comma before a number
    # goes on with a list of indices.
    return [word.strip("[]") if "=" in word else word for word in re.split(r"\s*,(?!\d)\s*|\s+", line.strip()) if word]


def split_line(usage: str, line: str, options: set[str]) -> tuple[str, list[str], set[str]]:
    """Returns the name that comes first, the other words, and the options. Raises UsageError."""
    words = split_words(line)
    magic = usage.split()[0]
    flags = {word for word in words if word.startswith("-")}
    check_options(magic, flags, options)
    words = [word for word in words if not word.startswith("-")]
    if not words or "=" in words[0]:
        raise UsageError(f"{magic}: which mesh? The name of a mesh comes first: {usage}")
    return words[0], words[1:], flags


def read_names(magic: str, line: str, options: Iterable[str] = ()) -> tuple[list[str], set[str]]:
    """Reads names and options. Raises UsageError."""
    words = line.split()
    flags = {word for word in words if word.startswith("-")}
    check_options(magic, flags, set(options))
    names = [word.rstrip(",") for word in words if not word.startswith("-")]
    if not names and not flags:
        alternatives = "".join(f", or {magic} {option}" for option in options)
        raise UsageError(f"{magic}: which mesh? Write {magic} NAME{alternatives}")
    return names, flags


def check_options(magic: str, options: set[str], allowed: set[str]) -> None:
    """Raises UsageError for an option that a magic does not have."""
    for option in sorted(options - allowed):
        hint = f"; its options are {', '.join(sorted(allowed))}" if allowed else ""
        raise UsageError(f"{magic} knows no option {option}{hint}. {magic}? shows its help")


def check_name(name: str) -> None:
    """Raises UsageError for a name that no variable can have."""
    if not is_name(name):
        raise UsageError(f"%mesh: {name!r} cannot be the name of a variable; write %mesh workers gpus=4")


def is_name(name: str) -> bool:
    """Returns whether a variable can have this name."""
    return name.isidentifier() and not keyword.iskeyword(name)


def read_dim(word: str, example: str) -> tuple[str, str]:
    """Returns the name of a dimension, and the text after its equals sign. Raises UsageError."""
    match = _DIM.fullmatch(word)
    if match is None:
        raise UsageError(f"{word!r} is not a dimension: write a name and a number, as in {example}")
    return match[1], match[2]
