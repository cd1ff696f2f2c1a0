"""Who still refers to a tensor on the workers."""

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from monarch_nb.tensor.origin import Place
from monarch_nb.tensor.propagation import Meta, Plan

if TYPE_CHECKING:
    from monarch_nb.tensor.stream import Stream


class Reference:
    """Stands for a tensor on the workers, in all handles of it: with the last of them, the tensor goes.

    `stream` is that of its mesh, `number` its name there. `memory` it shares with its views, and with what it is a view
    of; None where there are none. `copied` says how it is made again, where it is a view that has memory of its own on
    the workers. `is_view` is true of any view.
    """

    __slots__ = ("__weakref__", "copied", "is_view", "memory", "number", "stream")

    def __init__(self, stream: "Stream", number: int) -> None:
        self.stream, self.number = stream, number
        self.is_view = False
        self.memory: Memory | None = None
        self.copied: Copied | None = None


class Memory:
    """What a tensor and its views are to the program. `copies` have memory of their own on the workers."""

    __slots__ = ("__weakref__", "copies")

    def __init__(self) -> None:
        self.copies: weakref.WeakSet[Reference] = weakref.WeakSet()


class Copied(NamedTuple):
    """From which tensor a view was copied that cuts a sharded dimension: by which plans, and which of their results."""

    base: Reference
    steps: tuple[tuple[Plan, int], ...]


class LiveEntry(weakref.ref[Reference]):
    """What the controller knows of a tensor. It tells of the end of its reference by `ended`, which gets the entry.

    That is a weak reference and no finalizer, since Ctrl-C may come in a finalizer, which then is cut off.
    """

    __slots__ = ("meta", "number", "place")

    number: int
    meta: Meta
    place: Place | None

    def __new__(  # noqa: D102
        cls, reference: Reference, ended: Callable[["LiveEntry"], None], meta: Meta, place: Place | None
    ) -> "LiveEntry":
        entry = super().__new__(cls, reference, ended)
        entry.number, entry.meta, entry.place = reference.number, meta, place
        return entry

    def __init__(self, *arguments: Any) -> None:
        pass
