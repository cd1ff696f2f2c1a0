"""The one thread of a process that reads its sockets, ticks its links, and writes what bursts of messages hold back.

Messages of a burst, which a thread sends back to back, leave in one write. No message waits for others that may not
follow. The first messages of a burst are written at once; later ones are held back until the burst is long, large or
old enough, until its thread begins to wait (`flush`), or until the reading thread, which is woken for that, calls
`flush_old`.
"""

import contextlib
import functools
import logging
import mmap
import os
import select
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from monarch_nb.transport.errors import descriptor_limit, is_descriptor_limit
from monarch_nb.transport.interrupts import receivers, uninterrupted

if TYPE_CHECKING:
    from monarch_nb.transport.streams import UnixStream

log = logging.getLogger("monarch_nb.transport")

_WRITABLE = 4  # EPOLLOUT
_SPACE = 256 * 1024  # bytes
_PATIENCE = 0.05  # seconds; how long `settled` waits for quiet
_NAP = 0.001  # seconds; a sleep that short needs no wake-up
_RUSH_S = 0.005  # after a burst the thread naps, since another may follow
_RECENT = 5.0  # seconds; a reader with work in that time wakes up once a second

# Of bursts of messages
APART_S = 0.0003  # seconds; messages further apart are no burst
SINGLE_WRITES = 4  # messages at the start of a burst that are written one by one
MOST = 16  # most messages held back
LARGEST = 16 * 1024  # most bytes held back
LONGEST_S = 0.0003  # longest time in seconds that a message is held back


class Ticking(Protocol):
    """An object with timers that are checked while it is busy."""

    def tick(self, now: float) -> bool:
        """Executes due actions; returns whether more will follow."""


class _Settling(NamedTuple):
    """A call that waits until no more messages are read."""

    function: Callable[..., object]
    args: tuple[object, ...]
    until: float
    seen: bool = False  # a round has begun since the call was made


