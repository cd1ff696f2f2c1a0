"""Connections inside a host: unix stream sockets that carry the frames of a link, without a thread of libzmq, and the
socket in a run folder on which processes of this host connect to this one.

Measured against ipc sockets of ZeroMQ: a message wakes two threads less on its way. A message is a table (u32 count, a
u64 length each) and its frames one after the other. The first message on a connection names the dialling process.
Memory is taken for received bytes only, not for lengths in a table; more than this machine has ends the connection.
"""

import contextlib
import errno
import os
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from monarch_nb.transport.errors import (
    NotConnectedError,
    TransportError,
    descriptor_limit,
    is_descriptor_limit,
    room_for,
)
from monarch_nb.transport.reader import Burst, Reader
from monarch_nb.wire import Frame

_ROOM = 4 << 20  # buffer size requested from the kernel, in bytes
_MOST_FRAMES = 1 << 20
_TOGETHER = 512  # frames per call of the kernel
_AT_ONCE = 8  # reads before other connections are served
_SMALL = 64 * 1024  # bytes; smaller data are faster to split in a copy
_COUNT = struct.Struct("<I")
_TABLES = [struct.Struct(f"<I{count}Q") for count in range(8)]
_SILENT = getattr(socket, "MSG_NOSIGNAL", 0)
_clock = time.monotonic


