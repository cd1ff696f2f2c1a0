"""Events of a socket's connections, as libzmq reports them."""

import struct
from collections.abc import Callable

import zmq

from monarch_nb.transport.reader import Reader
from monarch_nb.transport.tcp.sockets import Socket

UP = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
DOWN = int(zmq.EVENT_DISCONNECTED)
REFUSED = int(
    zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
ACCEPTED = int(zmq.EVENT_ACCEPTED)
LISTENING = int(zmq.EVENT_LISTENING)
ALL = UP | DOWN | REFUSED | ACCEPTED | LISTENING
_EVENT = struct.Struct("=hi")  # its number and its value; zmq.utils.monitor knows too, and imports asyncio


class Monitor:
    """Calls `on_event(event, value)` on the reader thread."""

    def __init__(self, socket: Socket, reader: Reader, on_event: Callable[[int, int], None]) -> None:
        self._socket, self._reader, self._on_event = socket, reader, on_event
        self._pair = socket.get_monitor_socket(ALL)
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
        """End it. The pair itself is closed by the thread that reads it."""
        if not self._closed:
            self._closed = True
            self._reader.unwatch(self._fd)
            self._socket.disable_monitor()
            self._reader.call_soon(self._pair.close, 0)
