"""The ZeroMQ sockets of the transport, with their options and the events of their connections, and probes of an
endpoint by ZMTP's own greeting, before any key is sent.
"""

import contextlib
import os
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from socket import AF_INET, AF_INET6
from socket import socket as PlainSocket  # noqa: N812 - beside ZeroMQ's
from typing import Any, TypeAlias

import zmq
from zmq.backend import Socket as _Raw

from monarch_nb.routing.routes import ChannelEndpoint
from monarch_nb.transport.errors import TransportError, UnreachableError, descriptor_limit, is_descriptor_limit
from monarch_nb.transport.keys import Keys
from monarch_nb.transport.packing import SIZE
from monarch_nb.transport.reader import Reader
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
_EVENTS = int(zmq.EVENTS)
_POLLIN = int(zmq.POLLIN)
_CHUNK = 1  # PrefixKind.CHUNK, the first byte of frame 0
_SPARE = 6  # descriptors that a new connection and its monitor need, with a little room
_GREETING_LENGTH = 64  # bytes of a ZMTP 3 greeting
_SIGNATURE = b"\xff" + bytes(7) + b"\x01\x7f"  # the start of a greeting


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of sockets: milliseconds, bytes, counts."""

    reconnect_ms: int = 3
    reconnect_max_ms: int = 200
    linger_ms: int = 1000
    backlog: int = 2048
    heartbeat_ms: int = 5_000  # TCP only: libzmq's own threads answer without the GIL
    heartbeat_timeout_ms: int = 20_000
    handshake_ms: int = 5_000  # TCP: the time to prove the key
    strangers: int = 256  # TCP: most connections that have not proved it
    max_frame: int = SIZE + (1 << 20)  # bytes; TCP: a larger frame cuts the connection


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
        raise TransportError(f"cannot listen on {endpoint}: {zmq.strerror(error.errno or 0)}") from error


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


def ipc_endpoint(folder: Path, name: str) -> str:
    """Returns the endpoint of process `name` of the host with this run folder."""
    return checked_path(f"ipc://{os.fspath(folder / name)}")


def checked_path(endpoint: str) -> str:
    """Returns the endpoint if a unix socket can have its path. Raises TransportError."""
    path = endpoint.removeprefix("ipc://")
    if len(os.fsencode(path)) >= 100:  # 107 on Linux, 103 on macOS, with a margin
        raise TransportError(
            f"the socket path {path} is too long for this system: choose a shorter run folder "
            "(XDG_RUNTIME_DIR or TMPDIR)"
        )
    return endpoint


def spare_descriptors(purpose: str) -> None:
    """Raises DescriptorLimitError if too few descriptors are left: libzmq would only retry forever, silently."""
    spare: list[int] = []
    try:
        for _ in range(_SPARE):
            spare.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        if is_descriptor_limit(error):
            raise descriptor_limit(purpose) from error
    finally:
        for fd in spare:
            os.close(fd)


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


def bound_at(fd: int) -> str:
    """Returns a socket's endpoint in ZeroMQ's form. Raises TransportError unless it is TCP with a port."""
    try:
        with PlainSocket(fileno=os.dup(fd)) as same:
            host, port, *_ = same.getsockname() if same.family in (AF_INET, AF_INET6) else ("", 0)
    except OSError as error:
        raise TransportError(f"descriptor {fd} is not a socket: {error}") from error
    if not port:
        raise TransportError(f"descriptor {fd} is not a TCP socket that is bound to a port")
    return ChannelEndpoint("tcp", host=host, port=port).url


def _adopt(router: Socket, fd: int, limits: Limits) -> None:
    try:
        os.set_inheritable(fd, False)
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


# -- probes ------------------------------------------------------------------------------------------------------------


class Unready(UnreachableError):
    """Nobody listens, or the listener hangs up at once; that may change in a moment."""


def split(endpoint: str) -> tuple[str, int]:
    """Returns host and port of "tcp://host:port". Raises ValueError."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    if not endpoint.startswith("tcp://") or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"{endpoint!r} is not an address of a host: it should look like tcp://node7:22222")
    return host.strip("[]"), int(port)


def knock(endpoint: str, timeout: float) -> bool | None:
    """Returns True if the endpoint is listening, False if it refuses, None without a reply in `timeout` seconds."""
    try:
        with socket.create_connection(split(endpoint), timeout):
            return True
    except ConnectionRefusedError:
        return False
    except OSError:
        return None


def greet(endpoint: str, timeout: float, stay: float = 0.0) -> str:
    """Returns the security mechanism ("CURVE", "NULL") of a ZeroMQ socket; raises UnreachableError, with the reason.

    With `stay` the endpoint must also keep the connection for so many seconds, which an overloaded one does not.
    """
    host, port = split(endpoint)
    try:
        connection = socket.create_connection((host, port), timeout)
    except ConnectionRefusedError:
        raise Unready(f"nobody listens at {endpoint}") from None
    except socket.gaierror as error:
        raise UnreachableError(f"{endpoint}: no machine is known as {host!r} here ({error.strerror})") from None
    except TimeoutError:
        raise UnreachableError(f"{endpoint} does not answer: no such machine, or a firewall between") from None
    except OSError as error:
        raise UnreachableError(f"{endpoint} cannot be reached: {error.strerror or error}") from None
    greeting, silent = b"", True
    with connection:
        try:
            connection.settimeout(timeout)
            connection.sendall(_SIGNATURE + b"\x03")  # only the greeting: another mechanism would end it early
            while len(greeting) < _GREETING_LENGTH and _is_ours(greeting):
                more = connection.recv(_GREETING_LENGTH - len(greeting))
                if not more:
                    silent = False
                    break
                greeting += more
            if stay and len(greeting) == _GREETING_LENGTH:
                connection.settimeout(stay)
                connection.recv(1)
                greeting, silent = b"", False
        except ConnectionError:
            silent = False
        except OSError:
            pass  # the bytes received so far suffice
    if not silent and len(greeting) < _GREETING_LENGTH and _is_ours(greeting):
        raise Unready(
            f"what listens at {endpoint} closes the connection: it is not a monarch-nb host agent, or too many "
            "strangers connect to it"
        )
    if not greeting:
        raise UnreachableError(f"whatever listens at {endpoint} says nothing: it is not a monarch-nb host agent")
    if len(greeting) < _GREETING_LENGTH or not _is_ours(greeting) or greeting[10] < 3:
        raise UnreachableError(f"what listens at {endpoint} is not a monarch-nb host agent; it says {greeting[:24]!r}")
    mechanism = greeting[12:32].rstrip(b"\0")
    with contextlib.suppress(UnicodeDecodeError):
        return mechanism.decode("ascii")
    raise UnreachableError(f"what listens at {endpoint} is not a monarch-nb host agent")


def _is_ours(greeting: bytes) -> bool:
    """Returns whether this may be the start of a ZMTP greeting."""
    return greeting[:1] in (b"", b"\xff") and (len(greeting) < 10 or bool(greeting[9] & 1))