class Reader:
    """A thread that waits for descriptors, calls, and ticks. Callbacks must not block."""

    def __init__(self, name: str, tick: float) -> None:
        self._tick = tick
        self._callbacks: dict[int, Callable[[], bool]] = {}
        self._writers: dict[int, Callable[[], None]] = {}
        self._calls: deque[tuple[Callable[..., object], tuple[object, ...]]] = deque()
        self._newly_busy: deque[Ticking] = deque()
        self._busy: list[Ticking] = []
        self._settling: deque[_Settling] = deque()
        self._unread: set[int] = set()  # descriptors whose callback stopped before reading everything
        try:
            self._selector = _Poll()
            self._wake_read, self._wake_write = _wake_pair()
        except OSError as error:
            raise descriptor_limit("reading messages") if is_descriptor_limit(error) else error from None
        self.watch(self._wake_read, self._woken)
        self._stopping = False
        self.deep = False  # sleeping without a time limit
        self._asleep = False  # sleeping for longer than a nap
        self.bursts = Bursts(self._nudge)
        self._next_tick = time.monotonic()
        self.ident = 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread and waits for it."""
        self._stopping = True
        self.wake()
        if self.running:
            self._thread.join()

    @property
    def running(self) -> bool:
        """True if the thread runs and is not the caller."""
        return self._thread.is_alive() and threading.current_thread() is not self._thread

    def run_calls(self) -> None:
        """Runs the calls left for the thread; after `stop`, so that none is lost."""
        while self._calls:
            function, args = self._calls.popleft()
            _guarded(function, *args)
        if self._stopping:
            self._settle(True, 0.0)

    def close(self) -> None:
        """Closes the descriptors; after `stop`."""
        self._selector.close()
        for fd in {self._wake_read, self._wake_write}:
            os.close(fd)

    @functools.cached_property
    def space(self) -> memoryview:
        """Memory to read into, for the thread's own callbacks; its pages are allocated at first use."""
        return memoryview(mmap.mmap(-1, _SPACE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))

    def watch(self, fd: int, callback: Callable[[], bool], writable: Callable[[], None] | None = None) -> None:
        """Calls `callback` when `fd` is readable, and again soon if it returns True. Thread-safe.

        `writable` is called when there is room to write, while `watch_writing` requests that.
        """
        self._callbacks[fd] = callback
        if writable is not None:
            self._writers[fd] = writable
        self._selector.add(fd)

    def watch_writing(self, fd: int, on: bool) -> None:
        """Sets whether to wait for room to write. Thread-safe."""
        with contextlib.suppress(OSError, KeyError, ValueError):
            self._selector.writing(fd, on)

    def unwatch(self, fd: int) -> None:
        """Removes a descriptor, before it is closed."""
        self._writers.pop(fd, None)
        if self._callbacks.pop(fd, None) is not None:
            with contextlib.suppress(OSError, KeyError, ValueError):
                self._selector.remove(fd)

    def call_soon(self, function: Callable[..., object], *args: object) -> None:
        """Runs `function(*args)` on the thread. Thread-safe, also in a finalizer."""
        self._calls.append((function, args))
        self.wake()

    def settled(self, function: Callable[..., object], *args: object) -> None:
        """Runs `function(*args)` on the thread once all that has arrived by now is read. Thread-safe.

        Descriptors are read in any order: the report of an end may precede the last messages. Without a pause in
        the traffic, the wait is limited.
        """
        self.call_soon(self._settling.append, _Settling(function, args, time.monotonic() + _PATIENCE))

    def _settle(self, quiet: bool, now: float) -> None:
        for _ in range(len(self._settling)):
            waiting = self._settling.popleft()
            if self._stopping or (waiting.seen and (quiet or now >= waiting.until)):
                _guarded(waiting.function, *waiting.args)
            else:  # messages present at the call may not have been read yet
                self._settling.append(waiting._replace(seen=True))

    def call_when_awake(self, function: Callable[..., object], *args: object) -> None:
        """Runs `function(*args)` on the thread when it is awake anyway, usually within a second."""
        self._calls.append((function, args))
        if self.deep:
            self.wake()

    def read_again(self, fd: int) -> None:
        """Calls the callback of `fd` soon even if the descriptor stays silent (ZeroMQ's are edge-triggered)."""
        if threading.get_ident() == self.ident:
            self._note(fd)
        else:
            self.call_soon(self._note, fd)

    def _note(self, fd: int) -> None:
        self._unread.add(fd)  # the set is read once, since the thread replaces it

    def busy(self, peer: Ticking) -> None:
        """Ticks `peer` from now on until it is idle. Thread-safe."""
        self._newly_busy.append(peer)
        if self.deep:
            self.wake()

    def _nudge(self) -> None:
        if self._asleep:
            self._asleep = False
            self.wake()

    def wake(self) -> None:
        """Ends the thread's present sleep."""
        with contextlib.suppress(OSError):
            os.write(self._wake_write, b"\1\0\0\0\0\0\0\0")

    def _woken(self) -> bool:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)
        return False

    def _run(self) -> None:
        self.ident = threading.get_ident()
        receivers.add(self.ident)
        clock, bursts = time.monotonic, self.bursts
        active = clock()
        while not self._stopping:
            now = clock()
            if self._unread or self._calls or self._settling:
                timeout: float | None = 0.0
            elif self._busy or self._newly_busy:
                timeout = max(0.0, self._next_tick - now)
                active = now
            elif now - active < _RECENT:
                timeout = 1.0
            else:
                self.deep = True
                timeout = 0.0 if self._newly_busy else None
            if timeout is None or timeout > _NAP:
                self._asleep = now - bursts.last > _RUSH_S
                if bursts.holders or not self._asleep:
                    timeout = _NAP
            ready = self._selector.poll(timeout)
            self.deep = self._asleep = False
            self._handle(ready)
        receivers.discard(self.ident)

    def _handle(self, ready: list[tuple[int, int]]) -> None:
        """Serves ready descriptors, runs the calls, and makes due ticks."""
        quiet = not (ready or self._unread)
        if self._unread:
            again, self._unread = self._unread, set()
            for fd in again.difference(fd for fd, _ in ready):
                self._call_back(fd)
        for fd, events in ready:
            if events != _WRITABLE:
                self._call_back(fd)
            if events & _WRITABLE:
                writer = self._writers.get(fd)
                if writer is not None:
                    _guarded(writer)
        self.run_calls()
        now = time.monotonic()
        if self.bursts.holders:
            uninterrupted(self.bursts.flush_old, now)
        if self._settling:
            self._settle(quiet, now)
        if now >= self._next_tick and (self._busy or self._newly_busy):
            self._next_tick = now + self._tick
            self._tick_all(now)

    def _call_back(self, fd: int) -> None:
        callback = self._callbacks.get(fd)
        if callback is not None and _guarded(callback):
            self._unread.add(fd)

    def _tick_all(self, now: float) -> None:
        while self._newly_busy:
            self._busy.append(self._newly_busy.popleft())
        # A peer whose tick failed is ticked further, since it has not reported that it is idle.
        self._busy = [peer for peer in self._busy if _guarded(peer.tick, now) is not False]


