"""The connection to a peer that its link writes to: a socket dialled by this process, or the connection that the peer
dialled; renewed after a loss.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import zmq
from zmq.backend import Socket as _Raw

from monarch_nb.routing.actions import Action, Transmit
from monarch_nb.routing.link import Link
from monarch_nb.transport.errors import TransportError
from monarch_nb.transport.packing import Item
from monarch_nb.transport.reader import Reader
from monarch_nb.transport.streams import Message, UnixStream
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
_FIRST_PAUSE, _LAST_PAUSE = 0.01, 0.5  # seconds between two attempts to reach a process of this host
_STARVED_S = 5.0  # without a descriptor for a connection, after which its messages fail


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


class Connection:
    """Executes the writes of a link. All methods are called under the peer's lock."""

    def __init__(
        self,
        link: Link[Item],
        endpoint: str,
        *,
        dial: Callable[[], DialledChannel | UnixStream | None],
        readable: Callable[[], bool],
        keep_time: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`dial` opens a connection, or returns None while nobody listens; `readable` reads one of ZeroMQ's.

        `keep_time` starts the link's ticks.
        """
        self._link = link
        self._dial, self._readable, self._keep_time, self._clock = dial, readable, keep_time, clock
        self.channel: FrameSink | None = None
        self._theirs: UnixStream | None = None  # inside the host: dialled by the peer, although also dialled from here
        self._starved: tuple[float, str] | None = None  # start of the lack of descriptors, and the error
        self._again_at = 0.0  # the earliest time of the next attempt
        self._pause = _FIRST_PAUSE
        self._aim(endpoint)

    def _aim(self, endpoint: str) -> None:
        self.endpoint = endpoint  # address to dial; "": the peer dials this process
        self.over_tcp = endpoint.startswith("tcp:")
        self.inside = endpoint.startswith("ipc:")  # dialled by a unix socket

    # dialling

    def open(self) -> FrameSink | None:
        """Dials; None if the peer dials this process, or cannot be reached now. Raises TransportError."""
        if not self.endpoint:
            return None
        if self.inside:
            return self._open_inside()
        channel = self._dial()
        if isinstance(channel, DialledChannel):
            self.channel = channel
            channel.listen(self._readable)
        return channel

    def _open_inside(self) -> FrameSink | None:
        now = self._clock()
        if now < self._again_at:
            return None
        try:
            channel = self._dial()
        except TransportError:
            self._link.disconnected(now)
            if self._theirs is None:
                raise
            return self._answer_there(now)
        if type(channel) is not UnixStream:
            self._link.disconnected(now)
            self._again_at = now + self._pause
            self._pause = min(2 * self._pause, _LAST_PAUSE)
            return self._answer_there(now)
        self._pause = _FIRST_PAUSE
        self.channel = channel
        channel.listen()
        self.transmit(self._link.connected(now))
        return channel

    def _answer_there(self, now: float) -> FrameSink | None:
        """Writes to the connection that the peer has dialled: one side has no descriptor for ours."""
        if self._theirs is None or self._theirs.closed:
            return None
        self.channel = self._theirs
        self.transmit(self._link.connected(now))
        return self.channel

    def reach(self) -> FrameSink | None:
        """Dials without raising: while no descriptors are left there is no connection."""
        if self.inside and self._clock() < self._again_at:
            return None
        try:
            channel = self.open()
        except TransportError as error:
            since = self._clock() if self._starved is None else self._starved[0]
            self._starved = (since, str(error))
            self._keep_time()
            return None
        self._starved = None
        return channel

    def starved(self, now: float) -> str | None:
        """Returns once why the connection has been missing so long that waiting messages must fail; else None."""
        if self._starved is None or now - self._starved[0] < _STARVED_S:
            return None
        reason, self._starved = self._starved[1], None
        return reason

    def dial_at(self, endpoint: str) -> None:
        """Dials the peer from now on, at `endpoint`."""
        channel, self.channel = self.channel, None
        if isinstance(channel, DialledChannel):
            channel.close(0)
        self._link.dial(self._clock())
        self._aim(endpoint)

    # connections that the peer has dialled

    def attach(self, channel: FrameSink, *, unreachable: bool) -> None:
        """Uses a connection that the peer has dialled, perhaps again, unless this process dials it, or it is gone."""
        if not self.endpoint and not unreachable:
            if isinstance(self.channel, InboundChannel):
                self.channel.close(0)  # unwritten frames are kept: the dialling side first reports missing ones
            self.channel = channel
        elif type(channel) is UnixStream and not isinstance(self.channel, DialledChannel):
            self._theirs = channel

    def cut(self, stream: UnixStream) -> bool:
        """Records that a connection inside the host is gone; returns whether it was the one to write to."""
        if self._theirs is stream:
            self._theirs = None
        if self.channel is not stream:
            return False
        self.channel = None
        self._link.disconnected(self._clock())
        if stream.turned_away:
            self._answer_there(self._clock())
        return True

    def close(self, linger_ms: int) -> None:
        """Closes the connection."""
        channel, self.channel = self.channel, None
        if channel is not None:
            channel.close(linger_ms)

    def read(self, limit: int) -> list[Message]:
        """Returns at most `limit` messages that have arrived on the connection that this process has dialled."""
        channel, messages = self.channel, list[Message]()
        while isinstance(channel, DialledChannel) and len(messages) < limit and (message := channel.read()) is not None:
            messages.append(message)
        return messages

    # writing

    def put(self, channel: FrameSink, frame0: bytes, frames: Sequence[Frame], may_wait: bool) -> UnixStream | None:
        """Writes one message, or queues it in the stream that it returns, for a `push` without the lock."""
        try:
            if type(channel) is UnixStream:
                return channel if channel.put(frame0, frames, may_wait=may_wait) else None
            channel.write(frame0, frames)
        except zmq.Again:
            self.lost(channel)
        return None

    def write(self, channel: FrameSink, frame0: bytes, frames: Sequence[Frame]) -> None:
        """Writes one message at once; the link keeps it if the connection is gone."""
        try:
            channel.write(frame0, frames)
        except zmq.Again:
            self.lost(channel)

    def lost(self, channel: FrameSink) -> None:
        """Records that a channel could not be written to; its watcher will report that too."""
        self._link.disconnected(self._clock())
        if type(channel) is UnixStream and self.channel is channel:
            self.channel = None
            channel.close(0)

    def transmit(self, actions: Sequence[Action[Item]]) -> list[Action[Item]]:
        """Executes writes, in order; returns the other actions, which are executed without the lock."""
        rest = []
        for action in actions:
            if type(action) is Transmit:
                channel = self.channel or self.reach()
                item = action.item
                if channel is None:
                    continue
                if item is None:
                    self.write(channel, action.prefix, ())
                else:
                    self.write(channel, action.prefix + item.head, item.frames)
            else:
                rest.append(action)
        return rest
