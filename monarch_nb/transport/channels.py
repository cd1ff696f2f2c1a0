"""The ways to write to a peer: a socket dialled by us, or the link that the peer dialled."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import zmq
from zmq.backend import Socket as _Raw

_send = _Raw.send  # the compiled method: the wrapper around it costs more than the call
_MORE = zmq.SNDMORE | zmq.NOBLOCK
_LAST = zmq.NOBLOCK
COPY_BELOW = 64 * 1024  # bytes; larger frames are lent to the I/O thread, which costs a note to be sent back


class Channel(Protocol):
    """Somewhere to write a multipart message. Never blocks; called under the peer's lock."""

    def write(self, frame0: bytes, frames: Sequence[Any]) -> None:
        """Queue one message."""

    def close(self) -> None:
        """Stop using it."""


def write_parts(socket: "zmq.Socket[bytes]", frame0: bytes, frames: Sequence[Any]) -> None:
    """Write one multipart message to a socket without a high-water mark."""
    if not frames:
        _send(socket, frame0, _LAST, True, False)
        return
    _send(socket, frame0, _MORE, True, False)
    last = len(frames) - 1
    for place, frame in enumerate(frames):
        _send(socket, frame, _LAST if place == last else _MORE, len(frame) < COPY_BELOW, False)


class Dialled:
    """Our own DEALER, connected to the peer's listening socket."""

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        self.socket = socket

    def write(self, frame0: bytes, frames: Sequence[Any]) -> None:
        """Write straight to the socket."""
        write_parts(self.socket, frame0, frames)

    def close(self) -> None:
        """Close the socket; what is queued goes out within its linger time."""
        self.socket.close()


class Inbound:
    """The peer's connection to our ROUTER, which only the reader thread may touch."""

    def __init__(
        self,
        router: "zmq.Socket[bytes]",
        routing_id: bytes,
        lost: Callable[[], None],
        outgoing: "deque[Callable[[], None]]",
        wake: Callable[[], None],
        reader: Callable[[], int],
    ) -> None:
        self._router, self._routing_id, self._lost = router, routing_id, lost
        self._queue: deque[tuple[bytes, Sequence[Any]]] = deque()
        self._outgoing, self._wake, self._reader = outgoing, wake, reader

    def write(self, frame0: bytes, frames: Sequence[Any]) -> None:
        """Write now on the reader thread, else leave it to that thread."""
        self._queue.append((frame0, frames))
        if threading.get_ident() == self._reader():
            self._flush()
        else:
            self._outgoing.append(self._flush)
            self._wake()

    def _flush(self) -> None:
        while self._queue:
            frame0, frames = self._queue.popleft()
            try:
                _send(self._router, self._routing_id, _MORE, True, False)
            except zmq.ZMQError:  # EHOSTUNREACH: the connection is gone; the link resends when the peer dials again
                self._queue.clear()
                self._lost()
                return
            write_parts(self._router, frame0, frames)

    def close(self) -> None:
        """Forget what was not yet written."""
        self._queue.clear()