def _guarded(function: Callable[..., object], *args: object) -> object:
    try:
        return function(*args)
    except BaseException:
        log.exception("monarch_nb: error on the thread that reads messages; it goes on")
        return None


def _wake_pair() -> tuple[int, int]:
    if hasattr(os, "eventfd"):
        fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        return fd, fd
    read, write = os.pipe()
    os.set_blocking(read, False)
    os.set_blocking(write, False)
    return read, write


class _Poll:
    """Waits by epoll where available, since it costs the same for any number of descriptors."""

    def __init__(self) -> None:
        self._epoll: select.epoll | None = None
        self._fallback: selectors.BaseSelector | None = None
        if hasattr(select, "epoll"):
            self._epoll = select.epoll()
        else:
            self._fallback = selectors.DefaultSelector()

    def add(self, fd: int) -> None:
        if self._epoll:
            self._epoll.register(fd, select.EPOLLIN)
        elif self._fallback:
            self._fallback.register(fd, selectors.EVENT_READ)

    def writing(self, fd: int, on: bool) -> None:
        if self._epoll:
            self._epoll.modify(fd, select.EPOLLIN | select.EPOLLOUT if on else select.EPOLLIN)
        elif self._fallback:
            self._fallback.modify(fd, selectors.EVENT_READ | selectors.EVENT_WRITE if on else selectors.EVENT_READ)

    def remove(self, fd: int) -> None:
        if self._epoll:
            self._epoll.unregister(fd)
        elif self._fallback:
            self._fallback.unregister(fd)

    def poll(self, timeout: float | None) -> list[tuple[int, int]]:
        """Returns descriptors and their ready events."""
        try:
            if self._epoll:
                return self._epoll.poll(timeout)
            assert self._fallback is not None
            # Its events, 1 and 2, differ from those of epoll, 1 and 4.
            return [(key.fd, events & 1 | (events & 2) << 1) for key, events in self._fallback.select(timeout)]
        except InterruptedError:
            return []

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        if self._epoll:
            self._epoll.close()
        elif self._fallback:
            self._fallback.close()


# -- bursts ------------------------------------------------------------------------------------------------------------


class Bursts:
    """The connections of one process with messages held back. Thread-safe."""

    __slots__ = ("_nudge", "holders", "last", "pauses")

    def __init__(self, nudge: Callable[[], None]) -> None:
        """`nudge` makes the reading thread call `flush_old` soon."""
        self._nudge = nudge
        self.holders: set[UnixStream] = set()  # connections that hold messages back, or did until recently
        self.pauses = 0  # number of waits begun by threads; messages after one begin a new burst
        self.last = float("-inf")  # time of the last message held back

    def add(self, holder: "UnixStream", now: float) -> None:
        """Records that a connection holds back a message."""
        self.last = now
        if holder not in self.holders:
            self.holders.add(holder)
            self._nudge()

    def flush(self) -> None:
        """Writes all messages held back, since the calling thread is about to wait, perhaps for a reply to one."""
        self.pauses += 1
        while self.holders:
            try:
                holder = self.holders.pop()
            except KeyError:  # another thread has taken the last one
                return
            holder.flush()

    def flush_old(self, now: float) -> None:
        """Writes messages that were held back for long enough: their thread does something else now."""
        for holder in tuple(self.holders):
            if now - holder.held_since() >= LONGEST_S:
                self.holders.discard(holder)
                holder.flush()


class Burst:
    """The burst of messages on one connection."""

    __slots__ = ("_last", "_pauses", "_row", "count", "since", "size")

    def __init__(self) -> None:
        self._last = 0.0
        self._row = 0
        self._pauses = -1
        self.written()

    def written(self) -> None:
        """Records that all messages held back have been written."""
        self.count = self.size = 0
        self.since = 0.0

    def holds(self, size: int, now: float, pauses: int) -> bool:
        """Returns whether a message of `size` bytes is to be held back; else it is written with those held back."""
        if now - self._last > APART_S or pauses != self._pauses:
            self._row, self._pauses = 0, pauses
        self._last = now
        self._row += 1
        if self._row <= SINGLE_WRITES:
            return False
        if not self.count:
            self.since = now
        self.count += 1
        self.size += size
        return self.count < MOST and self.size < LARGEST and now - self.since < LONGEST_S
