"""What follows a link's prefix: one byte string (envelope and header) and the body's frames."""

import os
import struct
from collections.abc import Sequence
from typing import Any

import msgspec

from monarch_nb.transport.parcel import Body, Parcel, length_of
from monarch_nb.transport.shared import MemoryFile
from monarch_nb.wire.header import Header, decode_header, encode_header

ENVELOPE = struct.Struct("<BBxx")  # relays passed, 1 if pieces of it follow
WHOLE = [ENVELOPE.pack(hops, 0) for hops in range(256)]  # by relays passed
CHUNKED = [ENVELOPE.pack(hops, 1) for hops in range(256)]
IN_BAND = -1  # in place of a descriptor in Header.buffers


class Item:
    """One message, or one piece of it, as it travels on a link; links keep it until it is acknowledged."""

    __slots__ = ("bodies", "frames", "head", "header", "hops")

    def __init__(
        self,
        head: bytes,
        frames: Sequence[Any],
        header: Header | None = None,
        bodies: tuple[Body, ...] = (),
        hops: int = 0,
    ) -> None:
        self.head = head  # sent: envelope and header; received: the whole first frame, prefix included
        self.frames = frames  # further frames
        self.header = header  # sent: says what failed
        self.bodies = bodies  # sent: keeps memory files open
        self.hops = hops


def pack_whole(header: Header, parcel: Parcel) -> Item:
    """All bodies as frames."""
    frames = [body.view() if type(body) is MemoryFile else body for body in parcel.bodies]
    return Item(WHOLE[parcel.hops] + encode_header(header), frames, header, parcel.bodies, parcel.hops)


def pack_local(header: Header, parcel: Parcel, loan: int = 0) -> Item:
    """For a peer on this host: large bodies by descriptor, perhaps on loan, the rest as frames."""
    bodies = parcel.bodies
    if parcel.in_files:
        pid = os.getpid()
        table = tuple((pid, b.fd, b.length) if type(b) is MemoryFile else (0, IN_BAND, length_of(b)) for b in bodies)
        for body in bodies:
            if type(body) is MemoryFile:
                if body.loan is not None:
                    body.loan.void()
                if body.entry is not None and not loan:
                    body.entry.given = True
        encoded = encode_header(msgspec.structs.replace(header, buffers=table, loan=loan))
        frames: Sequence[Any] = [b for b in bodies if type(b) is not MemoryFile]
    else:
        encoded = encode_header(header)
        frames = bodies
    return Item(WHOLE[parcel.hops] + encoded, frames, header, bodies, parcel.hops)


def unpack(frame0: bytes, start: int) -> tuple[Header, int, bool]:
    """Header, relays passed, and whether pieces follow. Raises msgspec.DecodeError or struct.error."""
    hops, chunked = ENVELOPE.unpack_from(frame0, start)
    return decode_header(memoryview(frame0)[start + ENVELOPE.size :]), hops, chunked == 1


def attach(header: Header, frames: Sequence[Body]) -> list[Body]:
    """All bodies in order: frames for those in band, memory files for the others, which are opened here and now.

    Raises SharedMemoryError, or DecodeError if the frames do not fit the header.
    """
    table = header.buffers
    header.buffers = ()
    in_band = iter(frames)
    try:
        return [next(in_band) if fd == IN_BAND else MemoryFile.of_process(pid, fd, length) for pid, fd, length in table]
    except StopIteration:
        raise msgspec.DecodeError("fewer frames than the header names") from None
