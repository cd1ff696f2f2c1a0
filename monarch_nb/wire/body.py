"""Bodies of messages: Python objects to frames and back.

Frame 0 is the pickle stream, protocol 5; the others are its out-of-band buffers. If a message contains code by
value, or large bytes outside of the stream, frame 0 starts with a byte that no pickle starts with, followed by
the length (u32) and the pickle of (class units, sources, places), and then the stream. `places` are offsets in the
stream at which the last frames belong. Small buffers share frames (`Pieces`), whose table then precedes all else.
"""

import ctypes
import functools
import pickle
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from types import NoneType
from typing import TYPE_CHECKING, Any, Protocol, overload

from monarch_nb._package import more
from monarch_nb.gpu import DeviceFile
from monarch_nb.settings import settings
from monarch_nb.wire.code import Cargo, install
from monarch_nb.wire.pickler import Pickler
from monarch_nb.wire.tensors import without_modes

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


class _Current(threading.local):
    context: object = None


_current = _Current()


def current_codec() -> object:
    """Returns the `context` of the innermost encode or decode on this thread; None outside of one.

    Objects read it in `__reduce__` and `__setstate__` to bind themselves to the sending or the receiving process.
    """
    return _current.context


def enter_codec(context: object) -> object:
    """Makes `context` the current one of this thread. Returns the argument for `leave_codec`."""
    previous = _current.context
    _current.context = context
    return previous


def leave_codec(previous: object) -> None:
    """Undoes the `enter_codec` that returned `previous`."""
    _current.context = previous


PACKED = 2  # first byte of a frame 0 with a table
_FEWEST_BUFFERS = 4  # the fewest small buffers for a table
_SMALL_BUFFER = 256 * 1024  # bytes; larger buffers are frames of their own
_FULL_PIECE = 4 << 20  # bytes of buffers in one frame
_ALIGNED = 64
_APART = 0xFFFFFFFF
_HEAD = struct.Struct("<BI")
_LARGE_PAGE = 2 << 20  # bytes; the size of a large page
_WORTH_ADVISING = 2 * _LARGE_PAGE
_MADV_HUGEPAGE = 14  # MADV_HUGEPAGE on Linux
_GAP = memoryview(bytes(_ALIGNED))
_IN_MEMORY = (bytes, bytearray, memoryview)
_ATOMS = frozenset({NoneType, bool, int, float, str})
_SHORT = 4096  # bytes
_TINY = 24  # bytes; no class or function has a name that short, so no tensor is created
_FEW = 32  # most members of a container to check one by one
_LARGE = 256 * 1024  # bytes; above, a piece of the stream is a frame of its own
_NONE = pickle.dumps(None, 5)
_EXTENDED = 1  # first byte of a frame 0 with a prologue
_PROLOGUE = struct.Struct("<BI")


class FileBuffer(Protocol):
    """A buffer that is still in a file."""

    length: int  # bytes

    def private(self) -> memoryview:
        """Returns its content as writable memory of its own."""

    def read_into(self, target: memoryview) -> None:
        """Copies all of it into memory of the same length."""


Frame = bytes | bytearray | memoryview


class Pieces:
    """Buffers that become one frame when copied: they may still be the caller's own memory."""

    __slots__ = ("nbytes", "views")

    def __init__(self) -> None:
        self.views: list[memoryview] = []  # with the gaps between them
        self.nbytes = 0

    def add(self, view: memoryview) -> bool:
        """Adds one buffer; False if this is full."""
        if self.nbytes + view.nbytes > _FULL_PIECE:
            return False
        self.views.append(view)
        self.nbytes += view.nbytes
        if gap := -view.nbytes % _ALIGNED:
            self.views.append(_GAP[:gap])
            self.nbytes += gap
        return True

    def copy_into(self, target: memoryview) -> None:
        """Copies all of it to the start of writable memory."""
        start = 0
        for view in self.views:
            end = start + view.nbytes
            target[start:end] = view
            start = end

    def __len__(self) -> int:
        return self.nbytes

    def __bytes__(self) -> bytes:
        return b"".join(self.views)


MemoryFrame = Frame | Pieces
InFrame = Frame | FileBuffer
OutFrame = MemoryFrame | DeviceFile


def size_of(frames: Sequence[OutFrame]) -> int:
    """Returns the bytes in frames."""
    size = 0
    for frame in frames:
        size += len(frame) if isinstance(frame, (bytes, bytearray)) else frame.nbytes
    return size


def in_memory(frame: OutFrame | InFrame) -> Frame:
    """Returns a frame as bytes in memory."""
    if isinstance(frame, Pieces):
        return bytes(frame)
    return frame if isinstance(frame, _IN_MEMORY) else frame.private()


