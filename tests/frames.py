"""A proxy that knows websockets: it can lose messages silently, and cuts connections at large ones."""

import socket
from collections.abc import Iterator

from tests.proxy import Proxy

_DATA = (0, 1, 2)  # kinds of frames that carry messages


class FrameProxy(Proxy):
    """Passes on data of websockets from the target frame by frame."""

    def __init__(self, target: str, largest: int = 10_000_000) -> None:
        self.largest = largest  # bytes of a message; the connection of a larger one is cut
        self.loses = False  # messages to the page; connections live
        self.lost = 0
        self.too_large = 0
        super().__init__(target)

    def _from(self, source: socket.socket) -> Iterator[bytes]:
        first = source.recv(1 << 18)
        if not first.startswith(b"HTTP/1.1 101"):
            while first:
                yield first
                first = source.recv(1 << 18)
            return
        while b"\r\n\r\n" not in first:
            first += source.recv(1 << 18)
        head, _, rest = first.partition(b"\r\n\r\n")
        yield head + b"\r\n\r\n"
        frames = _Frames(source, rest)
        while True:
            kind, frame = frames.next()
            if kind in _DATA and len(frame) > self.largest:
                self.too_large += 1
                return
            if kind in _DATA and self.loses:
                self.lost += 1
                continue
            yield frame


class _Frames:
    """Frames as a server sends them: not masked."""

    def __init__(self, source: socket.socket, begun: bytes) -> None:
        self._source = source
        self._buffer = bytearray(begun)

    def next(self) -> tuple[int, bytes]:
        """The kind of the next frame, and all its bytes. Raises OSError at the end."""
        self._have(2)
        kind, short = self._buffer[0] & 15, self._buffer[1] & 127
        more = {126: 2, 127: 8}.get(short, 0)
        self._have(2 + more)
        size = int.from_bytes(self._buffer[2 : 2 + more], "big") if more else short
        end = 2 + more + size
        self._have(end)
        frame = bytes(self._buffer[:end])
        del self._buffer[:end]
        return kind, frame

    def _have(self, count: int) -> None:
        while len(self._buffer) < count:
            data = self._source.recv(1 << 18)
            if not data:
                raise ConnectionError("the server has closed the connection")
            self._buffer += data
