"""Text that overwrites itself, as progress bars do with carriage returns and by going up a line: what is left of it."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

UP = "\x1b[A"  # the cursor goes up a line; a bar that stands below another ends with it
_TOKENS = re.compile(r"(\n|\r|\x1b\[A)")


def overwritten(line: str) -> str:
    """A line with carriage returns as a terminal shows it: the last part between them that has text."""
    if "\r" not in line:
        return line
    return next((part for part in reversed(line.split("\r")) if part), "")


@dataclass(slots=True)
class _Row:
    text: str = ""
    bar: bool = False  # it was drawn after a carriage return, and may be drawn again
    draws: int = 0  # since the cursor was last above it


class OverwrittenRows:
    """The rows that may still be drawn again: those of bars, each below the other, and the line that is being written.

    A row stays, as a line, once the writer cannot come back to it: when a line of text follows, or when the row below
    is drawn for the second time without a visit to the one above. Bars that stand below bars go up after each drawing.
    """

    __slots__ = ("_at", "_cut", "_drew", "_loose", "_nested", "_returned", "_rows", "_start", "_uncounted", "_up")

    def __init__(self) -> None:
        self._rows = [_Row()]
        self._at = 0
        self._start = True  # the cursor is at the beginning of a row, and has not come there by a carriage return
        self._returned = False  # by one
        self._up = False  # it has gone up, and nothing was written since
        self._nested = False  # it has gone up before
        self._drew = False  # something was written in this row since the cursor came to it
        self._uncounted = False  # what is drawn over it had nothing to see so far
        self._loose = ""  # text that is written beside a bar, which stays as a line of its own
        self._cut = ""  # the beginning of a command to the terminal

    def feed(self, text: str) -> list[str]:
        """Adds text; returns the lines that are final."""
        left: list[str] = []
        text, self._cut = self._cut + text, ""
        for begun in (UP[:2], UP[:1]):
            if text.endswith(begun):
                text, self._cut = text.removesuffix(begun), begun
        for token in _TOKENS.split(text):
            if token == "\n":
                self._newline(left)
            elif token == "\r":
                self._returned, self._up, self._uncounted = True, False, True
            elif token == UP:
                self._at = max(0, self._at - 1)
                for row in self._rows[self._at + 1 :]:
                    row.draws = 0
                self._up, self._nested, self._returned, self._drew = True, True, False, False
            elif token:
                self._write(token, left)
        return left

    def _newline(self, left: list[str]) -> None:
        if self._loose:
            left.append(self._loose)
            self._loose = ""
            return
        row = self._rows[self._at]
        if self._at and row.bar and self._drew:  # a bar below a bar goes up before anything else
            self._leave(self._at, left)
        if row.bar:
            self._at += 1
        else:
            self._leave(self._at, left)
            left.append(row.text)
            del self._rows[0]
        if self._at == len(self._rows):
            self._rows.append(_Row())
        self._start, self._returned, self._up, self._drew = True, False, False, False

    def _write(self, text: str, left: list[str]) -> None:
        row = self._rows[self._at]
        if self._returned:
            row.text, row.bar = text, True
        elif self._start:  # a line of text: the bars above are done
            self._leave(self._at, left)
            row.text, row.bar = text, False
        elif (self._up and row.bar) or self._loose:
            self._loose += text
        else:
            row.text += text
        if self._uncounted and text.strip():
            self._uncounted = False
            row.draws += 1
            if row.draws > 1:
                self._leave(self._at, left)
        self._start, self._returned, self._drew = False, False, True
        self._up = self._up and bool(self._loose)

    def _leave(self, above: int, left: list[str]) -> None:
        """The rows above that one stay as they are."""
        left += [row.text for row in self._rows[:above] if row.text.strip() or not row.bar]
        del self._rows[:above]
        self._at -= above
        if not self._at and len(self._rows) == 1:
            self._nested = False

    @property
    def plain(self) -> bool:
        """True if nothing can be overwritten and no line has begun."""
        row, begun = self._rows[0], self._returned or self._loose or self._cut
        return len(self._rows) == 1 and not row.text and not row.bar and not begun

    @property
    def ended(self) -> bool:
        """True if an empty line follows all bars, and no bar was ever below another."""
        return not self._nested and not self._returned and not self._rows[self._at].text

    @property
    def shown(self) -> str:
        """The visible text: a line for each row."""
        lines = [row.text for row in self._rows if row.text.strip()]
        return "\n".join([*lines, *([self._loose] if self._loose else [])])

    @property
    def has_bars(self) -> bool:
        """True if it has bars."""
        return any(row.bar for row in self._rows)


def left_of(lines: Iterable[str]) -> list[str]:
    """The lines that are left of some that have ended."""
    rows = OverwrittenRows()
    left = [line for raw in lines for line in rows.feed(f"{raw}\n")]
    return [*left, *(rows.shown.split("\n") if rows.shown else [])]
