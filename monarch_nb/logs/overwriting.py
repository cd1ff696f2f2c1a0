"""Text that overwrites itself, as progress bars do with carriage returns and by going up a line: what is left of it."""

from collections.abc import Iterable

UP = "\x1b[A"  # the cursor goes up a line; a bar that stands below another ends with it


def overwritten(line: str) -> str:
    """What a terminal shows of a line with carriage returns: the last part between them that has text."""
    if "\r" not in line:
        return line
    return next((part for part in reversed(line.split("\r")) if part), "")


class Rows:
    """Tells lines that stay from the steps of bars below other bars, each of which is drawn on a line of its own."""

    __slots__ = ("_at", "_deepest")

    def __init__(self) -> None:
        self._at = 0  # the row that is being written, from the one of the first bar
        self._deepest = -1  # the lowest one with a bar in it

    def lines(self, ended: Iterable[str]) -> list[str]:
        """The lines that stay, of some that have ended; each as it was overwritten last."""
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
        """After drawing a bar the writer has gone up so many rows."""
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