def _memory() -> int:
    """Returns the bytes of memory of this machine, as far as known."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 1 << 39


_MOST_BYTES = min(1 << 39, _memory())  # a table with more is invalid

Message = tuple[bytes, Sequence[Frame]]  # its first frame, and the others
Received = Callable[[Sequence[Message]], None]


def _table(lengths: Sequence[int]) -> bytes:
    count = len(lengths)
    form = _TABLES[count] if count < len(_TABLES) else struct.Struct(f"<I{count}Q")
    return form.pack(count, *lengths)


NO_ROOM = _table([])  # not a message: reports the lack of a descriptor before the connection is closed


class UnixStream:
    """One connection. Written under the link's lock, read by the reading thread alone."""

    __slots__ = (
        "_big",
        "_burst",
        "_bursts",
        "_closed",
        "_fd",
        "_filled",
        "_lost",
        "_put",
        "_queue",
        "_reader",
        "_received",
        "_rest",
        "_socket",
        "_whole",
        "_writing",
        "turned_away",
    )

    def __init__(self, connection: socket.socket, reader: Reader, received: Received, lost: Callable[[], None]) -> None:
        """`received` gets the messages that have arrived, `lost` is called at the end; both on the reading thread."""
        connection.setblocking(False)
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _ROOM)
        self._socket, self._reader, self._received, self._lost = connection, reader, received, lost
        self._fd = connection.fileno()
        self._queue: deque[memoryview] = deque()  # parts that did not fit into the socket
        self._put: deque[tuple[Any, ...]] = deque()  # messages to be written, perhaps later: bytes, parts
        self._burst, self._bursts = Burst(), reader.bursts
        self._writing = threading.Lock()
        self._closed = False
        self.turned_away = False  # the other end has no descriptor for this connection
        self._rest = b""  # the start of an incomplete message
        self._big: bytearray | None = None  # an incomplete message larger than one read
        self._filled = self._whole = 0  # its bytes received so far, and in total

    @property
    def closed(self) -> bool:
        """True if writing is no longer possible."""
        return self._closed

    def listen(self) -> None:
        """Starts to read."""
        self._reader.watch(self._fd, self._readable, self._writable)

    # writing

    def write(self, frame0: bytes, frames: Sequence[Frame]) -> None:
        """Writes one message; a part that does not fit follows by itself. Never blocks. Raises NotConnectedError."""
        self.put(frame0, frames)
        self.push()

    def put(self, frame0: bytes, frames: Sequence[Frame], *, may_wait: bool = False) -> bool:
        """Queues one message, to be written by the next `push`; returns whether that is due now.

        One that `may_wait` is held back in a burst, until others, a pause of its thread or the reading thread write it
        too: see `bursts`. Only under the lock of the link, since its frames must be in order. Raises NotConnectedError.
        """
        if self._closed:
            raise NotConnectedError
        lengths = [len(frame0), *map(len, frames)]
        table = _table(lengths)
        size = len(table) + sum(lengths)
        waits = may_wait and self._burst.holds(size, now := _clock(), self._bursts.pauses)
        self._put.append((size, table, frame0, *frames))
        if waits:
            self._bursts.add(self, now)
        return not waits

    def push(self) -> None:
        """Writes queued messages. Thread-safe, with or without the lock of the link. Raises NotConnectedError."""
        with self._writing:
            put = self._put
            while put:
                size, *parts = put.popleft()
                if put:
                    self._burst.written()
                    while put and len(parts) < _TOGETHER // 2:
                        more, *rest = put.popleft()
                        size += more
                        parts += rest
                if self._closed:
                    raise NotConnectedError
                self._write(parts, size)

    def flush(self) -> None:
        """Writes messages that were held back. Thread-safe."""
        self._burst.written()
        with contextlib.suppress(NotConnectedError):  # reading reports the loss, and the link resends the messages
            self.push()

    def held_since(self) -> float:
        """Returns the send time of the oldest message held back; any number if there are none."""
        return self._burst.since

    def _write(self, parts: list[Frame], size: int) -> None:
        sent = 0
        if not self._queue and len(parts) < _TOGETHER:
            try:
                sent = self._socket.sendmsg(parts, (), _SILENT)
            except BlockingIOError:
                pass
            except OSError:
                raise NotConnectedError from None
            if sent == size:
                return
        waits = bool(self._queue)
        for part in parts:
            length = len(part)
            if sent >= length:
                sent -= length
            else:
                self._queue.append(memoryview(part)[sent:])
                sent = 0
        if self._queue and not waits:
            self._reader.watch_writing(self._fd, True)

    def _writable(self) -> None:
        """Continues to write, since there is room again; reading thread."""
        with self._writing:
            queue = self._queue
            try:
                while queue and not self._closed:
                    parts = [queue[index] for index in range(min(len(queue), _TOGETHER))]
                    sent = self._socket.sendmsg(parts, (), _SILENT)
                    while sent:
                        first = queue[0]
                        if sent < len(first):
                            queue[0] = first[sent:]
                            break
                        sent -= len(first)
                        queue.popleft()
            except BlockingIOError:
                return
            except OSError:
                queue.clear()  # reading reports the loss
            while queue and not len(queue[0]):
                queue.popleft()
            if not queue and not self._closed:
                self._reader.watch_writing(self._fd, False)

    # reading

    def _readable(self) -> bool:
        try:
            for _ in range(_AT_ONCE):
                if self._closed:
                    break
                more = self._read()
                if more is None:
                    self._end()
                if not more:
                    break
        except BlockingIOError:
            pass
        except (OSError, struct.error, ValueError, MemoryError):
            self._end()
        return False  # the descriptor becomes ready when more arrives

    def _read(self) -> bool | None:
        """Reads available data: returns whether more may follow, None at the end."""
        if self._big is not None:
            if self._filled == len(self._big):
                self._big += bytes(min(self._filled, self._whole - self._filled))
            with memoryview(self._big) as space:
                count = self._socket.recv_into(space[self._filled :])
            self._filled += count
            if self._filled == self._whole:
                message, self._big = self._big, None
                self._take(memoryview(message))
            return count > 0 or None
        buffer = self._reader.space
        count = self._socket.recv_into(buffer)
        if not count:
            return None
        data = buffer[:count]
        if self._rest:
            data, self._rest = memoryview(self._rest + data), b""
        self._take(data)
        return count == len(buffer)

    def _take(self, data: memoryview) -> None:
        """Delivers all whole messages at once; keeps the rest."""
        messages: list[Message] = []
        try:
            self._part(data.tobytes() if len(data) <= _SMALL else data, messages)
        finally:
            if messages:
                self._received(messages)

    def _part(self, data: bytes | memoryview, messages: list[Message]) -> None:
        start, end = 0, len(data)
        while end - start >= 4:
            count = _COUNT.unpack_from(data, start)[0]
            self.turned_away = not count
            if not 0 < count <= _MOST_FRAMES:
                raise ValueError("not a message of Monarch-NB")
            body = start + 4 + 8 * count
            if body > end:
                break
            if count < len(_TABLES):
                lengths = _TABLES[count].unpack_from(data, start)[1:]
            else:
                lengths = struct.unpack_from(f"<{count}Q", data, start + 4)
            total = sum(lengths)
            if total > _MOST_BYTES:
                raise ValueError("not a message of Monarch-NB")
            if body + total > end:
                if body + total - start > len(self._reader.space):
                    self._whole = body + total - start
                    self._filled = end - start
                    self._big = bytearray(data[start:])
                    return
                break
            frames = []
            start = body
            for length in lengths:
                frames.append(bytes(data[start : start + length]))
                start += length
            messages.append((frames[0], frames[1:]))
        self._rest = bytes(data[start:])

    # the end

    def _end(self) -> None:
        """Handles the end of the other side; reading thread."""
        self._shut()
        self._lost()

    def close(self, linger_ms: int) -> None:
        """Closes the connection. Thread-safe."""
        self.flush()
        with self._writing:
            self._closed = True
        self._reader.call_soon(self._shut)

    def _shut(self) -> None:
        with self._writing:
            self._closed = True
            self._queue.clear()
            self._put.clear()
            if self._socket.fileno() >= 0:
                self._reader.unwatch(self._fd)
                self._socket.close()


