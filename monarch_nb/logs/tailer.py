"""Takes what procs write out of their spools: into their log files, and on to who subscribed.

A thread of its own, for files and subscribers may be slow. A subscriber says what it has received; no more than WINDOW
bytes of a proc are on their way to it. While it says nothing the spool is left to wait a little; a subscriber that
stays behind is passed over, and told how many lines it missed.
"""

import logging
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct, field

from monarch_nb.host.linux import watch_folder
from monarch_nb.host.post import DATA, Post
from monarch_nb.host.protocol import LogBlock, LogChunk, ProcSpec
from monarch_nb.logs.files import LogFile, path_for
from monarch_nb.logs.marks import STDERR
from monarch_nb.logs.spool import CHUNK, PATIENCE_S, Spool, plain

WINDOW = 512 * 1024  # bytes of a proc on their way to one subscriber
BEHIND_S = 1.0  # a subscriber whose window was full for that long is not waited for
BACKLOG = 32 << 20  # nor is any when so much waits in a spool
RECENT = 128 * 1024  # bytes of a proc that who subscribes late still gets
_ENDED = 64  # procs that have ended and are known here,
_ENDED_RECENT = 8 * RECENT  # and bytes of their recent output that are kept
_POLL_S = 0.02  # where files cannot be watched
_CALM = 40  # looks within a tenth of a second; with more of them output is gathered
_GATHER_S = 0.005
_EVENT = struct.Struct("iIII")

log = logging.getLogger(__name__)


class _Subscriber(Struct):
    """Whom output of one proc is sent to."""

    name: str
    sent: int = 0  # as bytes of all the proc's output
    took: int = 0
    full_since: float | None = None
    passed_over: bool = False
    skipped: int = 0  # lines

    def blocks(self, now: float) -> bool:
        """Whether its window is full, and it is worth waiting for."""
        if self.sent - self.took < WINDOW:
            self.full_since = None
            return False
        self.full_since = self.full_since or now
        return now - self.full_since < BEHIND_S

    @property
    def full(self) -> bool:
        return self.sent - self.took >= WINDOW


class _Tail(Struct):
    """One proc's output on its way."""

    address: str
    spool: Spool
    file: LogFile
    total: int = 0  # bytes of output so far
    told: int = 0  # the position that subscribers know
    recent: deque[tuple[int, int, tuple[LogBlock, ...]]] = field(default_factory=deque)  # offset, size, blocks
    dropped: int = 0  # lines that are not recent any more
    subscribers: dict[str, _Subscriber] = field(default_factory=dict)
    last: bool = False  # the proc has ended: take the rest
    done: bool = False  # and that is taken

    @property
    def recent_size(self) -> int:
        """Bytes of output that are kept."""
        return self.total - self.recent[0][0] if self.recent else 0

    def drop_oldest(self) -> None:
        """The oldest of it is kept no longer."""
        self.dropped += _lines(self.recent.popleft()[2])