def _pack(first: bytes | bytearray, buffers: Sequence[Any]) -> list[OutFrame]:
    """Returns the frames of a message of a frame 0 and its contiguous buffers, in `Pieces` where that saves frames.

    Buffers are memoryviews; files of a GPU are large.
    """
    sizes = [view.nbytes if view.nbytes < _SMALL_BUFFER else _APART for view in buffers]
    if len(sizes) - sizes.count(_APART) < _FEWEST_BUFFERS:
        return [first, *buffers]
    together = [Pieces()]
    apart = []
    for view, size in zip(buffers, sizes, strict=True):
        if size == _APART:
            apart.append(view)
        elif not together[-1].add(view):
            together.append(Pieces())
            together[-1].add(view)
    table = struct.pack(f"<{len(sizes)}I", *sizes)
    return [b"".join((_HEAD.pack(PACKED, len(sizes)), table, first)), *apart, *together]


def _unpack(first: memoryview, frames: Sequence[InFrame]) -> tuple[memoryview, list[InFrame]]:
    """Returns frame 0 without its table, and the buffers in order, without a copy; frames that are none follow.

    Raises UnpicklingError or struct.error if the frames do not match the table.
    """
    _, count = _HEAD.unpack_from(first)
    end = _HEAD.size + 4 * count
    sizes = struct.unpack(f"<{count}I", first[_HEAD.size : end])
    apart = sizes.count(_APART)
    alone, shared = iter(frames[:apart]), iter(frames[apart:])
    buffers: list[InFrame] = []
    room = memoryview(b"")
    start = 0
    for size in sizes:
        if size == _APART:
            buffers.append(next(alone, b""))
            continue
        if start + size > room.nbytes:
            room, start = _memory(next(shared, b"")), 0
            if size > room.nbytes:
                raise pickle.UnpicklingError("a message lacks the end of its buffers")
        buffers.append(room[start : start + size])
        start += size + -size % _ALIGNED
    if len(frames) < apart:
        raise pickle.UnpicklingError("a message lacks some of its buffers")
    return first[end:], [*buffers, *shared]


def _memory(frame: InFrame) -> memoryview:
    mapped = frame if isinstance(frame, _IN_MEMORY) else frame.private()
    return memoryview(mapped).cast("B")


class Encoded:
    """An encoded object, copied: it may be sent many times, and `encode` accepts it."""

    __slots__ = ("frames",)

    def __init__(self, frames: Sequence[Any]) -> None:
        self.frames = frames  # bytes, and buffers in files


class MessageTooLargeError(ValueError):
    """A message that leaves its process has more bytes than `codec_max_frame_length` allows."""


@overload
def encode(
    obj: object, context: object = None, *, pickler: Callable[[Cargo], Pickler] | None = None
) -> list[MemoryFrame]: ...
@overload
def encode(obj: object, context: object = None, *, gpu: bool) -> list[OutFrame]: ...
def encode(
    obj: object, context: object = None, *, gpu: bool = False, pickler: Callable[[Cargo], Pickler] | None = None
) -> Sequence[OutFrame]:
    """Returns the frames of `obj`. Those after the first may be the caller's own memory: copy them before it changes.

    `context` is what `current_codec()` returns meanwhile. With `gpu`, large tensors of a GPU are files of it
    (`gpu.DeviceFile`) among the frames. `pickler` creates another pickler than the usual one. Raises errors of the
    objects' own pickling.
    """
    if obj is None:
        return [_NONE]
    if _is_plain(obj, 3):
        return [pickle.dumps(obj, 5)]
    if type(obj) is Encoded:
        return [*obj.frames]
    previous = enter_codec(context)
    try:
        cargo = Cargo()
        writer = Pickler(cargo, gpu=gpu) if pickler is None else pickler(cargo)
        with without_modes():
            writer.dump(obj)
            chunks, frames = writer.chunks, writer.buffers
            if not cargo.classes and not writer.files and max(map(len, chunks)) < _LARGE:
                first = chunks[0] if len(chunks) == 1 else b"".join(chunks)
                return _pack(first, frames) if len(frames) > 1 else [first, *frames]
            cargo.files.update(writer.files)
            units, sources = cargo.pack(_unit_pickler)
    finally:
        leave_codec(previous)
    stream, offsets, pieces = _set_apart(chunks)
    prologue = pickle.dumps(([tuple(unit) for unit in units], sources, offsets), 5)
    first = b"".join((_PROLOGUE.pack(_EXTENDED, len(prologue)), prologue, *stream))
    return [*_pack(first, frames), *pieces]


def check_size(frames: Sequence[OutFrame]) -> None:
    """Raises MessageTooLargeError for the body of a message that is above `codec_max_frame_length`."""
    size = size_of(frames)
    most = settings.codec_max_frame_length
    if size > most:
        raise MessageTooLargeError(
            f"a message of {size:,} bytes is larger than codec_max_frame_length ({most:,}): send it in parts, or "
            "monarch.config.configure(codec_max_frame_length=...)" + more("configuration.md#keys-that-do-something")
        )


def decode(frames: Sequence[InFrame], context: object = None) -> Any:
    """Returns the object in `frames`. Its memory may be those after the first: they should be private and writable.
    Those in files are mapped, or read into place.

    Executes whatever the sender's pickle contains: only for frames of trusted peers.
    """
    first = frames[0] if isinstance(frames[0], _IN_MEMORY) else frames[0].private()
    previous = enter_codec(context)
    try:
        if len(first) <= _TINY:
            return pickle.loads(first)
        with without_modes():
            buffers = frames[1:]
            if first[0] == PACKED:
                first, buffers = _unpack(memoryview(first), buffers)
            if first[0] != _EXTENDED:
                return pickle.loads(first, buffers=_mapped(buffers))
            return _decode_extended(memoryview(first), buffers)
    finally:
        leave_codec(previous)


