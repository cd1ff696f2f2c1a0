"""Admission over TCP: of those who show our key, and of a limited number who have not shown one yet."""

import contextlib
import os
import socket
import time
from collections import deque

import zmq
from zmq.utils import z85

from monarch_nb.transport.keys import Keys
from monarch_nb.transport.reader import Reader
from monarch_nb.transport.tcp import monitor
from monarch_nb.transport.tcp.monitor import Monitor
from monarch_nb.transport.tcp.sockets import Context, Limits, Socket

_ZAP = "inproc://zeromq.zap.01"


class KeyChecker:
    """Answers libzmq's question whether a client key may come in (ZAP, RFC 27): exactly our own may."""

    def __init__(self, context: Context, reader: Reader, keys: Keys) -> None:
        self._allowed = z85.decode(keys.public)
        self._reader = reader
        self._socket: Socket = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(_ZAP)
        self._fd = int(self._socket.FD)
        reader.watch(self._fd, self._answer)
        reader.read_again(self._fd)

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
        """Stop answering; after the reader has stopped."""
        self._reader.unwatch(self._fd)
        self._socket.close(0)


class HandshakeLimiter:
    """Caps the TCP connections that have not shown the key yet, since each costs a descriptor.

    libzmq says when it accepted a descriptor and how many handshakes went well, but not whose. Those accepted within
    the handshake's time limit, less the handshakes that went well in it, are strangers; above the cap the newest is
    cut off, and a peer of ours simply dials again.
    """

    def __init__(self, router: Socket, reader: Reader, port: int, limits: Limits) -> None:
        self._port, self._limits = port, limits
        self._recent: deque[tuple[float, int]] = deque()
        self._open: dict[int, float] = {}
        self._known: deque[float] = deque()
        self.refused = 0
        self._monitor = Monitor(router, reader, self._on_event)

    def _on_event(self, event: int, value: int) -> None:
        now = time.monotonic()
        if event == monitor.ACCEPTED:
            self._open[value] = now
            self._forget(now)
            if len(self._open) - len(self._known) > self._limits.strangers:
                self._cut(value)
        elif event == monitor.UP:
            self._known.append(now)
        elif event == monitor.DOWN:
            self._open.pop(value, None)

    def _forget(self, now: float) -> None:
        limit = now - self._limits.handshake_ms / 1000 - 0.5
        while self._known and self._known[0] < limit:
            self._known.popleft()
        for fd in [fd for fd, since in self._open.items() if since < limit]:
            del self._open[fd]

    def _cut(self, fd: int) -> None:
        self.refused += 1
        self._open.pop(fd, None)
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
            if connection.getsockname()[1] == self._port:  # not a descriptor that was used anew meanwhile
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Stop counting."""
        self._monitor.close()
