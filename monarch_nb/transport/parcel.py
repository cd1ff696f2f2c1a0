"""Parcel: the body of one message, apart from its header."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import msgspec

from monarch_nb.gpu import DeviceFile
from monarch_nb.transport import shared
from monarch_nb.transport.shared import MemoryFile
from monarch_nb.wire import OutFrame, Pieces, msgpack_decoder
from monarch_nb.wire.header import Header, Kind
from monarch_nb.wire.plain import decode_plain

Body: TypeAlias = bytes | bytearray | memoryview | MemoryFile | DeviceFile


def length_of(body: Body) -> int:
    """Returns the bytes in one body."""
    if isinstance(body, (MemoryFile, DeviceFile)):
        return body.length
    return body.nbytes if isinstance(body, memoryview) else len(body)


class Parcel:
    """A pickle stream (frame 0) and the buffers that belong to it.

    `Node.snapshot` makes one, and the handler gets one. It is immutable and may be sent many times.
    """

    __slots__ = ("_frames", "bodies", "hops", "in_files", "lane", "nbytes", "on_gpu", "origin")

    def __init__(self, bodies: Sequence[Body] = (), *, hops: int = 0) -> None:
        self.bodies: tuple[Body, ...] = tuple(bodies)
        nbytes = 0
        in_files = on_gpu = False
        for body in self.bodies:
            if type(body) is bytes:
                nbytes += len(body)
            else:
                nbytes += length_of(body)
                in_files = in_files or type(body) is MemoryFile
                on_gpu = on_gpu or type(body) is DeviceFile
        self.nbytes = nbytes
        self.in_files = in_files  # whether any body is in a memory file
        self.on_gpu = on_gpu  # whether any body is in a file of a GPU
        self.hops = hops  # relays passed
        self.lane = 0  # the lane on which it arrived
        self.origin: tuple[Any, int, int] | None = None  # (peer, charge, peer's incarnation) until consumed
        self._frames: list[bytes | memoryview] | None = None

    @property
    def frames(self) -> list[bytes | memoryview]:
        """Frame 0 as bytes; the others as writable buffers that belong to this parcel alone. Mapped at first use."""
        if self._frames is None:
            self._frames = [_first(body) if index == 0 else _private(body) for index, body in enumerate(self.bodies)]
        return self._frames

    @property
    def parts(self) -> list[Body]:
        """The frames for `decode`, without mapping memory files."""
        if self._frames is not None:
            return list(self._frames)
        return [
            body if index and type(body) is MemoryFile else _private(body) if index else _first(body)
            for index, body in enumerate(self.bodies)
        ]

    def on_host(self, *, portable: bool) -> "Parcel":
        """Returns the parcel for a peer that does not share the GPU: its files are copied to the memory of the host."""
        bodies: list[Body] = []
        for body in self.bodies:
            if type(body) is not DeviceFile:
                bodies.append(body)
            elif portable:
                bodies.append(bytes(body.view()))
            else:
                bodies.append(MemoryFile.holding(body.view()))
        return Parcel(bodies, hops=self.hops)

    def clone(self) -> "Parcel":
        """Returns another parcel with the same content and private buffers of its own."""
        return Parcel([bytes(body) if isinstance(body, bytearray) else body for body in self.bodies], hops=self.hops)

    def close(self) -> None:
        """Releases everything; buffers that were passed on stay valid. Idempotent."""
        self.bodies = ()
        self._frames = None

    def __repr__(self) -> str:
        return f"<Parcel of {len(self.bodies)} frames, {self.nbytes} bytes>"


def _first(body: Body) -> bytes | memoryview:
    if isinstance(body, bytes):
        return body
    assert not isinstance(body, DeviceFile), "the pickle stream is on a GPU"
    return body.private() if isinstance(body, MemoryFile) else memoryview(body)


def _private(body: Body) -> memoryview:
    if isinstance(body, (MemoryFile, DeviceFile)):
        return body.private()
    return memoryview(body if isinstance(body, bytearray) else bytearray(body))


def snapshot(
    frames: Sequence[OutFrame | MemoryFile],
    *,
    portable: bool = False,
    hold: Callable[[memoryview | Pieces], MemoryFile] = MemoryFile.holding,
) -> Parcel:
    """Copies the buffers, so that later changes by the caller have no effect.

    Buffers of `shared.threshold` bytes and more go into one memory file each, made by `hold`, unless `portable`. Needs
    contiguous buffers. Raises SharedMemoryError when memory runs out.
    """
    bodies: list[Body] = []
    for frame in frames:
        if type(frame) is bytes and (portable or len(frame) < shared.threshold):
            bodies.append(frame)  # immutable: nothing to copy
            continue
        if isinstance(frame, (MemoryFile, DeviceFile)):
            bodies.append(frame)  # of another parcel, also immutable
            continue
        data = frame if isinstance(frame, Pieces) else memoryview(frame).cast("B")
        if portable or data.nbytes < shared.threshold:
            bodies.append(bytes(data))
        else:
            bodies.append(hold(data))
    return Parcel(bodies)


_reasons = msgpack_decoder(tuple[str])


def reason_parcel(reason: str) -> Parcel:
    """Returns the body of a returned message."""
    return Parcel([msgspec.msgpack.encode((reason,))])


def reason_of(parcel: Parcel) -> str:
    """Returns why a message was returned; a short text where its body has no reason."""
    try:
        return decode_plain(parcel.frames[0], _reasons)[0]
    except (IndexError, msgspec.DecodeError):
        return "it was returned"


def returned(header: Header, by: str) -> Header:
    """Returns the header of an undeliverable message on its return; `status` is its kind, the body has the reason."""
    return msgspec.structs.replace(
        header, kind=int(Kind.RETURNED), dst=header.src, src=by, status=int(header.kind), buffers=()
    )


def missed(reply: Header, by: str) -> Header:
    """Returns the header that reports a lost reply to the process that waits for it, rather than to its sender."""
    return Header(
        int(Kind.RETURNED), reply.dst, by, port=reply.port, index=reply.index, status=int(Kind.CALL), call=reply.call
    )