def _mapped(frames: Sequence[InFrame]) -> list[Frame]:
    return [frame if isinstance(frame, _IN_MEMORY) else frame.private() for frame in frames]


def _decode_extended(first: memoryview, frames: Sequence[InFrame]) -> Any:
    start = _PROLOGUE.size + _PROLOGUE.unpack_from(first)[1]
    units, sources, offsets = pickle.loads(first[_PROLOGUE.size : start])
    # Held until the instances in the body hold them.
    classes = install(units, sources) if units or sources else None
    stream = first[start:]
    if not offsets:
        result = pickle.loads(stream, buffers=_mapped(frames))
    else:
        count = len(frames) - len(offsets)
        reader: Any = _Reader(stream, offsets, frames[count:])
        result = pickle.Unpickler(reader, buffers=_mapped(frames[:count])).load()
    del classes
    return result


class _Reader:
    """A stream with large pieces put back in place; the pieces are copied once, to their final place."""

    def __init__(self, stream: memoryview, offsets: Sequence[int], pieces: Sequence[InFrame]) -> None:
        self._parts: list[memoryview | FileBuffer] = []
        last = 0
        for offset, piece in zip(offsets, pieces, strict=True):
            content = memoryview(piece).cast("B") if isinstance(piece, _IN_MEMORY) else piece
            self._parts += [stream[last:offset], content]
            last = offset
        self._parts.append(stream[last:])
        self._parts.reverse()

    def read(self, size: int) -> bytes | memoryview:
        piece = self._take(size)
        if len(piece) == size:
            return piece
        pieces = [piece]
        while piece:
            size -= len(piece)
            piece = self._take(size)
            pieces.append(piece)
        return b"".join(pieces)

    def readinto(self, target: "WriteableBuffer") -> int:
        view, done = memoryview(target).cast("B"), 0
        if len(view) >= _LARGE:
            _ask_for_large_pages(view)
        while self._parts and not isinstance(piece := self._parts[-1], memoryview):
            self._parts.pop()
            if piece.length == len(view):  # usually: a separate piece is one object
                piece.read_into(view)
                return len(view)
            self._parts.append(piece.private())
        while done < len(view) and (piece := self._take(len(view) - done)):
            view[done : done + len(piece)] = piece
            done += len(piece)
        return done

    def readline(self) -> bytes:
        raise pickle.UnpicklingError("not a pickle of protocol 5")

    def _take(self, size: int) -> memoryview:
        """Returns up to `size` bytes, all from one part; nothing at the end."""
        while self._parts:
            part = self._parts.pop()
            if not isinstance(part, memoryview):
                part = part.private()
            if len(part) > size:
                self._parts.append(part[size:])
                return part[:size]
            if part:
                return part
        return memoryview(b"")


def _set_apart(chunks: Sequence[Frame]) -> tuple[list[Frame], list[int], list[Frame]]:
    """Returns the stream without its large chunks, their offsets in it, and the chunks."""
    stream: list[Frame] = []
    offsets: list[int] = []
    pieces: list[Frame] = []
    offset = 0
    for chunk in chunks:
        if len(chunk) < _LARGE:
            stream.append(chunk)
            offset += len(chunk)
        else:
            offsets.append(offset)
            pieces.append(chunk)
    return stream, offsets, pieces


def _unit_pickler(cargo: Cargo) -> Pickler:
    return Pickler(cargo, out_of_band=False)


def _is_plain(obj: Any, depth: int) -> bool:
    """Returns whether `obj` is small and consists of builtin values only, so that the C pickler suffices."""
    kind = type(obj)
    if kind in _ATOMS:
        return True
    if kind is bytes:
        return len(obj) <= _SHORT
    if not depth:
        return False
    if kind is tuple or kind is list:
        members = obj
    elif kind is dict:
        for key in obj:
            if type(key) not in _ATOMS:
                return False
        members = obj.values()
    else:
        return False
    if len(obj) > _FEW:
        return False
    for member in members:  # noqa: SIM110  # twice as fast as all()
        if type(member) not in _ATOMS and not _is_plain(member, depth - 1):
            return False
    return True


def _ask_for_large_pages(target: memoryview) -> None:
    """Requests large pages for memory that is not written to yet: writable, contiguous. Skips small memory."""
    if target.nbytes < _WORTH_ADVISING:
        return
    advise = _madvise()
    if advise is not None:
        start = ctypes.addressof(ctypes.c_char.from_buffer(target))
        first = -(-start // _LARGE_PAGE) * _LARGE_PAGE
        advise(first, (start + target.nbytes) // _LARGE_PAGE * _LARGE_PAGE - first, _MADV_HUGEPAGE)


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    if sys.platform != "linux":
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function
