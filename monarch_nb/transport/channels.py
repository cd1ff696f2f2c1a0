"""The ways to write to a peer: a socket dialled by this process, or the connection that the peer dialled."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import zmq
from zmq.backend import Socket as _Raw

from monarch_nb.transport.reader import Reader
from monarch_nb.transport.tcp.sockets import Monitor, Socket, read_dealer
from monarch_nb.wire import Frame

_send = _Raw.send  # the compiled method: the wrapper around it costs more than the call
_get = _Raw.get
_EVENTS = int(zmq.EVENTS)
_POLLIN = int(zmq.POLLIN)
_POLLOUT = int(zmq.POLLOUT)
_MORE = int(zmq.SNDMORE | zmq.NOBLOCK)
_LAST = int(zmq.NOBLOCK)
COPY_BELOW = 256 * 1024  # bytes; larger frames are lent to the I/O thread, which costs a notification


class FrameSink(Protocol):
    """A sink for multipart messages. Called under the peer's lock; never blocks."""

    def write(self, frame0: bytes, frames: Sequence[Frame]) -> None:
        """Queues one message. Raises zmq.Again without a connection for it."""

    def close(self, linger_ms: int) -> None:
        """Closes the sink; queued messages may leave within `linger_ms`."""


def write_parts(socket: Socket, frame0: bytes, frames: Sequence[Any]) -> None:
    """Writes one multipart message to a socket without a high-water mark."""
    if not frames:
        _send(socket, frame0, _LAST, True, False)
        return
    _send(socket, frame0, _MORE, True, False)
    last = len(frames) - 1
    for index, frame in enumerate(frames):
        _send(socket, frame, _LAST if index == last else _MORE, len(frame) < COPY_BELOW, False)


class DialledChannel:
    """A DEALER of this process, connected to the peer's listening socket."""

    __slots__ = ("_closed", "_fd", "_monitor", "_reader", "socket")

    def __init__(self, socket: Socket, reader: Reader, monitor: Monitor | None) -> None:
        self.socket = socket
        self._reader = reader
        self._monitor = monitor
        self._fd = int(socket.FD)
        self._closed = False

    def listen(self, callback: Callable[[], bool]) -> None:
        """Calls `callback` on the reader thread when the peer answers on this connection."""
        self._reader.watch(self._fd, callback)
        self._reader.read_again(self._fd)

    def write(self, frame0: bytes, frames: Sequence[Frame]) -> None:
        """Writes directly to the socket."""
        try:
            write_parts(self.socket, frame0, frames)
        except zmq.Again:
            # While it sends, libzmq checks for new connections only about once a millisecond; EVENTS checks at once.
            if not self._events() & _POLLOUT:
                raise
            write_parts(self.socket, frame0, frames)
        self._events()  # also if the peer has its own connection: once restarted, it may answer on this one

    def _events(self) -> int:
        events: Any = _get(self.socket, _EVENTS)
        if events & _POLLIN:  # reading EVENTS has cleared the signal of a readable message: the reader would sleep on
            self._reader.read_again(self._fd)
        return int(events)

    def read(self) -> tuple[bytes, list[Frame]] | None:
        """Returns one message from the peer, if there is one."""
        return None if self._closed else read_dealer(self.socket)

    def close(self, linger_ms: int) -> None:
        """Closes the socket."""
        self._closed = True
        self._reader.unwatch(self._fd)
        if self._monitor is not None:
            self._monitor.close()
        self.socket.close(linger_ms)


class InboundChannel:
    """The peer's connection to our ROUTER, which only the reader thread may use: others pass it their messages."""

    __slots__ = ("_closed", "_fd", "_lost", "_queue", "_reader", "_reroute", "_router", "_routing_id")

    def __init__(
        self,
        router: Socket,
        routing_id: bytes,
        reader: Reader,
        *,
        lost: Callable[[], None],
        reroute: Callable[[], None],
    ) -> None:
        """`lost` marks the link so that its frames are stored; `reroute` finds another route. Reader thread."""
        self._router, self._routing_id, self._reader = router, routing_id, reader
        self._lost, self._reroute = lost, reroute
        self._queue: deque[tuple[bytes, Sequence[Frame]]] = deque()
        self._fd = int(router.FD)
        self._closed = False

    def write(self, frame0: bytes, frames: Sequence[Frame]) -> None:
        """Writes at once on the reader thread, else leaves the message to that thread."""
        self._queue.append((frame0, frames))
        if threading.get_ident() != self._reader.ident:
            self._reader.call_soon(self._leave)
        elif not self._flush():
            self._reader.call_soon(self._leave_it)  # not from here, where the peer's lock is held
            raise zmq.Again

    def _leave(self) -> None:
        """Writes messages that others left; without the peer's lock."""
        if not self._flush():
            # Before anything else is read: a later frame of the peer, which has dialled again, must follow it.
            self._lost()
            self._reroute()

    def _leave_it(self) -> None:
        if not self._closed:
            self._reroute()

    def _flush(self) -> bool:
        try:
            while self._queue and not self._closed:
                frame0, frames = self._queue.popleft()
                try:
                    _send(self._router, self._routing_id, _MORE, True, False)
                except zmq.ZMQError:  # EHOSTUNREACH: the peer is gone; the link keeps the frames until it dials again
                    self._queue.clear()
                    return False
                write_parts(self._router, frame0, frames)
            return True
        finally:
            self._reader.read_again(self._fd)  # the write may have cleared the signal of a readable message

    def close(self, linger_ms: int) -> None:
        """Drops messages that are not written yet."""
        self._flush_last()
        self._closed = True
        self._queue.clear()

    def _flush_last(self) -> None:
        if threading.get_ident() == self._reader.ident:
            self._flush()
