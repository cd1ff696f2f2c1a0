"""One proc's output from its host agent to subscribers: decides which chunks each receives, and which are skipped.

A subscriber acknowledges received output; at most WINDOW bytes are in flight to it. While its window is full, the
spool waits a little; a subscriber that falls behind is skipped, and receives the number of lines it missed.
"""

from collections import deque
from collections.abc import Iterable

from msgspec import Struct

from monarch_nb.logs.verbs import LogBlock, LogChunk, LogChunks

WINDOW = 512 * 1024  # bytes of a proc in flight to one subscriber
BEHIND_S = 1.0  # after which a subscriber with a full window is not waited for
RECENT = 128 * 1024  # bytes of a proc that a late subscriber still receives
FULL = 256 * 1024  # bytes, above which a message to a subscriber is sent

Blocks = tuple[LogBlock, ...]
Sending = tuple[str, LogChunk]  # subscriber and chunk


class _Subscriber(Struct):
    """A subscriber; numbers are bytes of all the proc's output."""

    sent: int = 0
    took: int = 0
    full_since: float | None = None
    passed_over: bool = False
    skipped: int = 0  # lines

    @property
    def full(self) -> bool:
        """True while the window is full, so that nothing more is sent."""
        return self.sent - self.took >= WINDOW

    def is_worth_waiting_for(self, now: float) -> bool:
        """Returns whether its window is full, but not for long."""
        if not self.full:
            self.full_since = None
            return False
        self.full_since = now if self.full_since is None else self.full_since
        return now - self.full_since < BEHIND_S


class Tail:
    """Decides which chunks each subscriber receives; methods return the messages, in order."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.total = 0  # bytes of output so far
        self.ended = False  # no more output follows
        self._position = 0  # position that subscribers know
        self._recent: deque[tuple[int, int, Blocks]] = deque()  # offset, size, blocks
        self._dropped = 0  # lines that are no longer recent
        self._subscribers: dict[str, _Subscriber] = {}

    def waits(self, now: float) -> bool:
        """Returns whether a subscriber with a full window is waited for. `now` is monotonic."""
        full = [to.is_worth_waiting_for(now) for to in self._subscribers.values()]
        return any(full)

    def add(self, blocks: Blocks, position: int, *, ended: bool) -> list[Sending]:
        """Adds output up to a position of the spool; with `ended` it was the last."""
        size = sum(len(block.data) for block in blocks)
        offset = self.total
        self.total += size
        self.ended = ended
        if blocks:
            self._recent.append((offset, size, blocks))
            while len(self._recent) > 1 and self.recent_size - self._recent[0][1] >= RECENT:
                self._drop_oldest()
        if not blocks and position == self._position and not ended:
            return []
        self._position = position
        chunk = LogChunk(self.address, offset, position, blocks, ended=ended)
        return [sending for name in tuple(self._subscribers) for sending in self._send(name, chunk)]

    def follow(self, name: str, offset: int) -> list[Sending]:
        """Adds a subscriber from byte `offset` on, as far as it is still stored; -1 is from now on."""
        oldest = self._recent[0][0] if self._recent else self.total
        start = self.total if offset < 0 else max(offset, oldest)
        to = self._subscribers[name] = _Subscriber(start, start)
        if offset < 0:
            return []
        if offset < start:
            to.passed_over, to.skipped = True, self._dropped
        return self._send(name, LogChunk(self.address, start, self._position, self._from(start), ended=self.ended))

    def took(self, name: str, count: int) -> list[Sending]:
        """Records that a subscriber has received the first `count` bytes."""
        to = self._subscribers.get(name)
        if to is None:
            return []
        to.took = max(to.took, count)
        if not to.passed_over or to.full:
            return []
        return self._send(name, LogChunk(self.address, self.total, self._position, (), ended=self.ended))

    def leave(self, name: str) -> None:
        """Removes a subscriber."""
        self._subscribers.pop(name, None)

    def _send(self, name: str, chunk: LogChunk) -> list[Sending]:
        to = self._subscribers[name]
        if to.full and not chunk.ended:
            to.passed_over = True
            to.skipped += line_count(chunk.blocks)
            return []
        if to.passed_over:
            chunk = LogChunk(chunk.address, chunk.offset, chunk.position, chunk.blocks, to.skipped, chunk.ended)
            to.passed_over, to.skipped, to.took = False, 0, max(to.took, chunk.offset)
        to.sent = self.total
        return [(name, chunk)]

    # -- recent output for late subscribers -------------------------------------------------------------------------

    @property
    def recent_size(self) -> int:
        """Bytes of output that are stored."""
        return self.total - self._recent[0][0] if self._recent else 0

    def keep_recent(self, size: int) -> None:
        """Drops all but the last `size` bytes."""
        while self._recent and size < self.recent_size:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        self._dropped += line_count(self._recent.popleft()[2])

    def _from(self, start: int) -> Blocks:
        """Returns the stored blocks, without bytes before `start`."""
        rest = []
        for offset, _, blocks in self._recent:
            for block in blocks:
                end = offset + len(block.data)
                if end > start:
                    data = block.data[max(0, start - offset) :]
                    rest.append(LogBlock(block.stream, block.level, block.at, block.call, data))
                offset = end
        return tuple(rest)


class LogMessages:
    """Gathers chunks of several procs, so that a subscriber receives one message for many of them."""

    def __init__(self) -> None:
        self._chunks: dict[str, list[LogChunk]] = {}  # by subscriber
        self._sizes: dict[str, int] = {}

    def add(self, sendings: Iterable[Sending]) -> list[tuple[str, LogChunks]]:
        """Adds chunks; returns the messages that are full now."""
        full: list[tuple[str, LogChunks]] = []
        for name, chunk in sendings:
            self._chunks.setdefault(name, []).append(chunk)
            size = self._sizes[name] = self._sizes.get(name, 0) + sum(len(block.data) for block in chunk.blocks)
            if size >= FULL:
                full.append((name, LogChunks(tuple(self._chunks.pop(name)))))
                self._sizes[name] = 0
        return full

    def take(self) -> list[tuple[str, LogChunks]]:
        """Returns the remaining messages, one for each subscriber."""
        chunks, self._chunks, self._sizes = self._chunks, {}, {}
        return [(name, LogChunks(tuple(of_name))) for name, of_name in chunks.items()]


def line_count(blocks: Blocks) -> int:
    """Returns the number of line ends in blocks."""
    return sum(block.data.count(b"\n") for block in blocks)