def dial(path: str, name: bytes) -> socket.socket | None:
    """Connects to the process that listens there; None if none does now. Raises DescriptorLimitError."""
    try:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError as error:
        if is_descriptor_limit(error):
            raise descriptor_limit(f"a connection to {path}") from error
        raise TransportError(f"cannot open a connection to {path}: {error}") from error
    try:
        connection.setblocking(False)  # a full backlog is not waited for
        connection.connect(path)
        connection.sendall(_table([len(name)]) + name)
    except OSError:
        connection.close()
        return None
    return connection


class UnixListener:
    """A listening unix socket in a run folder; all callers belong to the same user."""

    def __init__(self, path: str, backlog: int, reader: Reader, connected: Callable[[socket.socket], None]) -> None:
        """`connected` gets each new connection, on the reading thread. Raises TransportError, DescriptorLimitError."""
        try:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            if is_descriptor_limit(error):
                raise descriptor_limit(f"listening on {path}") from error
            raise TransportError(f"cannot listen on {path}: {error}") from error
        try:
            with room_for(path):
                _clear(path)
                self._socket.bind(path)
                self._socket.listen(backlog)
        except (OSError, TransportError) as error:
            self._socket.close()
            os.close(self._spare)
            if isinstance(error, TransportError):
                raise
            raise TransportError(f"cannot listen on {path}: {error.strerror or error}") from error
        self._socket.setblocking(False)
        self._reader, self._connected = reader, connected
        self._fd = self._socket.fileno()
        reader.watch(self._fd, self._accept)

    def _accept(self) -> bool:
        try:
            connection, _ = self._socket.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._turn_away()
            return False
        if _same_user(connection):
            self._connected(connection)
        else:
            connection.close()
        return True

    def _turn_away(self) -> None:
        """Sends a caller an error, since no descriptors are left."""
        self._give_up_spare()
        with contextlib.suppress(OSError), self._socket.accept()[0] as connection:
            connection.sendall(NO_ROOM)
        with contextlib.suppress(OSError):
            self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _give_up_spare(self) -> None:
        """Closes the spare descriptor, once only: another thread may reuse its number, and would lose that."""
        spare, self._spare = self._spare, -1
        if spare >= 0:
            os.close(spare)

    def close(self) -> None:
        """Closes the socket; after the reading thread has ended."""
        self._reader.unwatch(self._fd)
        self._socket.close()
        self._give_up_spare()


def _same_user(connection: socket.socket) -> bool:
    """Returns whether the caller is this user's, in addition to the folder's permissions."""
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return user in (os.geteuid(), 0)


def _clear(path: str) -> None:
    """Removes the socket of a killed process. Raises OSError if somebody listens there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        caller.setblocking(False)
        try:
            caller.connect(path)
        except FileNotFoundError:
            return
        except BlockingIOError:  # a full backlog belongs to a listener
            pass
        except OSError:
            os.unlink(path)
            return
    raise OSError(errno.EADDRINUSE, "another process listens there")
