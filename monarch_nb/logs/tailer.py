"""Output of procs from their spools to log files and subscribers, on a thread of its own: both may be slow.

A subscriber acknowledges received output; at most WINDOW bytes are in flight to it. While its window is full, the
spool waits a little; a subscriber that falls behind is skipped, and receives the number of lines it missed.
"""

import contextlib
import logging
import os
import re
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

from msgspec import Struct

from monarch_nb.host.linux import watch_folder
from monarch_nb.host.sender import AgentSender
from monarch_nb.logs.spool import CHUNK, PATIENCE_S, STDERR, Spool, plain
from monarch_nb.logs.verbs import PROC_LOG, LogBlock, LogChunk, LogChunks
from monarch_nb.settings import settings
from monarch_nb.wire import host_of, parse_address

WINDOW = 512 * 1024  # bytes of a proc in flight to one subscriber
BEHIND_S = 1.0  # after which a subscriber with a full window is not waited for
RECENT = 128 * 1024  # bytes of a proc that a late subscriber still receives
FULL = 256 * 1024  # bytes, above which a message to a subscriber is sent
BACKLOG = 32 << 20  # bytes in a spool: above which no subscriber is waited for
_ENDED = 64  # ended procs whose output is stored for late subscribers,
_ENDED_RECENT = 8 * RECENT  # and bytes of that output
_POLL_S = 0.02  # where files cannot be watched
_CALM = 40  # polls within a tenth of a second, above which output is gathered
_GATHER_S = 0.005
_EVENT = struct.Struct("iIII")

Blocks = tuple[LogBlock, ...]
Sending = tuple[str, LogChunk]  # subscriber and chunk

log = logging.getLogger(__name__)


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


class LogFile:
    """Appends to `path`; a full file becomes `path.1`, that one `path.2`, and so on; the oldest is deleted.

    A file that was deleted is created again, with its folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.error = ""  # reason of the last failure to write
        self._fd = -1
        self._size = 0
        self._most = settings.log_file_size
        self._count = settings.log_file_count

    def write(self, data: bytes) -> bool:
        """Appends output; returns whether that succeeded. After a failed attempt, a line in the file says so."""
        try:
            if self._fd >= 0 and os.fstat(self._fd).st_nlink == 0:
                self.close()  # somebody has deleted it
            if self._fd < 0:
                self._open()
            if self._size and self._size + len(data) > self._most:
                self._rotate()
            if self.error:
                self._write_all(f"[output is missing here: {self.error}]\n".encode())
                self.error = ""
            self._write_all(data)
        except OSError as error:
            self.error = error.strerror or str(error)
        return not self.error

    def _write_all(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            done = os.write(self._fd, view)
            self._size += done
            view = view[done:]

    def _open(self) -> None:
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._size = os.fstat(self._fd).st_size

    def _rotate(self) -> None:
        self.close()
        for number in range(self._count - 1, 0, -1):
            older = self.path if number == 1 else self._numbered(number - 1)
            with contextlib.suppress(FileNotFoundError):
                os.replace(older, self._numbered(number))
        if self._count == 1:
            os.truncate(self.path, 0)
        self._open()

    def _numbered(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}")

    def close(self) -> None:
        """Closes the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _path_for(address: str, mesh: str, folder: Path) -> Path:
    """Returns a path for the log of a proc, named after its mesh: in `folder`, or in that of the setting log_folder."""
    name = re.sub(r"[^\w.-]", "_", mesh)[:40]
    parsed = parse_address(address).name
    configured = settings.log_folder
    return (Path(configured).expanduser() if configured else folder) / f"{f'{name}.' if name else ''}{parsed}.log"


class _Proc:
    """The output of one proc: its spool, its log file, and its subscribers."""

    def __init__(self, address: str, spool: str, path: Path) -> None:
        self.tail = Tail(address)
        self.spool = Spool(spool)
        self.file = LogFile(path)
        self.ends = False  # the proc has ended: the rest is still to be read

    def take(self) -> tuple[list[Sending], int]:
        """Reads the next piece; returns the messages to send, and the size of the piece in bytes."""
        blocks = self._keep(tuple(self.spool.take(CHUNK, time.time(), all_of_it=self.ends)))
        before = self.tail.total
        over = self.ends and not blocks
        sendings = self.tail.add(blocks, self.spool.position, ended=over)
        if over:
            self.spool.remove()
            self.file.close()
        return sendings, self.tail.total - before

    def _keep(self, blocks: tuple[LogBlock, ...]) -> tuple[LogBlock, ...]:
        """Writes blocks to the log file; the first failure adds a notice to the output."""
        well = not self.file.error
        if blocks and not self.file.write(b"".join(map(plain, blocks))) and well:
            notice = f"[{self.file.path} cannot be written ({self.file.error}): lines are shown, but not kept]\n"
            return (*blocks, LogBlock(STDERR, logging.ERROR, time.time(), blocks[-1].call, notice.encode()))
        return blocks


