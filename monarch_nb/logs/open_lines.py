"""Lines that have not ended: text out of bytes that come in pieces, progress bars, and lines that never end."""

import codecs

from monarch_nb.logs.overwriting import UP, Rows, overwritten, shown
from monarch_nb.wire import harmless

LONGEST = 100_000  # characters without a line's end: more than that is broken into lines


class LineBuffer:
    """The end of what one stream has written for one call: a line without an end."""

    def __init__(self) -> None:
        self.text = ""
        self.since = 0.0  # when its first character came, monotonic
        self.level = 0
        self.at = 0.0
        self._rows = Rows()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, data: bytes, level: int, at: float, now: float) -> str:
        """Takes more; gives the lines that are complete now."""
        if not self.text:
            self.since, self.level, self.at = now, level, at
        text = self.text + self._decoder.decode(data)
        cut = text.rfind("\n") + 1
        whole, rest = text[:cut], text[cut:]
        if whole and ("\r" in whole or UP in whole or not self._rows.plain):
            whole = "".join(f"{line}\n" for line in self._rows.lines(whole[:-1].split("\n")))
        if "\r" in rest:  # what a progress bar has overwritten is of no use
            left = f"\r{overwritten(rest)}" + ("\r" if rest.endswith("\r") else "")
            self._rows.up(rest.count(UP) - left.count(UP))
            rest = left
        if len(rest) > LONGEST:
            whole, rest = f"{whole}{overwritten(rest)}\n", ""
        if cut and rest:
            self.since = now
        self.text = rest
        return whole

    @property
    def over(self) -> bool:
        """Whether nothing of it matters to what comes."""
        return not self.text and self._rows.plain

    @property
    def overwrites(self) -> bool:
        """Whether it overwrites itself, as progress bars do."""
        return "\r" in self.text

    @property
    def shown(self) -> str:
        """What there is to see of it."""
        return harmless(shown(self.text))
