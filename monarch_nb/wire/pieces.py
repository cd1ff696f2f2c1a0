"""Many small buffers of a message travel as few frames: each frame costs more on its way than the bytes in it.

Where there are enough of them, frame 0 begins with a table (a byte that no pickle starts with, u32 count, a u32 for
each buffer: its size, or `_APART` for one that is a frame of its own). The frames after it are those apart, and then
those that hold the others one after the other, each buffer at a multiple of 64 bytes of its frame. Who keeps one of
the small buffers keeps the frame that it is in: 4 MiB at most.
"""

import pickle
import struct
from collections.abc import Sequence
from typing import Any

__all__ = ["PACKED", "Pieces", "pack", "unpack"]

PACKED = 2  # first byte of a frame 0 with a table
_FEWEST = 4  # small buffers that are worth a table
_SMALL = 256 * 1024  # bytes; larger buffers are frames of their own
_FULL = 4 << 20  # bytes of buffers in one frame
_ALIGNED = 64
_APART = 0xFFFFFFFF
_HEAD = struct.Struct("<BI")
_GAP = memoryview(bytes(_ALIGNED))


class Pieces:
    """Buffers that are one frame once they are copied: they may still be the caller's own memory."""

    __slots__ = ("nbytes", "views")

    def __init__(self) -> None:
        self.views: list[memoryview] = []  # with the gaps between them
        self.nbytes = 0

    def add(self, view: memoryview) -> bool:
        """Take one more in, unless this is full."""
        if self.nbytes + view.nbytes > _FULL:
            return False
        self.views.append(view)
        self.nbytes += view.nbytes
        if gap := -view.nbytes % _ALIGNED:
            self.views.append(_GAP[:gap])
            self.nbytes += gap
        return True

    def copy_into(self, target: memoryview) -> None:
        """Copy all of it to the beginning of writable memory."""
        start = 0
        for view in self.views:
            end = start + view.nbytes
            target[start:end] = view
            start = end

    def __len__(self) -> int:
        return self.nbytes

    def __bytes__(self) -> bytes:
        return b"".join(self.views)


def pack(first: bytes, buffers: Sequence[memoryview]) -> list[Any]:
    """The frames of a message of a frame 0 and its contiguous buffers, in `Pieces` where that saves frames."""
    sizes = [view.nbytes if view.nbytes < _SMALL else _APART for view in buffers]
    if len(sizes) - sizes.count(_APART) < _FEWEST:
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


def unpack(first: memoryview, frames: Sequence[Any]) -> tuple[memoryview, list[Any]]:
    """Frame 0 without its table, and the buffers in their order, without a copy; frames that are none follow.

    Raises UnpicklingError or struct.error where the frames are not those of the table.
    """
    _, count = _HEAD.unpack_from(first)
    end = _HEAD.size + 4 * count
    sizes = struct.unpack(f"<{count}I", first[_HEAD.size : end])
    apart = sizes.count(_APART)
    alone, others = iter(frames[:apart]), iter(frames[apart:])
    buffers: list[Any] = []
    room = memoryview(b"")
    start = 0
    for size in sizes:
        if size == _APART:
            buffers.append(next(alone, None))
            continue
        if start + size > room.nbytes:
            room, start = _memory(next(others, b"")), 0
            if size > room.nbytes:
                raise pickle.UnpicklingError("a message lacks the end of its buffers")
        buffers.append(room[start : start + size])
        start += size + -size % _ALIGNED
    if len(frames) < apart:
        raise pickle.UnpicklingError("a message lacks some of its buffers")
    return first[end:], [*buffers, *others]


def _memory(frame: Any) -> memoryview:
    mapped = frame if isinstance(frame, bytes | bytearray | memoryview) else frame.private()
    return memoryview(mapped).cast("B")
