"""Large messages over sockets: one big ZeroMQ message is the slowest way there is, so they travel as pieces of 1 MiB.

All pieces of a message are written under one lock, hence follow each other on the link; only one is ever in assembly.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from monarch_nb.transport import shared
from monarch_nb.transport.envelope import CHUNKED, Item
from monarch_nb.transport.parcel import Body, Parcel, length_of
from monarch_nb.transport.shared import MemoryFile
from monarch_nb.wire import msgpack_decoder
from monarch_nb.wire.header import Header, encode_header

SIZE = 1 << 20  # bytes of a piece, and the largest body that travels whole
_lengths = msgpack_decoder(tuple[int, ...])


def pack_chunked(header: Header, parcel: Parcel) -> list[Item]:
    """The announcement of a large message, which names its bodies' lengths, and its pieces."""
    bodies = parcel.bodies
    lengths = msgspec.msgpack.encode([length_of(body) for body in bodies])
    items = [Item(CHUNKED[parcel.hops] + encode_header(header), [lengths], header, bodies, parcel.hops)]
    items += [Item(b"", pieces, header, bodies, parcel.hops) for pieces in _pieces(bodies)]
    return items


def _pieces(bodies: Sequence[Body]) -> Iterator[list[memoryview]]:
    """The bodies' bytes in portions of up to SIZE, small ones together."""
    portion: list[memoryview] = []
    room = SIZE
    for body in bodies:
        data = body.view() if isinstance(body, MemoryFile) else memoryview(body)
        start = 0
        while start < data.nbytes:
            piece = data[start : start + room]
            portion.append(piece)
            start += piece.nbytes
            room -= piece.nbytes
            if not room:
                yield portion
                portion, room = [], SIZE
    if portion:
        yield portion


class Assembly:
    """A large message of which not all pieces are here yet."""

    def __init__(self, header: Header, hops: int, announcement: Any, *, portable: bool) -> None:
        self.header = header
        self.charge = self.incarnation = 0  # to be given back, and to which incarnation of the sender
        self._hops = hops
        self._portable = portable
        self._left = list(_lengths.decode(announcement))
        if any(length < 0 for length in self._left):
            raise msgspec.DecodeError("negative length")
        self._bodies: list[Body] = []
        self._now: MemoryFile | bytearray | None = None
        self._filled = 0
        self._skip_empty()

    @property
    def complete(self) -> bool:
        """Whether all pieces are here."""
        return len(self._bodies) == len(self._left)

    def add(self, piece: memoryview) -> None:
        """The next piece. Raises DecodeError if it does not fit, SharedMemoryError when memory runs out."""
        if self.complete:
            raise msgspec.DecodeError("more pieces than announced")
        length = self._left[len(self._bodies)]
        if self._now is None:
            in_file = length >= shared.threshold and not self._portable
            self._now = MemoryFile.empty(length) if in_file else bytearray()  # which grows as pieces come
        if self._filled + piece.nbytes > length:
            raise msgspec.DecodeError("a piece is longer than announced")
        if isinstance(self._now, MemoryFile):
            self._now.append(piece)
        else:
            self._now += piece
        self._filled += piece.nbytes
        if self._filled == length:
            if isinstance(self._now, MemoryFile):
                self._now.seal()
            self._bodies.append(self._now)
            self._now, self._filled = None, 0
            self._skip_empty()

    def _skip_empty(self) -> None:
        while not self.complete and self._left[len(self._bodies)] == 0:
            self._bodies.append(b"")

    def parcel(self) -> Parcel:
        """The whole message's body."""
        return Parcel(self._bodies, hops=self._hops)
