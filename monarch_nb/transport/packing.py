"""The packing of messages for a link: whole, by memory file or in pieces, and the unpacking by the peer.

One byte string (envelope and header) and the frames of the body follow the prefix. Large single messages are the
slowest way of ZeroMQ, so large messages over sockets are sent as pieces of 1 MiB. All pieces of a message are written
under one lock, hence are adjacent on the link; only one message is ever in assembly.
"""

import os
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import msgspec

from monarch_nb.gpu import DeviceFile
from monarch_nb.routing.actions import PREFIX_SIZE, PrefixKind
from monarch_nb.transport import shared
from monarch_nb.transport.errors import SharedMemoryError, TransportError
from monarch_nb.transport.parcel import Body, Parcel, length_of
from monarch_nb.transport.pool import Loan
from monarch_nb.transport.shared import MemoryFile
from monarch_nb.wire import Frame, msgpack_decoder
from monarch_nb.wire.header import Header, decode_header, encode_header

ENVELOPE = struct.Struct("<BBxx")  # relays passed, 1 if pieces of it follow
WHOLE = [ENVELOPE.pack(hops, 0) for hops in range(256)]  # by relays passed
CHUNKED = [ENVELOPE.pack(hops, 1) for hops in range(256)]
IN_BAND = -1  # in place of a descriptor in Header.buffers
SIZE = 1 << 20  # bytes of a piece, and the largest body that is sent whole
_CHUNK = int(PrefixKind.CHUNK)
_lengths = msgpack_decoder(tuple[int, ...])
_MALFORMED = (msgspec.MsgspecError, struct.error, TypeError, ValueError, IndexError, OverflowError)


@final
class Item:
    """One message, or one piece of it, on a link; links keep it until it is acknowledged."""

    __slots__ = ("bodies", "frames", "head", "header", "hops")

    def __init__(
        self,
        head: bytes,
        frames: Sequence[Frame],
        header: Header | None = None,
        bodies: tuple[Body, ...] = (),
        hops: int = 0,
    ) -> None:
        self.head = head  # sent: envelope and header; received: the whole first frame, prefix included
        self.frames = frames  # further frames
        self.header = header  # sent: identifies the message if it fails
        self.bodies = bodies  # sent: keeps memory files open
        self.hops = hops


def pack_whole(header: Header, parcel: Parcel) -> Item:
    """Packs all bodies as frames."""
    frames = [body.view() if isinstance(body, (MemoryFile, DeviceFile)) else body for body in parcel.bodies]
    return Item(WHOLE[parcel.hops] + encode_header(header), frames, header, parcel.bodies, parcel.hops)


def pack_local(header: Header, parcel: Parcel, loan: int = 0) -> Item:
    """Packs for a peer on this host: large bodies by descriptor, possibly on loan, the rest as frames."""
    bodies = parcel.bodies
    if parcel.in_files or parcel.on_gpu:
        pid = os.getpid()
        table = tuple(_entry(pid, body) for body in bodies)
        for body in bodies:
            if type(body) is MemoryFile:
                if body.loan is not None:
                    body.loan.void()
                if body.entry is not None and not loan:
                    body.entry.given = True
        encoded = encode_header(msgspec.structs.replace(header, buffers=table, loan=loan))
        frames: Sequence[Any] = [b for b in bodies if type(b) is not MemoryFile and type(b) is not DeviceFile]
    else:
        encoded = encode_header(header)
        frames = bodies
    return Item(WHOLE[parcel.hops] + encoded, frames, header, bodies, parcel.hops)


def _entry(pid: int, body: Body) -> tuple[int, ...]:
    """Returns the entry of a body: process, descriptor, bytes; for a GPU's file also its memory's bytes and device."""
    if type(body) is MemoryFile:
        return pid, body.fd, body.length
    if type(body) is DeviceFile:
        return pid, body.fd, body.length, body.size, body.device
    return 0, IN_BAND, length_of(body)


def pack_chunked(header: Header, parcel: Parcel) -> list[Item]:
    """Returns the announcement of a large message, which has its bodies' lengths, and its pieces."""
    bodies = parcel.bodies
    lengths = msgspec.msgpack.encode([length_of(body) for body in bodies])
    items = [Item(CHUNKED[parcel.hops] + encode_header(header), [lengths], header, bodies, parcel.hops)]
    items += [Item(b"", pieces, header, bodies, parcel.hops) for pieces in _pieces(bodies)]
    return items


