"""The ROUTER socket on which processes of other hosts connect to this one by TCP."""

import contextlib
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence

import zmq
from zmq.utils import z85

from monarch_nb.transport.errors import TransportError
from monarch_nb.transport.keys import Keys
from monarch_nb.transport.reader import Reader
from monarch_nb.transport.streams import Message
from monarch_nb.transport.tcp import sockets
from monarch_nb.transport.tcp.endpoints import Limits, spare_descriptors
from monarch_nb.transport.tcp.sockets import Context, Monitor, Socket

log = logging.getLogger(__name__)
_AGAIN_S = 1.0  # between attempts to listen with another key
_AT_ONCE = 256  # messages read before timers and calls are handled

Received = Callable[[Socket, bytes, Sequence[Message]], None]
_ZAP = "inproc://zeromq.zap.01"


class KeyChecker:
    """Answers libzmq's question whether a client key is accepted (ZAP, RFC 27): only our own keys are."""

    def __init__(self, context: Context, reader: Reader, keys: Keys) -> None:
        self.allow(keys)
        self._reader = reader
        self._socket: Socket = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(_ZAP)
        self._fd = int(self._socket.FD)
        reader.watch(self._fd, self._answer)
        reader.read_again(self._fd)

    def allow(self, keys: Keys) -> None:
        """Accepts only clients with these keys from now on."""
        self._allowed = z85.decode(keys.public)

    def _answer(self) -> bool:
        while True:
            try:
                question = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.ZMQError:
                return False
            version, request = question[0], question[1]
            mechanism, credentials = question[5], question[6:]
            good = version == b"1.0" and mechanism == b"CURVE" and credentials == [self._allowed]
            code, text = (b"200", b"OK") if good else (b"400", b"unknown key")
            self._socket.send_multipart([b"1.0", request, code, text, b"job" if good else b"", b""])

    def close(self) -> None:
        """Stops answering; after the reader has stopped."""
        self._reader.unwatch(self._fd)
        self._socket.close(0)


