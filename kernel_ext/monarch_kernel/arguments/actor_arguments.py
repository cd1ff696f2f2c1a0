"""`%%actor NAME on MESH class=Trainer lr=1e-3 --fresh`, read into plain values; the arguments are expressions."""

import re

from IPython.core.error import UsageError
from msgspec import Struct, field

from .words import check_options, is_name

_NAMED = re.compile(r"([^\W\d]\w*)=(?!=)(.*)", re.ASCII | re.DOTALL)
_BLANKS = "positional arguments come before named ones, and an expression has no blanks outside of brackets"


class ActorArguments(Struct, frozen=True):
    """Arguments of a %%actor line."""

    name: str
    mesh: str
    args: tuple[str, ...] = ()
    kwargs: dict[str, str] = field(default_factory=dict)
    cls: str = ""
    fresh: bool = False

    @property
    def constructor(self) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
        """The arguments of `__init__`, to be compared."""
        return self.args, tuple(sorted(self.kwargs.items()))


def read_actor(line: str) -> ActorArguments:
    """Reads the arguments of %%actor. Raises UsageError."""
    usage = "write %%actor trainers on workers lr=1e-3"
    words = _expressions(line)
    options = {word for word in words if re.fullmatch(r"--[a-z]+", word)}
    check_options("%%actor", options, {"--fresh"})
    words = [word for word in words if word not in options]
    if len(words) < 3 or words[1] != "on":
        raise UsageError(f"%%actor: a name, and the mesh that the actors are to live on, come first: {usage}")
    name, _, mesh, *expressions = words
    if not is_name(name):
        raise UsageError(f"%%actor: {name!r} cannot be the name of a variable; {usage}")
    args: list[str] = []
    kwargs: dict[str, str] = {}
    for word in expressions:
        match = _NAMED.fullmatch(word)
        label, text = (match[1], match[2]) if match is not None else ("", word)
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
    return ActorArguments(name, mesh, tuple(args), kwargs, kwargs.pop("class", ""), "--fresh" in options)


def _check_expression(label: str, text: str) -> None:
    try:
        compile(text, "<argument>", "eval")
    except SyntaxError as error:
        argument = f"{label}={text}" if label else text
        raise UsageError(f"%%actor: {argument} is not an expression ({error.msg}); {_BLANKS}") from None


def _expressions(line: str) -> list[str]:
    """Expressions separated by blanks outside of brackets and quotes; commas at their ends are dropped."""
    words, word, depth, quote = [], "", 0, ""
    index = 0
    while index < len(line):
        char = line[index]
        if quote:
            if char == "\\":
                word += line[index : index + 2]
                index += 2
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
        index += 1
    return [stripped for text in (*words, word) if (stripped := text.rstrip(","))]
