"""The ZeroMQ sockets of the transport, with their options and the events of their connections, and the two channels
that a link can write to: a socket dialled by this process, and the connection that the peer dialled.
"""

import errno
import os
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from socket import socket as PlainSocket  # noqa: N812 - beside ZeroMQ's
from typing import Any, TypeAlias

import zmq
from zmq.backend import Socket as _Raw

from monarch_nb.transport.errors import NotConnectedError, TransportError, descriptor_limit, is_descriptor_limit
from monarch_nb.transport.keys import Keys
from monarch_nb.transport.reader import Reader
from monarch_nb.transport.tcp.endpoints import Limits, spare_descriptors
from monarch_nb.wire import Frame

Socket: TypeAlias = "zmq.Socket[bytes]"
Context: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"

UP = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
DOWN = int(zmq.EVENT_DISCONNECTED)
REFUSED = int(
    zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
ACCEPTED = int(zmq.EVENT_ACCEPTED)
LISTENING = int(zmq.EVENT_LISTENING)
_ALL = UP | DOWN | REFUSED | ACCEPTED | LISTENING
_EVENT = struct.Struct("=hi")  # number and value of an event; zmq.utils.monitor would import asyncio

_recv = _Raw.recv
_get = _Raw.get
_RCVMORE = int(zmq.RCVMORE)
_NOBLOCK = int(zmq.NOBLOCK)
_send = _Raw.send  # the compiled method: the wrapper around it costs more than the call
_EVENTS = int(zmq.EVENTS)
_POLLIN = int(zmq.POLLIN)
_POLLOUT = int(zmq.POLLOUT)
_MORE = int(zmq.SNDMORE | zmq.NOBLOCK)
COPY_BELOW = 256 * 1024  # bytes; larger frames are lent to the I/O thread, which costs a notification


def new_context() -> Context:
    """Returns a context for one node."""
    try:
        context: Context = zmq.Context()
        context.set(zmq.MAX_SOCKETS, min(65535, context.get(zmq.SOCKET_LIMIT)))  # 1023 otherwise
    except zmq.ZMQError as error:
        raise _limit(error, "the message layer") from error
    return context


def listener(context: Context, endpoint: str, keys: Keys | None, limits: Limits) -> Socket:
    """Returns a ROUTER for TCP, not yet bound, that talks only to peers with the same keys, if any are given."""
    router = _router(context, limits)
    _tcp(router, endpoint, limits)
    router.setsockopt(zmq.HANDSHAKE_IVL, limits.handshake_ms)
    if keys is not None:
        router.setsockopt(zmq.CURVE_SERVER, 1)
        router.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
        router.setsockopt(zmq.ZAP_DOMAIN, b"monarch-nb")
    return router


def listen(router: Socket, endpoint: str, limits: Limits, bound: int | None = None) -> None:
    """Binds a ROUTER; `bound` is the descriptor of a socket that is bound there already, which the ROUTER takes over.

    Raises TransportError for an unavailable endpoint.
    """
    if bound is not None:
        _adopt(router, bound, limits)
    try:
        router.bind(endpoint)
    except zmq.ZMQError as error:
        if is_descriptor_limit(None, error.errno):
            raise descriptor_limit(f"listening on {endpoint}") from error
        absent = error.errno in (errno.ENODEV, errno.EADDRNOTAVAIL)  # a name that is not known is a device to libzmq
        reason = "this machine has no such address" if absent else zmq.strerror(error.errno or 0)
        raise TransportError(f"cannot listen on {endpoint}: {reason}") from error


def dial(context: Context, endpoint: str, routing_id: str, keys: Keys | None, limits: Limits) -> Socket:
    """Returns a DEALER connected to `endpoint`, which need not exist yet."""
    spare_descriptors(f"a connection to {endpoint}")
    dealer = _socket(context, zmq.DEALER, f"a connection to {endpoint}", limits)
    try:
        dealer.setsockopt(zmq.ROUTING_ID, routing_id.encode())
        dealer.setsockopt(zmq.RECONNECT_IVL, limits.reconnect_ms)
        dealer.setsockopt(zmq.RECONNECT_IVL_MAX, limits.reconnect_max_ms)
        _tcp(dealer, endpoint, limits)
        # Messages without a connection stay in our link, which knows what the peer lacks.
        dealer.setsockopt(zmq.IMMEDIATE, 1)
        if keys is not None:
            dealer.setsockopt(zmq.CURVE_SERVERKEY, keys.public)
            dealer.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
            dealer.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    except BaseException:
        dealer.close(0)
        raise
    return dealer


def connect(dealer: Socket, endpoint: str) -> None:
    """Starts to connect; separate from `dial` so that a monitor can be attached before."""
    try:
        dealer.connect(endpoint)
    except zmq.ZMQError as error:
        dealer.close(0)
        if is_descriptor_limit(None, error.errno):
            raise descriptor_limit(f"a connection to {endpoint}") from error
        raise TransportError(f"cannot connect to {endpoint}: {error}") from error


def read_router(router: Socket) -> tuple[bytes, bytes, list[Frame]] | None:
    """Returns one message of a ROUTER as (routing id, frame 0, further frames), or None without one."""
    try:
        routing_id: Any = _recv(router, _NOBLOCK, True, False)
    except zmq.Again:
        return None
    if not _get(router, _RCVMORE):
        return routing_id, b"", []
    frame0, frames = _read_rest(router)
    return routing_id, frame0, frames


def read_dealer(dealer: Socket) -> tuple[bytes, list[Frame]] | None:
    """Returns one message of a DEALER as (frame 0, further frames), or None without one."""
    events: Any = _get(dealer, _EVENTS)
    if not events & _POLLIN:
        return None
    return _read_rest(dealer)


def _read_rest(socket: Socket) -> tuple[bytes, list[Frame]]:
    frame0: Any = _recv(socket, _NOBLOCK, True, False)
    frames: list[Frame] = []
    if frame0[:1] == b"\1":  # a chunk: lent, not copied, since it is copied into place at once
        while _get(socket, _RCVMORE):
            lent: Any = _recv(socket, _NOBLOCK, False, False)
            frames.append(memoryview(lent))
    else:
        while _get(socket, _RCVMORE):
            frames.append(_recv(socket, _NOBLOCK, True, False))
    return frame0, frames


def _router(context: Context, limits: Limits) -> Socket:
    router = _socket(context, zmq.ROUTER, "a listening socket", limits)
    router.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a peer that connects again is the same peer
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    router.setsockopt(zmq.BACKLOG, limits.backlog)
    return router


def _tcp(socket: Socket, endpoint: str, limits: Limits) -> None:
    # Names are looked up as IPv4: libzmq tries only the first address, which for localhost is often the wrong one.
    socket.setsockopt(zmq.IPV6, "[" in endpoint)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.MAXMSGSIZE, limits.max_frame)
    socket.setsockopt(zmq.HEARTBEAT_IVL, limits.heartbeat_ms)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, limits.heartbeat_timeout_ms)
    socket.setsockopt(zmq.HEARTBEAT_TTL, limits.heartbeat_timeout_ms)
    # A heartbeat leaves only after all earlier data: only the kernel can detect a connection that accepts no more.
    socket.setsockopt(zmq.TCP_MAXRT, limits.heartbeat_timeout_ms)


