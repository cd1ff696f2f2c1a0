"""How much of what the ranks print a front end is given: a flood of one rank takes nothing from the others.

A Jupyter server cuts a kernel off that sends more than 1 MB/s over three seconds; so much is never sent. And nobody
reads thousands of lines in a cell: a rank that floods is held back until it has written little for a while.
"""

import time
from collections import Counter, deque
from collections.abc import Iterable

from monarch_nb.logs import Line, Written

RANK_LINES = 50.0  # of one rank in a second
RANK_BURST = 300.0  # and at once, after a while of silence
LINES = 100.0  # different ones of all ranks in a second
LINES_BURST = 600.0
BEGINNING = 50  # lines of a rank that are shown of what is too much
FEW = 20  # so many lines of a rank are shown, whatever the others write
BYTES = 400_000.0  # of all ranks in a second
BYTES_BURST = 400_000.0
WAITING = 256 * 1024  # characters of one rank that wait to be shown; what comes on top is held back at once
LAST = 200  # lines of those held back that are kept
LONGEST = 500  # characters of one of these

Pieces = list[tuple[Written, str]]


class Bucket:
    """So much is allowed in a second, and what was not used is saved up to a limit."""

    def __init__(self, rate: float, most: float) -> None:
        self._rate, self.most = rate, most
        self.left = most
        self._at = time.monotonic()

    def refill(self, now: float) -> float:
        """What is allowed now."""
        self.left = min(self.most, self.left + (now - self._at) * self._rate)
        self._at = now
        return self.left


class Held:
    """Lines of one rank that are not shown: how many, and the last of them with their times."""

    def __init__(self) -> None:
        self.count = 0
        self.last: deque[tuple[float, Line]] = deque(maxlen=LAST)
        self.begun = self.since = time.monotonic()

    def add(self, one: Written, text: str) -> None:
        """More of them."""
        self.count += text.count("\n")
        self.since = time.monotonic()
        for line in text.rsplit("\n", LAST + 1)[-LAST - 1 : -1]:
            short = line if len(line) <= LONGEST else f"{line[: LONGEST - 1]}…"
            self.last.append((one.at, Line(one.address, short, one.stream, one.call)))


class Pacing:
    """One thread at a time."""

    def __init__(self) -> None:
        self._bytes = Bucket(BYTES, BYTES_BURST)
        self._lines = Bucket(LINES, LINES_BURST)
        self._ranks: dict[str, Bucket] = {}
        self._flooding: set[str] = set()

    def share(self, waiting: dict[str, list[Written]], held: dict[str, Held]) -> list[tuple[float, Line]]:
        """The lines to show now, with their times; what does not fit is added to `held`, by address."""
        now = time.monotonic()
        chosen = {address: self._of_rank(address, written, held, now) for address, written in waiting.items()}
        self._bound_lines(chosen, held, now)
        sizes = {address: sum(_size(*piece) for piece in pieces) for address, pieces in chosen.items()}
        left = self._bytes.refill(now)
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
        self._bytes.left = left
        return shown

    def _of_rank(self, address: str, written: Iterable[Written], held: dict[str, Held], now: float) -> Pieces:
        """What one rank may show; while it floods nothing."""
        bucket = self._ranks.get(address) or self._ranks.setdefault(address, Bucket(RANK_LINES, RANK_BURST))
        left = int(bucket.refill(now))
        if address in self._flooding and left > bucket.most / 2:
            self._flooding.discard(address)
        written = list(written)
        if sum(one.line_count for one in written if one.display is None) > left:
            left = min(left, BEGINNING)
        pieces: Pieces = []
        for one in written:
            if one.display is not None:  # those have bounds of their own
                pieces.append((one, one.text.removesuffix("\n")))
                continue
            count = one.line_count
            room = 0 if address in self._flooding else left
            lines = one.text.split("\n", room)  # the end of the last one is behind its \n
            rest = lines.pop()
            pieces += [(one, line) for line in lines]
            left = max(0, left - count)  # also for what is held back: only who writes less is let on again
            if rest:
                self._hold(address, [(one, rest.removesuffix("\n"))], held)
        bucket.left = left
        return pieces

    def _bound_lines(self, chosen: dict[str, Pieces], held: dict[str, Held], now: float) -> None:
        """Takes away what all ranks together show too much; equal lines of several ranks are one."""
        left = self._lines.refill(now)
        wanted: Counter[str] = Counter()
        for pieces in chosen.values():
            wanted |= Counter(line for one, line in pieces if one.display is None)
        if wanted.total() <= left:
            self._lines.left = left - wanted.total()
            return
        seen: set[tuple[str, int]] = set()
        for place, address in enumerate(sorted(chosen, key=lambda each: len(chosen[each]))):
            pieces = chosen[address]
            share = min(left / (len(chosen) - place), BEGINNING) if len(pieces) > FEW else FEW
            used = 0
            times: Counter[str] = Counter()
            for at, (one, line) in enumerate(pieces):
                if one.display is not None:
                    continue
                times[line] += 1
                key = line, times[line]
                if key in seen:
                    continue
                if used + 1 > share:
                    chosen[address] = pieces[:at] + [piece for piece in pieces[at:] if piece[0].display is not None]
                    self._hold(address, [piece for piece in pieces[at:] if piece[0].display is None], held)
                    self._ranks[address].left = 0.0
                    break
                seen.add(key)
                used += 1
            left = max(0.0, left - used)
        self._lines.left = left

    def _hold(self, address: str, pieces: Pieces, held: dict[str, Held]) -> None:
        self._flooding.add(address)
        mine = held.setdefault(address, Held())
        for one, text in pieces:
            mine.add(one, f"{text}\n")

    def anew(self) -> None:
        """Another cell begins: whatever was shown in the one before, it has room."""
        self._lines = Bucket(LINES, LINES_BURST)
        self._ranks.clear()
        self._flooding.clear()


def _size(one: Written, line: str) -> int:
    """Characters of one line, with its end."""
    return len(line) + 1 if one.display is None else 0
