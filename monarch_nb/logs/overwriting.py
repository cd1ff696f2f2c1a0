"""What is left of text that overwrites itself, as progress bars do: carriage returns, and going up a line again."""

from collections.abc import Iterable

UP = "\x1b[A"  # bars below a bar end with it


def overwritten(line: str) -> str:
    """What a terminal would show of a line with carriage returns in it: the text after the last one that is any."""
    if "\r" not in line:
        return line
    return next((part for part in reversed(line.split("\r")) if part), "")


class Rows:
    """Tells lines from the steps of bars that stand below others: those are drawn again and again, each a line down."""

    __slots__ = ("_at", "_deepest")

    def __init__(self) -> None:
        self._at = 0  # the row that is written, from where all began
        self._deepest = -1  # the lowest one with a bar in it

    def lines(self, ended: Iterable[str]) -> list[str]:
        """Of lines that have ended, those that stay, as they are left."""
        left = []
        for raw in ended:
            line = overwritten(raw.removesuffix("\r"))
            bare = _without_ups(line)
            self.up(raw.count(UP))
            if len(bare) == len(line) and (line or self.plain or self._at > self._deepest):
                left.append(line)
                if self._at > self._deepest:
                    self._at, self._deepest = 0, -1
                    continue
            self._at += 1
        return left

    def up(self, count: int) -> None:
        """A bar was drawn, and then the writer has gone up so many rows."""
        if count:
            self._deepest = max(self._deepest, self._at)
            self._at -= count

    @property
    def plain(self) -> bool:
        """Whether lines without control characters stay as they are."""
        return self._deepest < 0


def shown(line: str) -> str:
    """What there is to see of a line that has not ended."""
    return _without_ups(overwritten(line))


def _without_ups(line: str) -> str:
    while line.endswith(UP):
        line = line.removesuffix(UP)
    return line
