"""Texts and numbers of foreign values: their code cannot break them, and terminals execute no commands in them."""

import contextlib
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import msgspec

from monarch_nb.wire.address import with_host_names

# Colours and weights (SGR) stay. Commands that move the cursor, clear the screen, set titles or write to the clipboard
# are removed with their arguments; every other control character is shown as an escape sequence.
_COMMANDS = re.compile(
    r"(?P<kept>\x1b\[[0-9;:]*m)"
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # CSI
    r"|(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)"  # OSC, DCS, SOS, PM, APC
    r"|\x1b[ -/]+[0-~]"  # character sets
    r"|[\x00-\x07\x0b\x0c\x0e-\x1f\x7f-\x9f]"
)
_CONTROL = re.compile(r"[\x00-\x07\x0b\x0c\x0e-\x1f\x7f-\x9f]")  # a quick check for none
_SUSPECT = re.compile(r"[\x00-\x07\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f-\x9f]|\x1b(?!\[[0-9;:]*m)")  # except colours
# Controls, ends of lines, surrogates, and what changes the direction of the text after it.
_UNNAMEABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_TYPE: Any = vars(type)  # a metaclass may have names of its own


def flush_output(skip: Sequence[object] = ()) -> None:
    """Flushes stdout and stderr, whatever the program has put there, except those in `skip`. Raises nothing."""
    for name in ("stdout", "stderr"):
        with contextlib.suppress(Exception):  # None, closed, or a class of the program without `flush`
            stream = getattr(sys, name)
            if all(stream is not text for text in skip):
                stream.flush()


_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def size_text(count: float) -> str:
    """Returns bytes in three digits: 512 B, 4.00 MB, 16.0 GB; 1 kB is 1024 B."""
    value, unit = float(count), 0
    while value >= 999.5 and unit < len(_UNITS) - 1:
        value /= 1024
        unit += 1
    digits = 0 if value >= 99.95 or unit == 0 else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f} {_UNITS[unit]}"


def harmless(text: str) -> str:
    """Returns a text without terminal commands except colours, tabs, ends of lines, carriage returns and backspaces."""
    if _CONTROL.search(text) is None or _SUSPECT.search(text) is None:
        return text
    return _COMMANDS.sub(_without_command, text)


def name_text(name: str) -> str:
    """Returns a name as one line that can be sent and shown: what could break a display is escaped, as in its repr.

    Other characters stay, also those that Python does not print, such as the joiners of emoji and of Persian.
    """
    return _UNNAMEABLE.sub(lambda match: repr(match[0])[1:-1], name)


def _without_command(match: re.Match[str]) -> str:
    command = match[0]
    if match["kept"]:
        return command
    return f"\\x{ord(command):02x}" if len(command) == 1 else ""


class ThreadCutOff(BaseException):
    """Thrown into a thread to end its work, also the formatting of a text."""


class Harmless(msgspec.Struct, frozen=True):
    """Plain data of which every text, and every tuple of texts, is harmless.

    In a controller the fields in `PROSE`, which are for display, use its names of hosts.
    """

    PROSE: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, tuple):
                if not any(isinstance(part, str) and _CONTROL.search(part) for part in value):
                    continue
                clean: object = tuple(harmless(part) if isinstance(part, str) else part for part in value)
            elif isinstance(value, str) and _CONTROL.search(value):
                clean = harmless(value)
            else:
                continue
            msgspec.structs.force_setattr(self, name, clean)
        for name in self.PROSE:
            value = getattr(self, name)
            named: object = with_host_names(value) if isinstance(value, str) else tuple(map(with_host_names, value))
            if named != value:
                msgspec.structs.force_setattr(self, name, named)


def text_of(value: object) -> str:
    """Returns `str(value)`, harmless; if that raises, a text about it."""
    return _guarded(str, value)


def repr_of(value: object) -> str:
    """Returns `repr(value)`, harmless; if that raises, a text about it."""
    return _guarded(repr, value)


def _guarded(function: Callable[[object], str], value: object) -> str:
    try:
        return _plain(function(value))
    except ThreadCutOff:
        raise
    except BaseException as failure:  # also SystemExit and KeyboardInterrupt, since the caller needs a text
        raised = _name(type(failure), "__name__")
        try:
            text = _plain(str(failure))
        except BaseException:
            text = ""
        how = "repr" if function is repr else "str"
        return f"<{_name(type(value), '__name__')}: its {how} raised {raised}{': ' if text else ''}{text}>"


def _plain(text: str) -> str:
    # A subclass of str may do anything when it is joined or formatted; lone surrogates cannot be sent.
    text = str.__str__(text)
    return harmless(text if text.isascii() else text.encode("utf-8", "backslashreplace").decode())


def type_name(value: object) -> str:
    """Returns the full name of a value's type, without `builtins` and `__main__`."""
    return full_name(value).removeprefix("builtins.").removeprefix("__main__.")


def full_name(value: object) -> str:
    """Returns the full name of a value's type."""
    cls = type(value)
    return f"{_module(cls)}.{_name(cls, '__qualname__')}"


def error_line(error: BaseException) -> str:
    """Returns an exception in one line: `ValueError: text`, or its type's name alone without a text."""
    name, text = _name(type(error), "__name__"), text_of(error)
    return f"{name}: {text}" if text else name


def first_line(text: str) -> str:
    """Returns the first line of a text, with the next if it only introduces that: `… have failed: its process …`."""
    first, _, rest = text.partition("\n")
    return " ".join([first, *rest.strip().splitlines()[:1]]) if first.endswith(":") else first


def number_of(value: Any) -> float:
    """Returns `float(value)`; for a tensor or array of one element without the warnings of float()."""
    if hasattr(value, "detach"):  # it may require a gradient
        value = value.detach()
    return float(value.item() if hasattr(value, "item") and hasattr(value, "dtype") else value)


def _name(cls: type, attribute: str) -> str:
    name: str = _TYPE[attribute].__get__(cls)
    return _plain(name)


def _module(cls: type) -> str:
    module = _TYPE["__module__"].__get__(cls)
    return text_of(module) if isinstance(module, str) else "?"


_ENDS_IN_ES = ("s", "x", "z", "ch", "sh")


def counted(number: int, noun: str) -> str:
    """Returns a number and its noun, in the plural unless it is one: `1 failed call`, `3 meshes`."""
    if number == 1:
        return f"1 {noun}"
    if noun.endswith("y") and not noun.endswith(("ay", "ey", "oy")):
        return f"{number:,} {noun[:-1]}ies"
    return f"{number:,} {noun}{'es' if noun.endswith(_ENDS_IN_ES) else 's'}"


def with_article(noun: str) -> str:
    """Returns `a list`, `an int`."""
    return f"{'an' if noun.lstrip('_')[:1].lower() in tuple('aeiou') else 'a'} {noun}"


def kind_of(value: object) -> str:
    """Returns a value's type with an article: `an int`, `a Trainer`, `None`."""
    return "None" if value is None else with_article(type_name(value).rpartition(".")[2])


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """Returns rows of equally many cells as lines with aligned columns, two spaces apart."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
