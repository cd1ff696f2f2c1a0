"""Where the processes of other hosts connect to this one: a ROUTER on TCP."""

from collections.abc import Callable, Sequence

import zmq

from monarch_nb.transport.keys import Keys
from monarch_nb.transport.reader import Reader
from monarch_nb.transport.streams import Message
from monarch_nb.transport.tcp import sockets
from monarch_nb.transport.tcp.handshakes import HandshakeLimiter, KeyChecker
from monarch_nb.transport.tcp.sockets import Context, Limits, Socket

__all__ = ["Received", "TcpListener"]

_AT_ONCE = 256  # messages read before timers and calls are looked at

Received = Callable[[Socket, bytes, Sequence[Message]], None]


class TcpListener:
    """The socket, and what decides who may connect to it."""

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
        """Bind, or take the socket that is `bound` already (its descriptor), and begin to read.

        `received` gets the messages of one connection, by its routing id, on the reading thread. Raises TransportError
        for an endpoint that cannot be had.
        """
        self._received = received
        self._checker = KeyChecker(context, reader, keys) if keys is not None else None
        self._limiter: HandshakeLimiter | None = None
        try:
            self._router = sockets.listen_tcp(context, bind, keys, limits, bound)
        except BaseException:
            self.stop()
            raise
        self.endpoint = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        port = int(self.endpoint.rpartition(":")[2])
        self._limiter = HandshakeLimiter(self._router, reader, port, limits)
        reader.watch(int(self._router.FD), self._read)
        reader.read_again(int(self._router.FD))

    def _read(self) -> bool:
        """Hand on what has come, together what came on one connection."""
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
        """Lets nobody new in; after the reading thread has ended."""
        if self._limiter is not None:
            self._limiter.close()
        if self._checker is not None:
            self._checker.close()

    def close(self, *, now: bool) -> None:
        """Close the socket; what is queued is dropped if that is to be `now`."""
        self._router.close(0 if now else None)
