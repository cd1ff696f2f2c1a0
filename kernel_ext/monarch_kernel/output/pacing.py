"""Limits for the output of ranks: a flood of one rank takes nothing from the others.

A Jupyter server disconnects a kernel that sends more than 1 MB/s over three seconds; output stays below that. And
nobody reads thousands of lines in a cell: a rank that floods is held back until it has written little for a while.
"""

import time
from collections import Counter, deque
from collections.abc import Collection, Sequence

from monarch_nb.logs import Line, Written

RANK_LINES = 50.0  # lines of one rank that are shown in a second
RANK_BURST = 300.0  # lines of one rank that are shown at once, after a while of silence
LINES = 100.0  # different lines of all ranks that are shown in a second, and at once:
LINES_BURST = 600.0
BEGINNING = 50  # lines that are shown of a rank that writes too much
FEW = 20  # lines of a rank that are shown whatever the others write
BYTES = 400_000.0  # characters of all ranks that are shown in a second, and at once:
BYTES_BURST = 400_000.0
WAITING = 256 * 1024  # characters of one rank that wait to be shown; what is more is held back at once
LAST = 200  # withheld lines that are stored
LONGEST = 500  # stored characters of each of these


class Bucket:
    """Allows `rate` in a second; what was not used is saved, up to `most`."""

    def __init__(self, rate: float, most: float) -> None:
        self._rate, self.most = rate, most
        self.balance = most
        self._time = time.monotonic()

    def refill(self, now: float) -> float:
        """Adds the allowance of the time that has passed; returns it."""
        self.balance = min(self.most, self.balance + (now - self._time) * self._rate)
        self._time = now
        return self.balance


class HeldLines:
    """Lines of one rank that are not shown: how many, and the last of them with their times."""

    def __init__(self) -> None:
        self.count = 0
        self.last: deque[tuple[float, Line]] = deque(maxlen=LAST)
        self.begun = self.since = time.monotonic()

    def add(self, written: Written, text: str) -> None:
        """Adds lines, which are later than those before."""
        self.count += text.count("\n")
        self.since = time.monotonic()
        for line in text.rsplit("\n", LAST + 1)[-LAST - 1 : -1]:
            short = line if len(line) <= LONGEST else f"{line[: LONGEST - 1]}…"
            self.last.append((written.at, Line(written.address, short, written.stream, written.call)))


class _Share:
    """Lines that one rank may show of a batch, and those beyond its limit, in the order in which they were written."""

    def __init__(self) -> None:
        self.shown: list[tuple[Written, str]] = []  # lines without their ends
        self.excess: list[tuple[Written, str]] = []  # lines with their ends; all of them come after those shown

    @property
    def size(self) -> float:
        """Characters to show."""
        return sum(_size(*piece) for piece in self.shown)

    def cut(self, indices: Collection[int]) -> None:
        """Removes lines by index; displays stay."""
        shown, cut = [], []
        for index, (written, line) in enumerate(self.shown):
            if index in indices and written.display is None:
                cut.append((written, f"{line}\n"))
            else:
                shown.append((written, line))
        self.shown, self.excess = shown, cut + self.excess


class Pacing:
    """Decides what is shown of each batch of lines, and what is held back. One thread at a time."""

    def __init__(self) -> None:
        self._bytes = Bucket(BYTES, BYTES_BURST)
        self._lines = Bucket(LINES, LINES_BURST)
        self._ranks: dict[str, Bucket] = {}
        self._flooding: set[str] = set()

    def share(self, waiting: dict[str, list[Written]], backlogs: dict[str, HeldLines]) -> list[tuple[float, Line]]:
        """Returns the lines to show now, with their times; what does not fit is added to `backlogs`, by address."""
        now = time.monotonic()
        shares = {address: self._of_rank(address, written, now) for address, written in waiting.items()}
        self._bound_lines(shares, now)
        self._bound_bytes(shares, now)
        for address, share in shares.items():
            for written, text in share.excess:
                backlogs.setdefault(address, HeldLines()).add(written, text)
        return [
            (written.at, Line(address, line, written.stream, written.call, written.display))
            for address, share in shares.items()
            for written, line in share.shown
        ]

    def _of_rank(self, address: str, batch: Sequence[Written], now: float) -> _Share:
        """Lines that one rank may show; none while it floods."""
        bucket = self._ranks.get(address) or self._ranks.setdefault(address, Bucket(RANK_LINES, RANK_BURST))
        budget = int(bucket.refill(now))
        if address in self._flooding and budget > bucket.most / 2:
            self._flooding.discard(address)
        if sum(written.line_count for written in batch if written.display is None) > budget:
            budget = min(budget, BEGINNING)
        share = _Share()
        for written in batch:
            if written.display is not None:  # displays have their own limits
                share.shown.append((written, written.text.removesuffix("\n")))
                continue
            room = 0 if address in self._flooding else budget
            lines = written.text.split("\n", room)  # the last item is the text after the last \n
            rest = lines.pop()
            share.shown += [(written, line) for line in lines]
            # Withheld lines count too: a rank is shown again only once it writes less.
            budget = max(0, budget - written.line_count)
            if rest:
                self._flooding.add(address)
                share.excess.append((written, rest))
        bucket.balance = budget
        return share

    def _bound_lines(self, shares: dict[str, _Share], now: float) -> None:
        """Removes lines beyond the limit of all ranks together; equal lines of several ranks count once."""
        budget = self._lines.refill(now)
        counts: Counter[str] = Counter()
        for share in shares.values():
            counts |= Counter(line for written, line in share.shown if written.display is None)
        if counts.total() <= budget:
            self._lines.balance = budget - counts.total()
            return
        keys: set[tuple[str, int]] = set()
        for order, address in enumerate(sorted(shares, key=lambda rank: len(shares[rank].shown))):
            share = shares[address]
            most = min(budget / (len(shares) - order), BEGINNING) if len(share.shown) > FEW else FEW
            used = 0
            times: Counter[str] = Counter()
            for index, (written, line) in enumerate(share.shown):
                if written.display is not None:
                    continue
                times[line] += 1
                key = line, times[line]
                if key in keys:
                    continue
                if used + 1 > most:
                    share.cut(range(index, len(share.shown)))
                    self._flooding.add(address)
                    self._ranks[address].balance = 0.0
                    break
                keys.add(key)
                used += 1
            budget = max(0.0, budget - used)
        self._lines.balance = budget

    def _bound_bytes(self, shares: dict[str, _Share], now: float) -> None:
        """Removes what exceeds the bytes that a front end may be sent; ranks that need little keep all of it."""
        budget = self._bytes.refill(now)
        for order, share in enumerate(sorted(shares.values(), key=lambda share: share.size)):
            most = budget / (len(shares) - order)
            used = 0.0
            cut = set()
            for index, piece in enumerate(share.shown):
                size = _size(*piece)
                if used and size and used + size > most:
                    cut.add(index)
                else:
                    used += size
            share.cut(cut)
            budget -= used
        self._bytes.balance = budget

    def reset(self) -> None:
        """Restores all limits, at the beginning of a cell."""
        self._lines = Bucket(LINES, LINES_BURST)
        self._ranks.clear()
        self._flooding.clear()


def _size(written: Written, line: str) -> int:
    """Characters of one line, with its end; 0 for displays, which have their own limits."""
    return len(line) + 1 if written.display is None else 0