class LogTailer(threading.Thread):
    """`begin`, `follow`, `leave`, `took` and `ended` may be called from any thread and never block."""

    def __init__(self, sender: AgentSender, folder: Path) -> None:
        super().__init__(name="monarch-logs", daemon=True)
        self._sender = sender
        self._folder = folder
        self._procs: dict[str, _Proc] = {}
        self._dirty: set[str] = set()  # addresses whose spools may have new output
        self._ended: deque[str] = deque()
        self._requests: deque[Callable[[], None]] = deque()
        self._messages = LogMessages()
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._inotify: int | None = None
        self._polls: deque[float] = deque(maxlen=_CALM)
        self._launched = False

    def begin(self, address: str, spool: str, mesh: str) -> str:
        """Prepares for a proc of a mesh of that name, which writes to a spool; returns the path of its log file."""
        proc = _Proc(address, spool, _path_for(address, mesh, self._folder / "logs"))

        def begin() -> None:
            self._procs[address] = proc
            self._dirty.add(address)

        self._ask(begin)
        return str(proc.file.path)

    def follow(self, address: str, subscriber: str, offset: int) -> None:
        """Sends a subscriber a proc's stored output from byte `offset` on, and later output; -1: later output only."""
        self._ask_tail(address, lambda tail: tail.follow(subscriber, offset))

    def leave(self, address: str, subscriber: str) -> None:
        """Removes a subscriber."""

        def leave(tail: Tail) -> list[Sending]:
            tail.leave(subscriber)
            return []

        self._ask_tail(address, leave)

    def took(self, address: str, subscriber: str, count: int) -> None:
        """Records that a subscriber has received so many bytes of a proc's output."""
        self._ask_tail(address, lambda tail: tail.took(subscriber, count))

    def ended(self, address: str) -> None:
        """Records the end of a proc, whose last output is then sent."""

        def end() -> None:
            if address in self._procs:
                self._procs[address].ends = True
                self._dirty.add(address)

        self._ask(end)

    def _ask_tail(self, address: str, request: Callable[[Tail], list[Sending]]) -> None:
        def ask() -> None:
            proc = self._procs.get(address)
            if proc is not None:
                self._send(self._messages.add(request(proc.tail)))
                self._dirty.add(address)

        self._ask(ask)

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
        """Works until the process ends."""
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
            except Exception:  # the output of one proc must not hold up that of others
                log.exception("in the thread of logs")
                wait = 0.1

    def _woken(self, fd: int) -> None:
        try:
            data = os.read(fd, 65536)
        except BlockingIOError:
            return
        if fd != self._inotify:
            return
        offset = 0
        while offset + _EVENT.size <= len(data):
            length = _EVENT.unpack_from(data, offset)[3]
            name = data[offset + _EVENT.size : offset + _EVENT.size + length].rstrip(b"\0").decode()
            self._dirty.add(f"{host_of(self._sender.address)}/{name.rpartition('.')[0]}")
            offset += _EVENT.size + length
            if not name:  # too many events: some were dropped
                self._dirty.update(self._procs)

    def _gather(self) -> None:
        """Pauses when polls are frequent, so that each finds more output."""
        now = time.monotonic()
        if len(self._polls) == _CALM and now - self._polls[0] < 0.1:
            time.sleep(_GATHER_S)
        self._polls.append(now)

    def _round(self) -> float | None:
        """Sends pending output; returns the seconds until the next poll, None without one."""
        waits: list[float] = []
        again = True
        while again:
            while self._requests:
                self._requests.popleft()()
            if self._inotify is None:
                self._dirty.update(address for address, proc in self._procs.items() if not proc.tail.ended)
            looked, self._dirty = self._dirty, set()
            again = False
            for address in looked:
                proc = self._procs.get(address)
                if proc is None or proc.tail.ended:
                    continue
                if proc.tail.waits(time.monotonic()) and proc.spool.backlog < BACKLOG:
                    self._dirty.add(address)
                    waits.append(BEHIND_S / 4)
                elif self._advance(proc):
                    self._dirty.add(address)
                    again = True
                elif proc.spool.undecided:
                    self._dirty.add(address)
                    waits.append(PATIENCE_S / 2)
            self._send(self._messages.take())
        if self._inotify is None and any(not proc.tail.ended for proc in self._procs.values()):
            waits.append(_POLL_S)
        return min(waits, default=None)

    def _advance(self, proc: _Proc) -> bool:
        """Takes the next piece; returns whether more may follow at once."""
        sendings, size = proc.take()
        if proc.tail.ended:
            self._forget_old(proc.tail.address)
        self._send(self._messages.add(sendings))
        return size > 0

    def _send(self, messages: Iterable[tuple[str, LogChunks]]) -> None:
        for name, message in messages:
            if not self._sender.post(name, PROC_LOG, message):
                for address in {chunk.address for chunk in message.chunks} & self._procs.keys():
                    self._procs[address].tail.leave(name)

    def _forget_old(self, address: str) -> None:
        self._ended.append(address)
        while len(self._ended) > _ENDED:
            self._procs.pop(self._ended.popleft(), None)
        room = _ENDED_RECENT
        for ended in reversed(self._ended):
            tail = self._procs[ended].tail
            tail.keep_recent(room)
            room -= tail.recent_size
