"""Lines that have not ended: text out of bytes that come in pieces, progress bars, and lines that never end."""

import codecs

from monarch_nb.logs.overwriting import UP, Rows
from monarch_nb.wire import harmless

LONGEST = 100_000  # characters without a line's end: more than that is broken into lines


class LineBuffer:
    """The end of what one stream has written for one call: a line without an end, or bars that may be drawn again."""

    def __init__(self) -> None:
        self._text = ""  # without control characters; else the rows have it
        self.since = 0.0  # when its first character came, monotonic
        self.level = 0
        self.at = 0.0
        self._rows: Rows | None = None
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, data: bytes, level: int, at: float, now: float) -> str:
        """Takes more; gives the lines that are complete now."""
        if not self.text:
            self.since, self.level, self.at = now, level, at
        text = self._decoder.decode(data)
        if self._rows is None and ("\r" in text or UP[0] in text):
            self._rows, text, self._text = Rows(), self._text + text, ""
        if self._rows is not None:
            whole = "".join(f"{line}\n" for line in self._rows.feed(text))
            if len(self._rows.shown) > LONGEST:
                self._rows, whole = Rows(), f"{whole}{self._rows.shown}\n"
            if whole:
                self.since = now
            if self._rows.plain:
                self._rows = None
            return whole
        text = self._text + text
        cut = text.rfind("\n") + 1
        whole, rest = text[:cut], text[cut:]
        if len(rest) > LONGEST:
            whole, rest = f"{whole}{rest}\n", ""
        if cut and rest:
            self.since = now
        self._text = rest
        return whole

    @property
    def text(self) -> str:
        """What there is of it."""
        return self._text if self._rows is None else self._rows.shown

    @property
    def over(self) -> bool:
        """Whether nothing of it matters to what comes."""
        return not self._text and self._rows is None

    @property
    def overwrites(self) -> bool:
        """Whether it overwrites itself, as progress bars do, and goes on to."""
        return self._rows is not None and self._rows.has_bars and not self._rows.ended

    @property
    def shown(self) -> str:
        """What there is to see of it, a line for each bar."""
        return harmless(self.text)