def _pieces(bodies: Sequence[Body]) -> Iterator[list[memoryview]]:
    """Yields the bodies' bytes in portions of up to SIZE, small ones together."""
    portion: list[memoryview] = []
    room = SIZE
    for body in bodies:
        data = body.view() if isinstance(body, (MemoryFile, DeviceFile)) else memoryview(body)
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
    """A large message of which some pieces are missing."""

    def __init__(self, header: Header, hops: int, announcement: Frame, *, portable: bool) -> None:
        self.header = header
        self.charge = self.incarnation = 0  # to be returned, and the sender's incarnation
        self._hops = hops
        self._portable = portable
        self._lengths_due = list(_lengths.decode(announcement))
        if any(length < 0 for length in self._lengths_due):
            raise msgspec.DecodeError("negative length")
        self._bodies: list[Body] = []
        self._body: MemoryFile | bytearray | None = None
        self._filled = 0
        self._skip_empty()

    @property
    def complete(self) -> bool:
        """True if all pieces have arrived."""
        return len(self._bodies) == len(self._lengths_due)

    def add(self, piece: memoryview) -> None:
        """Adds the next piece. Raises DecodeError if it does not fit, SharedMemoryError when memory runs out."""
        if self.complete:
            raise msgspec.DecodeError("more pieces than announced")
        length = self._lengths_due[len(self._bodies)]
        if self._body is None:
            in_file = length >= shared.threshold and not self._portable
            self._body = MemoryFile.empty(length) if in_file else bytearray()  # grows with each piece
        if self._filled + piece.nbytes > length:
            raise msgspec.DecodeError("a piece is longer than announced")
        if isinstance(self._body, MemoryFile):
            self._body.append(piece)
        else:
            self._body += piece
        self._filled += piece.nbytes
        if self._filled == length:
            if isinstance(self._body, MemoryFile):
                self._body.seal()
            self._bodies.append(self._body)
            self._body, self._filled = None, 0
            self._skip_empty()

    def _skip_empty(self) -> None:
        while not self.complete and self._lengths_due[len(self._bodies)] == 0:
            self._bodies.append(b"")

    def parcel(self) -> Parcel:
        """Returns the whole message's body."""
        return Parcel(self._bodies, hops=self._hops)


def unpack(frame0: bytes, start: int) -> tuple[Header, int, bool]:
    """Returns header, relays passed, and whether pieces follow. Raises msgspec.DecodeError or struct.error."""
    hops, chunked = ENVELOPE.unpack_from(frame0, start)
    return decode_header(memoryview(frame0)[start + ENVELOPE.size :]), hops, chunked == 1


def attach(header: Header, frames: Sequence[Body]) -> list[Body]:
    """Returns all bodies in order: frames for those in band, memory files for the others, which are opened now.

    Raises SharedMemoryError, or DecodeError if the frames do not fit the header.
    """
    table = header.buffers
    header.buffers = ()
    in_band = iter(frames)
    try:
        return [next(in_band) if entry[1] == IN_BAND else _opened(entry) for entry in table]
    except StopIteration:
        raise msgspec.DecodeError("fewer frames than the header names") from None


def _opened(entry: tuple[int, ...]) -> Body:
    if len(entry) == len(("pid", "fd", "length")):
        return MemoryFile.of_process(*entry)
    try:
        return DeviceFile.of_process(*entry)
    except OSError as error:
        raise SharedMemoryError(
            f"cannot take over the GPU memory of a peer on this host ({error.strerror}). If the processes may not "
            "trace each other (containers, yama), set MONARCH_NB_PORTABLE=1 in all of them."
        ) from error


class Unpacker:
    """Turns one peer's items into messages: opens memory files, puts pieces together."""

    def __init__(self, *, portable: bool, back: Callable[[int], None]) -> None:
        """`back` returns a loan to the peer; any thread."""
        self.ready: deque[tuple[Header, Parcel, int, int]] = deque()  # with the charge to return, and its incarnation
        self.refused: deque[tuple[Header | None, str, int, int]] = deque()  # None: not even a header
        self._portable = portable
        self._give_back = back
        self._assembly: Assembly | None = None

    def take(self, item: Item, charge: int, incarnation: int) -> None:
        """Takes the next item in order. Called before the link can acknowledge it. Raises nothing."""
        header: Header | None = None
        try:
            if item.head[0] == _CHUNK:
                self._piece(item)
                return
            self.broken()
            header, hops, chunked = unpack(item.head, PREFIX_SIZE)
            if chunked:
                self._assembly = Assembly(header, hops, item.frames[0], portable=self._portable)
                self._assembly.charge, self._assembly.incarnation = charge, incarnation
                self._finish()
            elif header.buffers:
                self.ready.append((header, self._attached(header, item, hops), charge, incarnation))
            else:
                self.ready.append((header, Parcel(item.frames, hops=hops), charge, incarnation))
        except _MALFORMED as error:
            self.refused.append((None, f"{type(error).__name__}: {error}", charge, incarnation))
        except (TransportError, MemoryError) as error:
            self.refused.append((header, str(error) or "out of memory", charge, incarnation))

    def _attached(self, header: Header, item: Item, hops: int) -> Parcel:
        loan = Loan(header.loan, self._give_back)  # returned at once if the files cannot be opened
        header.loan = 0
        bodies = attach(header, item.frames)
        for body in bodies:
            if type(body) is MemoryFile:
                body.loan = loan
        return Parcel(bodies, hops=hops)

    def _piece(self, item: Item) -> None:
        assembly = self._assembly
        if assembly is None:  # the rest of an abandoned message
            return
        try:
            for piece in item.frames:
                assembly.add(memoryview(piece))
            self._finish()
        except _MALFORMED as error:
            self._assembly = None
            self.refused.append((None, f"{type(error).__name__}: {error}", assembly.charge, assembly.incarnation))
        except (TransportError, MemoryError) as error:
            self._assembly = None
            self.refused.append((assembly.header, str(error) or "out of memory", assembly.charge, assembly.incarnation))

    def _finish(self) -> None:
        assembly = self._assembly
        if assembly is not None and assembly.complete:
            self._assembly = None
            self.ready.append((assembly.header, assembly.parcel(), assembly.charge, assembly.incarnation))

    def broken(self) -> None:
        """Drops the message in assembly, whose missing pieces will not arrive; its sender knows."""
        assembly, self._assembly = self._assembly, None
        if assembly is not None:
            self.refused.append((None, "the rest of a large message never came", assembly.charge, assembly.incarnation))