class LogTailer(threading.Thread):
    """`begin`, `follow`, `leave`, `took` and `ended` may be called from any thread and never block."""

    def __init__(self, post: Post, folder: Path) -> None:
        super().__init__(name="monarch-logs", daemon=True)
        self._post = post
        self._folder = folder
        self._tails: dict[str, _Tail] = {}
        self._dirty: set[str] = set()  # addresses whose spools may hold something
        self._ended: deque[str] = deque()
        self._requests: deque[Callable[[], None]] = deque()
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._inotify: int | None = None
        self._looks: deque[float] = deque(maxlen=_CALM)
        self._launched = False

    def begin(self, spec: ProcSpec) -> str:
        """A proc is about to be started; gives the path of its log file."""
        tail = _Tail(spec.address, Spool(spec.log), LogFile(path_for(spec, self._folder / "logs")))

        def begin() -> None:
            self._tails[spec.address] = tail
            self._dirty.add(spec.address)

        self._ask(begin)
        return str(tail.file.path)

    def follow(self, address: str, subscriber: str, offset: int) -> None:
        """Send a proc's output from byte `offset` on, as far as it is still known; -1 is from now on."""
        self._ask(lambda: self._follow(address, subscriber, offset))

    def leave(self, address: str, subscriber: str) -> None:
        """No more of this to that subscriber."""

        def leave() -> None:
            if address in self._tails:
                self._tails[address].subscribers.pop(subscriber, None)

        self._ask(leave)

    def took(self, address: str, subscriber: str, count: int) -> None:
        """A subscriber has received so many bytes of a proc's output."""
        self._ask(lambda: self._took(address, subscriber, count))

    def ended(self, address: str) -> None:
        """A proc has ended: what it wrote last goes out."""

        def end() -> None:
            if address in self._tails:
                self._tails[address].last = True
                self._dirty.add(address)

        self._ask(end)

    def _ask(self, request: Callable[[], None]) -> None:
        self._requests.append(request)
        if not self._launched:
            self._launched = True
            self._inotify = watch_folder(str(self._folder / "spool"))
            self.start()
        try:
            self._wake_write.send(b"\0")
        except BlockingIOError:
            pass

    # -- this thread --------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Work until the process ends."""
        poller = select.poll()
        poller.register(self._wake_read, select.POLLIN)
        if self._inotify is not None:
            poller.register(self._inotify, select.POLLIN)
        wait: float | None = None
        while True:
            for fd, _ in poller.poll(None if wait is None else wait * 1000):
                self._woken(fd)
            self._gather()
            try:
                wait = self._round()
            except Exception:  # the output of one proc must not keep that of others
                log.exception("in the thread of logs")
                wait = 0.1

    def _woken(self, fd: int) -> None:
        try:
            data = os.read(fd, 65536)
        except BlockingIOError:
            return
        if fd != self._inotify:
            return
        at = 0
        while at + _EVENT.size <= len(data):
            length = _EVENT.unpack_from(data, at)[3]
            name = data[at + _EVENT.size : at + _EVENT.size + length].rstrip(b"\0").decode()
            self._dirty.add(f"{self._post.address.partition('/')[0]}/{name.rpartition('.')[0]}")
            at += _EVENT.size + length
            if not name:  # too many events: some were dropped
                self._dirty.update(self._tails)

    def _gather(self) -> None:
        """When looks come thick and fast, each of them is to find more."""
        now = time.monotonic()
        if len(self._looks) == _CALM and now - self._looks[0] < 0.1:
            time.sleep(_GATHER_S)
        self._looks.append(now)

    def _round(self) -> float | None:
        """Send on what there is; gives the seconds until something has to be looked at again."""
        waits: list[float] = []
        while True:
            while self._requests:
                self._requests.popleft()()
            if self._inotify is None:
                self._dirty.update(address for address, tail in self._tails.items() if not tail.done)
            looked, self._dirty = self._dirty, set()
            again = False
            for address in looked:
                tail = self._tails.get(address)
                if tail is None or tail.done:
                    continue
                if self._held_up(tail):
                    self._dirty.add(address)
                    waits.append(BEHIND_S / 4)
                elif self._advance(tail):
                    self._dirty.add(address)
                    again = True
                elif tail.spool.undecided:
                    self._dirty.add(address)
                    waits.append(PATIENCE_S / 2)
            if not again:
                if self._inotify is None and any(not tail.done for tail in self._tails.values()):
                    waits.append(_POLL_S)
                return min(waits, default=None)

    def _held_up(self, tail: _Tail) -> bool:
        now = time.monotonic()
        blocked = [one for one in tail.subscribers.values() if one.blocks(now)]
        return bool(blocked) and tail.spool.backlog < BACKLOG

    def _advance(self, tail: _Tail) -> bool:
        """Take the next piece; whether there may be more at once."""
        blocks = tuple(tail.spool.take(CHUNK, time.time(), all_of_it=tail.last))
        blocks = self._keep(tail, blocks)
        size = sum(len(block.data) for block in blocks)
        offset, position = tail.total, tail.spool.position
        tail.total += size
        finished = tail.last and not size
        if blocks:
            tail.recent.append((offset, size, blocks))
            while len(tail.recent) > 1 and tail.recent_size - tail.recent[0][1] >= RECENT:
                tail.drop_oldest()
        if finished:
            tail.done = True
            tail.spool.remove()
            tail.file.close()
            self._forget_old(tail.address)
        if blocks or position != tail.told or finished:
            tail.told = position
            for subscriber in tuple(tail.subscribers.values()):
                self._send(tail, subscriber, LogChunk(tail.address, offset, position, blocks, ended=finished))
        return size > 0

    def _keep(self, tail: _Tail, blocks: tuple[LogBlock, ...]) -> tuple[LogBlock, ...]:
        """Write it to the log file; the first time that fails, that is part of the output."""
        well = not tail.file.why
        if blocks and not tail.file.write(b"".join(map(plain, blocks))) and well:
            told = f"[{tail.file.path} cannot be written ({tail.file.why}): lines are shown, but not kept]\n"
            return (*blocks, LogBlock(STDERR, logging.ERROR, time.time(), blocks[-1].call, told.encode()))
        return blocks

    def _send(self, tail: _Tail, to: _Subscriber, chunk: LogChunk) -> None:
        if to.full and not chunk.ended:
            to.passed_over = True
            to.skipped += _lines(chunk.blocks)
            return
        if to.passed_over:
            chunk = LogChunk(chunk.address, chunk.offset, chunk.position, chunk.blocks, to.skipped, chunk.ended)
            to.passed_over, to.skipped, to.took = False, 0, max(to.took, chunk.offset)
        if self._post.tell(to.name, "proc.log", chunk, lane=DATA):
            to.sent = tail.total
        else:
            tail.subscribers.pop(to.name, None)

    def _follow(self, address: str, name: str, offset: int) -> None:
        tail = self._tails.get(address)
        if tail is None:
            return
        known = tail.recent[0][0] if tail.recent else tail.total
        start = tail.total if offset < 0 else max(offset, known)
        to = tail.subscribers[name] = _Subscriber(name, start, start)
        if offset >= 0:
            if offset < start:
                to.passed_over, to.skipped = True, tail.dropped
            blocks = _from(start, tail.recent)
            self._send(tail, to, LogChunk(address, start, tail.told, blocks, ended=tail.done))
        self._dirty.add(address)

    def _took(self, address: str, name: str, count: int) -> None:
        tail = self._tails.get(address)
        to = tail.subscribers.get(name) if tail is not None else None
        if tail is not None and to is not None:
            to.took = max(to.took, count)
            self._dirty.add(address)
            if to.passed_over and not to.full:
                self._send(tail, to, LogChunk(address, tail.total, tail.told, (), ended=tail.done))

    def _forget_old(self, address: str) -> None:
        self._ended.append(address)
        while len(self._ended) > _ENDED:
            self._tails.pop(self._ended.popleft(), None)
        room = _ENDED_RECENT
        for one in reversed(self._ended):
            tail = self._tails[one]
            while tail.recent and room < tail.recent_size:
                tail.drop_oldest()
            room -= tail.recent_size


def _lines(blocks: tuple[LogBlock, ...]) -> int:
    return sum(block.data.count(b"\n") for block in blocks)


def _from(start: int, recent: deque[tuple[int, int, tuple[LogBlock, ...]]]) -> tuple[LogBlock, ...]:
    """The blocks that are kept, without what lies before byte `start`."""
    found = []
    for offset, _, blocks in recent:
        for block in blocks:
            end = offset + len(block.data)
            if end > start:
                cut = block.data[max(0, start - offset) :]
                found.append(LogBlock(block.stream, block.level, block.at, block.call, cut))
            offset = end
    return tuple(found)
