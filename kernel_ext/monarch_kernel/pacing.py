"""How much of what the ranks print a front end is given: a flood of one rank takes nothing from the others.

A Jupyter server cuts a kernel off that sends more than 1 MB/s over three seconds; so much is never sent.
"""

import time
from collections import deque
from collections.abc import Iterable

from monarch_nb.mesh.log_lines import Line
from monarch_nb.mesh.output import Written

RANK_LINES = 200.0  # of one rank in a second
RANK_BURST = 1000.0  # and at once, after a while of silence
BYTES = 400_000.0  # of all ranks in a second
BYTES_BURST = 400_000.0
WAITING = 256 * 1024  # characters of one rank that wait to be shown; what comes on top is held back at once
LAST = 5  # lines of those held back that are shown at the end


class Bucket:
    """So much is allowed in a second, and what was not used is saved up to a limit."""

    def __init__(self, rate: float, most: float) -> None:
        self._rate, self._most = rate, most
        self.left = most
        self._at = time.monotonic()

    def refill(self, now: float) -> float:
        """What is allowed now."""
        self.left = min(self._most, self.left + (now - self._at) * self._rate)
        self._at = now
        return self.left


class Held:
    """Lines of one rank that are not shown: how many, and the last of them."""

    def __init__(self) -> None:
        self.count = 0
        self.last: deque[Line] = deque(maxlen=LAST)
        self.since = time.monotonic()

    def add(self, one: Written, text: str) -> None:
        """More of them."""
        self.count += text.count("\n")
        self.since = time.monotonic()
        for line in text.rsplit("\n", LAST + 1)[-LAST - 1 : -1]:
            self.last.append(Line(one.address, line, one.stream, one.call))


class Pacing:
    """One thread at a time."""

    def __init__(self) -> None:
        self._total = Bucket(BYTES, BYTES_BURST)
        self._ranks: dict[str, Bucket] = {}

    def share(self, waiting: dict[str, list[Written]], held: dict[str, Held]) -> list[tuple[float, Line]]:
        """The lines to show now, with their times; what does not fit is added to `held`, by address."""
        now = time.monotonic()
        chosen = {address: self._of_rank(address, written, held, now) for address, written in waiting.items()}
        sizes = {address: sum(_size(*piece) for piece in pieces) for address, pieces in chosen.items()}
        left = self._total.refill(now)
        shown: list[tuple[float, Line]] = []
        for place, address in enumerate(sorted(sizes, key=sizes.__getitem__)):  # whoever wants little gets it all
            share = left / (len(sizes) - place)
            used = 0.0
            for one, line in chosen[address]:
                size = _size(one, line)
                if used and size and used + size > share:
                    held.setdefault(address, Held()).add(one, f"{line}\n")
                    continue
                used += size
                shown.append((one.at, Line(address, line, one.stream, one.call, one.display)))
            left -= used
        self._total.left = left
        return shown

    def _of_rank(
        self, address: str, written: Iterable[Written], held: dict[str, Held], now: float
    ) -> list[tuple[Written, str]]:
        bucket = self._ranks.get(address) or self._ranks.setdefault(address, Bucket(RANK_LINES, RANK_BURST))
        left = int(bucket.refill(now))
        pieces: list[tuple[Written, str]] = []
        for one in written:
            if one.display is not None:  # those have bounds of their own
                pieces.append((one, one.text.removesuffix("\n")))
                continue
            lines = one.text.split("\n", left)  # the end of the last one is behind its \n
            rest = lines.pop()
            pieces += [(one, line) for line in lines]
            left -= len(lines)
            if rest:
                held.setdefault(address, Held()).add(one, rest)
        bucket.left -= sum(one.display is None for one, _ in pieces)
        return pieces

    def forget(self, address: str) -> None:
        """A process is gone."""
        self._ranks.pop(address, None)


def _size(one: Written, line: str) -> int:
    """Characters of one line, with its end."""
    return len(line) + 1 if one.display is None else 0
