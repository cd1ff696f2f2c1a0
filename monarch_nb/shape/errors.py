"""Errors for points and names that do not exist.

Each is both the error of Python's own containers and that of torchmonarch in the same place: programs catch either.
"""

import difflib
from collections.abc import Sequence


class OutOfRangeError(IndexError, ValueError):
    """An index, rank or coordinate is out of range."""


class NegativeError(OutOfRangeError, OverflowError):
    """A negative number where none is valid."""


class DimensionError(TypeError, ValueError):
    """A selection names an unknown dimension, as an unknown keyword would be."""


class UnknownLabelError(KeyError, ValueError):
    """A label that is looked up does not exist."""

    def __str__(self) -> str:  # KeyError would quote it
        return str(self.args[0]) if self.args else ""


def out_of_range(text: str, *numbers: int) -> OutOfRangeError:
    """Returns the error for these numbers: NegativeError if one of them is negative."""
    return NegativeError(text) if any(number < 0 for number in numbers) else OutOfRangeError(text)


def known_dims(labels: Sequence[str], meant: str = "") -> str:
    """Returns the end of an error text about an unknown dimension: the known ones, and the one closest to it."""
    if not labels:
        return "it has no dimensions"
    close = difflib.get_close_matches(meant, labels, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"its dimensions are {', '.join(map(repr, labels))}{hint}"
