"""Arguments in another form: encoded, to be sent again without being decoded, or held by another actor."""

import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from monarch_nb.wire import OutFrame, decode, in_memory


class EncodedObject:
    """The frames of an encoded object, copied so that they do not change. Pickles as it is."""

    __slots__ = ("_frames",)

    def __init__(self, frames: Sequence[OutFrame]) -> None:
        parts = [in_memory(frame) for frame in frames]
        self._frames: tuple[bytes | bytearray, ...] = (*map(bytes, parts[:1]), *map(bytearray, parts[1:]))

    def load(self, context: object = None) -> Any:
        """Decodes and returns the object; its buffers are copies."""
        return decode([self._frames[0], *(bytearray(frame) for frame in self._frames[1:])], context)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return sum(len(frame) for frame in self._frames)

    def __reduce__(self) -> tuple[object, ...]:
        return EncodedObject, ((self._frames[0], *(pickle.PickleBuffer(frame) for frame in self._frames[1:])),)


class LentArguments(ABC):
    """Replaces the arguments of a message: their holder lends them when the call begins, and waits for its end."""

    @abstractmethod
    def bound(self, method: Callable[..., object], *, replies: bool, is_async: bool) -> "Callable[[], object]":
        """Returns the method as a function without arguments: a coroutine function for an actor with an event loop.

        It waits until the arguments are there, and notifies their holder at the end. If they will never be there, it
        raises if the sender wants a reply, else it returns without calling the method.
        """
