"""Errors for points and names that do not exist.

Each is what Python's own containers raise, and also what torchmonarch raises in the same place: programs catch either.
"""

import difflib
from collections.abc import Sequence


class OutOfRangeError(IndexError, ValueError):
    """An index, rank or coordinate is outside of what there is."""


class NegativeError(OutOfRangeError, OverflowError):
    """A negative number stands where none can be."""


class DimensionError(TypeError, ValueError):
    """A selection names a dimension that is not there, as an unknown keyword would be."""


class UnknownLabelError(KeyError, ValueError):
    """A label is looked up that is not there."""

    def __str__(self) -> str:  # KeyError would quote it
        return str(self.args[0]) if self.args else ""


def out_of_range(text: str, *numbers: int) -> OutOfRangeError:
    """The error for these numbers: NegativeError if one of them is negative."""
    return NegativeError(text) if any(number < 0 for number in numbers) else OutOfRangeError(text)


def known_dims(labels: Sequence[str], meant: str = "") -> str:
    """The end of an error text about a dimension that is not there: says which ones are, and the one closest to it."""
    if not labels:
        return "it has no dimensions"
    close = difflib.get_close_matches(meant, labels, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"its dimensions are {', '.join(map(repr, labels))}{hint}"