class HandshakeLimiter:
    """Limits the TCP connections that have not proved the key yet, since each costs a descriptor.

    libzmq reports accepted descriptors and the number of successful handshakes, but not whose they are. Descriptors
    accepted within the handshake's time limit, less the handshakes that succeeded in it, are strangers; above the limit
    the newest is closed, and a legitimate peer simply dials again.
    """

    def __init__(self, router: Socket, reader: Reader, limits: Limits) -> None:
        """`router` is not bound yet."""
        self._limits = limits
        self._port = 0
        self.bound: int | None = None  # a descriptor of the listening socket
        self._open: dict[int, float] = {}
        self._admitted: deque[float] = deque()
        self.refused = 0
        self._monitor = Monitor(router, reader, self._on_event)

    def _on_event(self, event: int, value: int) -> None:
        now = time.monotonic()
        if event == sockets.LISTENING:
            with contextlib.suppress(OSError):
                self.bound = os.dup(value)
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(value)) as listening:
                self._port = listening.getsockname()[1]
        elif event == sockets.ACCEPTED:
            self._open[value] = now
            self._forget(now)
            if len(self._open) - len(self._admitted) > self._limits.strangers:
                self._cut(value)
        elif event == sockets.UP:
            self._admitted.append(now)
        elif event == sockets.DOWN:
            self._open.pop(value, None)

    def _forget(self, now: float) -> None:
        limit = now - self._limits.handshake_ms / 1000 - 0.5
        while self._admitted and self._admitted[0] < limit:
            self._admitted.popleft()
        for fd in [fd for fd, since in self._open.items() if since < limit]:
            del self._open[fd]

    def _cut(self, fd: int) -> None:
        self.refused += 1
        self._open.pop(fd, None)
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
            if connection.getsockname()[1] == self._port:  # not a descriptor that was reused meanwhile
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Stops counting."""
        self._monitor.close()
        bound, self.bound = self.bound, None
        if bound is not None:
            os.close(bound)


class TcpListener:
    """The socket and its access control."""

    def __init__(
        self,
        context: Context,
        bind: str,
        keys: Keys | None,
        *,
        reader: Reader,
        limits: Limits,
        bound: int | None,
        received: Received,
    ) -> None:
        """Binds, or takes over the socket `bound` (its descriptor), and starts to read.

        `received` gets the messages of one connection, by its routing id, on the reading thread. Raises TransportError
        for an unavailable endpoint.
        """
        self._received, self._context, self._reader, self._limits = received, context, reader, limits
        self.keys = keys  # the wanted keys
        self._used: Callable[[], None] | None = None  # called once they are in use
        self._next_try = 0.0
        self._checker = KeyChecker(context, reader, keys) if keys is not None else None
        try:
            self._listen(bind, bound)
        except BaseException:
            if self._checker is not None:
                self._checker.close()
            raise
        self.endpoint = self._router.getsockopt_string(zmq.LAST_ENDPOINT)

    def _listen(self, bind: str, bound: int | None) -> None:
        router = sockets.listener(self._context, bind, self.keys, self._limits)
        try:
            limiter = HandshakeLimiter(router, self._reader, self._limits)
            try:
                sockets.listen(router, bind, self._limits, bound)
            except BaseException:
                limiter.close()
                raise
        except BaseException:
            router.close(0)
            raise
        self._router, self._limiter = router, limiter
        self._reader.watch(int(router.FD), self._read)
        self._reader.read_again(int(router.FD))

    def use(self, keys: Keys, used: Callable[[], None]) -> None:
        """Accepts only clients with these keys, cuts all connections, and calls `used`. On the reading thread.

        The kernel's socket stays, so that nobody else can take the port. While no ROUTER can be opened, the former
        continues, with a new attempt every second.
        """
        waits = self._used is not None
        self.keys, self._used, self._next_try = keys, used, 0.0
        if not waits and self.tick(time.monotonic()):
            self._reader.busy(self)

    def tick(self, now: float) -> bool:
        """Opens the ROUTER for `use`, if an attempt is due; returns whether it will try again."""
        checker, keys, used = self._checker, self.keys, self._used
        if checker is None or keys is None or used is None or now < self._next_try:
            return used is not None
        router, limiter = self._router, self._limiter
        try:
            self._listen_again()
        except (TransportError, zmq.ZMQError, OSError) as error:
            if not self._next_try:
                log.warning("%s still lets in those with the former key, and tries again: %s", self.endpoint, error)
            self._next_try = now + _AGAIN_S
            return True
        checker.allow(keys)
        self._reader.unwatch(int(router.FD))
        limiter.close()
        router.close(0)
        self._used = None
        used()
        return False

    def _listen_again(self) -> None:
        if self._limiter.bound is None:
            raise TransportError("its socket was opened a moment ago")
        spare_descriptors("another key")
        bound = os.dup(self._limiter.bound)
        try:
            self._listen(self.endpoint, bound)
        except BaseException:
            os.close(bound)
            raise

    def _read(self) -> bool:
        """Delivers received messages, those of one connection together."""
        name, messages = b"", list[Message]()
        for _ in range(_AT_ONCE):
            message = sockets.read_router(self._router)
            if message is None:
                break
            routing_id, frame0, frames = message
            if routing_id != name:
                if messages:
                    self._received(self._router, name, messages)
                name, messages = routing_id, []
            messages.append((frame0, frames))
        if messages:
            self._received(self._router, name, messages)
        return message is not None

    def stop(self) -> None:
        """Accepts no new connections; after the reading thread has ended."""
        self._limiter.close()
        if self._checker is not None:
            self._checker.close()

    def close(self, *, now: bool) -> None:
        """Closes the socket; with `now`, queued messages are dropped."""
        self._router.close(0 if now else None)
