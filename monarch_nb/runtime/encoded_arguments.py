"""An encoded object that is kept, and sent again without being opened: the arguments an actor was spawned with."""

import pickle
from collections.abc import Sequence
from typing import Any

from monarch_nb.wire import decode


class EncodedObject:
    """The frames of an encoded object, copied so that nobody changes them. Pickles as it is."""

    __slots__ = ("_frames",)

    def __init__(self, frames: Sequence[Any]) -> None:
        self._frames = tuple(bytes(frame) if index == 0 else bytearray(frame) for index, frame in enumerate(frames))

    def load(self, context: Any = None) -> Any:
        """The object; buffers in it are its own."""
        return decode([self._frames[0], *(bytearray(frame) for frame in self._frames[1:])], context)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return sum(len(frame) for frame in self._frames)

    def __reduce__(self) -> Any:
        return EncodedObject, ((self._frames[0], *(pickle.PickleBuffer(frame) for frame in self._frames[1:])),)