def _adopt(router: Socket, fd: int, limits: Limits) -> None:
    try:
        os.set_inheritable(fd, False)
        os.set_blocking(fd, False)  # libzmq does not: its thread would wait for a connection that another ROUTER took
        with PlainSocket(fileno=os.dup(fd)) as same:
            same.listen(limits.backlog)
    except OSError as error:
        raise TransportError(f"cannot listen on descriptor {fd}: {error}") from error
    router.setsockopt(zmq.USE_FD, fd)


def _socket(context: Context, kind: int, purpose: str, limits: Limits) -> Socket:
    try:
        socket = context.socket(kind)
    except zmq.ZMQError as error:
        raise _limit(error, purpose) from error
    socket.setsockopt(zmq.SNDHWM, 0)  # nothing is ever dropped silently: our own credits keep queues short
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, limits.linger_ms)
    return socket


def _limit(error: zmq.ZMQError, purpose: str) -> TransportError:
    if is_descriptor_limit(None, error.errno):
        return descriptor_limit(purpose)
    return TransportError(f"cannot open {purpose}: {error}")


class Monitor:
    """Calls `on_event(event, value)` on the reader thread."""

    def __init__(self, socket: Socket, reader: Reader, on_event: Callable[[int, int], None]) -> None:
        self._socket, self._reader, self._on_event = socket, reader, on_event
        self._pair = socket.get_monitor_socket(_ALL)
        self._pair.setsockopt(zmq.LINGER, 0)
        self._fd = int(self._pair.FD)
        self._closed = False
        reader.watch(self._fd, self._read)
        reader.read_again(self._fd)

    def _read(self) -> bool:
        while not self._closed:
            try:
                message = self._pair.recv_multipart(zmq.NOBLOCK)
            except zmq.ZMQError:
                break
            self._on_event(*_EVENT.unpack(message[0]))
        return False

    def close(self) -> None:
        """Ends the monitor. The pair itself is closed by the thread that reads it."""
        if not self._closed:
            self._closed = True
            self._reader.unwatch(self._fd)
            self._socket.disable_monitor()
            self._reader.call_soon(self._pair.close, 0)


def write_parts(socket: Socket, frame0: bytes, frames: Sequence[Any]) -> None:
    """Writes one multipart message to a socket without a high-water mark. Raises NotConnectedError."""
    last = len(frames) - 1
    try:
        _send(socket, frame0, _MORE if frames else _NOBLOCK, True, False)
        for index, frame in enumerate(frames):
            _send(socket, frame, _NOBLOCK if index == last else _MORE, len(frame) < COPY_BELOW, False)
    except zmq.Again:
        raise NotConnectedError from None


class DialledChannel:
    """A DEALER of this process, connected to the peer's listening socket."""

    is_dialled = True
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
        except NotConnectedError:
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

    is_dialled = False
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
            raise NotConnectedError

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
