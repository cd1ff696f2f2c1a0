"""An encoded object that is kept, and sent again without being opened: the arguments an actor was spawned with."""

import pickle
from collections.abc import Sequence
from typing import Any

from monarch_nb.wire import OutFrame, decode, in_memory


class EncodedObject:
    """The frames of an encoded object, copied so that nobody changes them. Pickles as it is."""

    __slots__ = ("_frames",)

    def __init__(self, frames: Sequence[OutFrame]) -> None:
        held = [in_memory(frame) for frame in frames]
        self._frames: tuple[bytes | bytearray, ...] = (*map(bytes, held[:1]), *map(bytearray, held[1:]))

    def load(self, context: object = None) -> Any:
        """The object; buffers in it are its own."""
        return decode([self._frames[0], *(bytearray(frame) for frame in self._frames[1:])], context)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return sum(len(frame) for frame in self._frames)

    def __reduce__(self) -> tuple[object, ...]:
        return EncodedObject, ((self._frames[0], *(pickle.PickleBuffer(frame) for frame in self._frames[1:])),)
