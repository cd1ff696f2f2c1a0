"""The visible result of text that overwrites itself, as progress bars do with carriage returns and cursor movements."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

UP = "\x1b[A"  # moves the cursor up a line; a bar below another ends with it
_HIDE, _SHOW = "\x1b[?25l", "\x1b[?25h"  # the cursor; between them rich and others redraw several rows
_TOKENS = re.compile(r"(\n|\r|\x1b\[\d*A|\x1b\[[012]?K|\x1b\[\?25[lh])")
_BEGUN = re.compile(r"\x1b(\[(\?2?5?|\d{0,3}))?$")  # the beginning of a terminal command
MOST_ROWS = 60  # of one display


def overwritten(line: str) -> str:
    """Returns a line with carriage returns as a terminal shows it: the last part between them that has text."""
    if "\r" not in line:
        return line
    return next((part for part in reversed(line.split("\r")) if part), "")


@dataclass(slots=True)
class _Row:
    text: str = ""
    bar: bool = False  # drawn after a carriage return, and may be redrawn
    draws: int = 0  # number of draws since the cursor was last above it


class _LiveRows:
    """The rows of a display that has hidden the cursor: it is redrawn as a whole from its first row.

    Rows above the first one at the next redraw were printed meanwhile, and are final.
    """

    __slots__ = ("_cursor", "_fresh", "_rows", "_went_up")

    def __init__(self) -> None:
        self._rows = [""]
        self._cursor = 0
        self._fresh = True  # the cursor is at the beginning of its row
        self._went_up = False  # the cursor went up, and nothing was written since

    def feed(self, token: str) -> list[str]:
        """Adds text or a command; returns the lines that are final."""
        final: list[str] = []
        if token == "\n":
            self._cursor, self._fresh = self._cursor + 1, True
            if self._cursor == len(self._rows):
                self._rows.append("")
        elif token == "\r":
            self._fresh = True
        elif token.endswith("K") and token[:1] == UP[0]:
            self._rows[self._cursor], self._fresh = "", True
        elif token.endswith("A") and token[:1] == UP[0]:
            self._cursor, self._went_up = max(0, self._cursor - int(token[2:-1] or 1)), True
        elif token:
            if self._went_up:
                final += self._leave(self._cursor)
            self._rows[self._cursor] = token if self._fresh else self._rows[self._cursor] + token
            self._fresh = self._went_up = False
        return final + self._leave(len(self._rows) - MOST_ROWS)

    def _leave(self, above: int) -> list[str]:
        if above <= 0:
            return []
        final = [row for row in self._rows[:above] if row.strip()]
        del self._rows[:above]
        self._cursor = max(0, self._cursor - above)
        return final

    @property
    def lines(self) -> list[str]:
        """The rows that have text."""
        return [row for row in self._rows if row.strip()]


class OverwrittenRows:
    """The rows that may still be redrawn: those of bars, one below the other, and the line that is being written.

    A row becomes a final line once the writer cannot return to it: when a line of text follows, or when the row below
    is drawn for the second time without a visit to the one above. Bars below other bars go up after each drawing.
    While the cursor is hidden all rows may be redrawn.
    """

    __slots__ = (
        "_cursor",
        "_cut",
        "_drew",
        "_live",
        "_loose",
        "_nested",
        "_returned",
        "_rows",
        "_start",
        "_uncounted",
        "_up",
    )

    def __init__(self) -> None:
        self._rows = [_Row()]
        self._cursor = 0
        self._start = True  # the cursor is at the beginning of a row, but not by a carriage return
        self._returned = False  # the cursor is at the beginning of a row by a carriage return
        self._up = False  # the cursor has gone up, and nothing was written since
        self._nested = False  # the cursor has gone up before
        self._drew = False  # the row was written to since the cursor entered it
        self._uncounted = False  # the text drawn over the row was blank so far
        self._loose = ""  # text written beside a bar, which becomes a line of its own
        self._cut = ""  # the beginning of a terminal command
        self._live: _LiveRows | None = None  # while the cursor is hidden

    def feed(self, text: str) -> list[str]:
        """Adds text; returns the lines that are final."""
        final: list[str] = []
        text, self._cut = self._cut + text, ""
        if begun := _BEGUN.search(text):
            text, self._cut = text[: begun.start()], begun.group()
        for token in _TOKENS.split(text):
            if token == _HIDE:
                final += self.shown.split("\n") if self.shown else []
                self._rows, self._cursor, self._loose, self._live = [_Row()], 0, "", _LiveRows()
            elif token == _SHOW:
                final += self._live.lines if self._live is not None else []
                if self._live is not None:
                    self._live, self._start, self._returned, self._nested = None, True, False, False
            elif self._live is not None:
                final += self._live.feed(token)
            elif token == "\n":
                self._newline(final)
            elif token == "\r":
                self._returned, self._up, self._uncounted = True, False, True
            elif token.startswith(UP[0]) and token.endswith("K"):
                continue  # the next text replaces the row
            elif token.startswith(UP[0]) and token.endswith("A"):
                self._cursor = max(0, self._cursor - int(token[2:-1] or 1))
                for row in self._rows[self._cursor + 1 :]:
                    row.draws = 0
                self._up, self._nested, self._returned, self._drew = True, True, False, False
            elif token:
                self._write(token, final)
        return final

    def _newline(self, final: list[str]) -> None:
        if self._loose:
            final.append(self._loose)
            self._loose = ""
            return
        row = self._rows[self._cursor]
        if self._cursor and row.bar and self._drew:  # a bar below a bar always goes up first
            self._leave(self._cursor, final)
        if row.bar:
            self._cursor += 1
        else:
            self._leave(self._cursor, final)
            final.append(row.text)
            del self._rows[0]
        if self._cursor == len(self._rows):
            self._rows.append(_Row())
        self._start, self._returned, self._up, self._drew = True, False, False, False

    def _write(self, text: str, final: list[str]) -> None:
        row = self._rows[self._cursor]
        if self._returned:
            row.text, row.bar = text, True
        elif self._start:  # a line of text: the bars above are finished
            self._leave(self._cursor, final)
            row.text, row.bar = text, False
        elif (self._up and row.bar) or self._loose:
            self._loose += text
        else:
            row.text += text
        if self._uncounted and text.strip():
            self._uncounted = False
            row.draws += 1
            if row.draws > 1:
                self._leave(self._cursor, final)
        self._start, self._returned, self._drew = False, False, True
        self._up = self._up and bool(self._loose)

    def _leave(self, above: int, final: list[str]) -> None:
        """Makes the rows above this one final."""
        final += [row.text for row in self._rows[:above] if row.text.strip() or not row.bar]
        del self._rows[:above]
        self._cursor -= above
        if not self._cursor and len(self._rows) == 1:
            self._nested = False

    @property
    def plain(self) -> bool:
        """True if nothing can be overwritten and no line has begun."""
        row, begun = self._rows[0], self._returned or self._loose or self._cut or self._live
        return len(self._rows) == 1 and not row.text and not row.bar and not begun

    @property
    def ended(self) -> bool:
        """True if an empty line follows all bars, and no bar was ever below another."""
        return not (self._nested or self._returned or self._live) and not self._rows[self._cursor].text

    @property
    def shown(self) -> str:
        """The visible text: a line for each row."""
        if self._live is not None:
            return "\n".join(self._live.lines)
        lines = [row.text for row in self._rows if row.text.strip()]
        return "\n".join([*lines, *([self._loose] if self._loose else [])])

    @property
    def has_bars(self) -> bool:
        """True with any bars."""
        return self._live is not None or any(row.bar for row in self._rows)


def left_of(lines: Iterable[str]) -> list[str]:
    """Returns the visible lines of finished lines that may overwrite themselves."""
    rows = OverwrittenRows()
    final = [line for raw in lines for line in rows.feed(f"{raw}\n")]
    return [*final, *(rows.shown.split("\n") if rows.shown else [])]
